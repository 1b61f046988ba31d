"""On-policy distillation: the student's own tokens, each judged by what a teacher thinks of it.

Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, on-policy with the reverse KL; Lu et al. 2025, "On-Policy
Distillation" (Thinking Machines Lab), whose per-token form discounts by 0. Alignment and masks of all tensors:
`mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.gae import gae
from mega_rl.algorithms.advantages.rloo import rloo
from mega_rl.config.schema.algorithms import DistillationSettings


@dataclass(frozen=True)
class Distillation(DistillationSettings):
    """Log-prob of the teacher, which is the reference, less the student's; needs neither rewards nor a critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        experience, mask = inputs.experience, inputs.experience.loss_mask
        advantages = distillation(experience.old_logprobs, experience.ref_logprobs, mask, gamma=self.gamma)
        if self.reward_weight:
            advantages = advantages + self.reward_weight * rloo(inputs.rewards, experience.prompt_index, mask)
        return advantages, torch.zeros_like(advantages)


def distillation(student: Tensor, teacher: Tensor, mask: Tensor, *, gamma: float = 0.0) -> Tensor:
    """Advantages [B, S] float32, 0 off the mask.

        A_t = sum over k >= t of gamma^(k - t) * (log q(y_k) - log p(y_k))

    student, teacher [B, S] float32, the log-probs of the sampled tokens under p and q; mask [B, S] bool; k counts the
    response tokens of the row. With gamma 1 the mean of A_t grad log p(y_t) is the descent of KL(p || q) over whole
    responses. With gamma 0 each token answers for itself: that of the KL at the sampled prefixes, without the part that
    steers towards prefixes on which both agree, and of far smaller variance.
    """
    gaps = torch.where(mask, teacher.float() - student.float(), 0.0)
    returns, _ = gae(gaps, torch.zeros_like(gaps), mask, lam=1.0, gamma=gamma)
    return returns
