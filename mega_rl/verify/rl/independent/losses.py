"""Losses of a response's tokens, and weights for what sampled them, by the papers.

Liu 2025 is "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.verify.rl.independent import formulas
from mega_rl.verify.rl.independent.records import NamedSettings


@dataclass(frozen=True)
class ResponseTokens:
    """The tokens of one response, [n] float64 each."""

    logprobs: Tensor  # log-probs of the current policy, with gradient
    anchor: Tensor  # log-probs that ratios are taken to
    rollout: Tensor  # log-probs of what sampled
    advantages: Tensor
    student: Tensor  # logits of the policy now, [n, V], with gradient
    teacher: Tensor | None  # logits of the reference, if the loss reads them
    temperature: float

    @property
    def ratio(self) -> Tensor:
        """Return p / p_old of each token."""
        return torch.exp(self.logprobs - self.anchor)


def clipped(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return PPO's clipped term of each token (arXiv:1707.06347)."""
    return formulas.clipped_term(tokens.ratio, tokens.advantages, choice)


def of_sequences(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return the clipped term of the ratios' geometric mean s (GSPO, arXiv:2507.18071, eq. 5, 7).

    Where its tokens' advantages differ, s * p_t / sg(p_t) for token t, in value the same (GSPO-token, eq. 13 and 14).
    """
    mean = torch.exp((tokens.logprobs - tokens.anchor).mean())
    if bool((tokens.advantages == tokens.advantages[0]).all()):
        return formulas.clipped_term(mean.expand(len(tokens.anchor)), tokens.advantages, choice)
    of_token = mean.detach() * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    return formulas.clipped_term(of_token, tokens.advantages, choice)


def geometric_mean(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return -A times the geometric mean of the response's clipped ratios (GMPO, arXiv:2507.20673, eq. 4).

    Of each token the smaller of ratio^s and clip(ratio)^s counts, s the sign of the advantage.
    """
    advantage = float(tokens.advantages.mean())
    sign = 1.0 if advantage > 0 else -1.0
    log_ratio = tokens.logprobs - tokens.anchor
    near = torch.clamp(log_ratio, -choice["clip_low"], choice["clip_high"])
    mean = torch.minimum(sign * log_ratio, sign * near).mean()
    return (-advantage * torch.exp(sign * mean)).expand(len(log_ratio))


def capped(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return REINFORCE's loss weighted by the capped ratio (CISPO, arXiv:2506.13585, eq. 4)."""
    return -tokens.ratio.detach().clamp(max=choice["cap"]) * tokens.advantages * tokens.logprobs


def gated(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return -A * 4 / tau * sigmoid(tau * (ratio - 1)), not clipped (SAPO, arXiv:2511.20347)."""
    tau = torch.where(tokens.advantages > 0, choice["tau_positive"], choice["tau_negative"])
    return -tokens.advantages * 4 / tau / (1 + torch.exp(-tau * (tokens.ratio - 1)))


def masked_by_variation(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return REINFORCE's loss within a distance |p - p_old| of the sampled token (DPPO-TV, arXiv:2602.04879)."""
    distance = (tokens.logprobs.exp() - tokens.anchor.exp()).abs()
    return _masked(tokens, choice, distance)


def masked_by_divergence(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return REINFORCE masked by the binary KL(p_old || p) of each token (DPPO, arXiv:2602.04879)."""
    new, old = tokens.logprobs.exp(), tokens.anchor.exp()
    distance = old * torch.log(old / new) + (1 - old) * torch.log((1 - old) / (1 - new))
    return _masked(tokens, choice, distance)


def _masked(tokens: ResponseTokens, choice: NamedSettings, distance: Tensor) -> Tensor:
    """Return REINFORCE by capped ratios, 0 for distant tokens that would move further away."""
    rises = tokens.logprobs > tokens.anchor
    away = torch.where(tokens.advantages > 0, rises, ~rises)
    trains = ~(away & (distance > choice["threshold"]))
    return torch.where(trains, capped(tokens, choice), 0.0)


def without_covariant(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return PPO's loss, without gradient on tokens of large covariance (Clip-Cov, arXiv:2505.22617, section 4)."""
    loss = clipped(tokens, choice)
    return torch.where(_covariance(tokens) >= choice["threshold"], loss.detach(), loss)


def punished_covariant(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return the plain ratio's loss, with |log ratio| on tokens of large covariance (KL-Cov, arXiv:2505.22617)."""
    loss = formulas.bounded_term(tokens.ratio * tokens.advantages, tokens.advantages, choice)
    moved = choice["coef"] * (tokens.logprobs - tokens.anchor).abs()
    return torch.where(_covariance(tokens) >= choice["threshold"], loss + moved, loss)


def _covariance(tokens: ResponseTokens) -> Tensor:
    """Return A * (log p - its mean over the response), a token's covariance (docs/algorithms.md)."""
    now = tokens.logprobs.detach()
    return tokens.advantages * (now - now.mean())


def from_teacher(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return the divergence from the teacher on the student's samples (GKD, arXiv:2306.13649, eq. 3, lambda 1)."""
    assert tokens.teacher is not None
    return formulas.divergence(tokens.student, tokens.teacher, tokens.temperature, choice["beta"])


# Name -> (formula, the settings that it reads; drift_coef is the trainer's, as the coefficients of entropy and KL).
LOSSES: Mapping[str, tuple[Callable[[ResponseTokens, NamedSettings], Tensor], frozenset[str]]] = {
    "ppo": (clipped, frozenset({"clip_low", "clip_high", "dual_clip"})),
    "gspo": (of_sequences, frozenset({"clip_low", "clip_high"})),
    "gmpo": (geometric_mean, frozenset({"clip_low", "clip_high"})),
    "cispo": (capped, frozenset({"cap", "drift_coef"})),
    "sapo": (gated, frozenset({"tau_positive", "tau_negative"})),
    "dppo_tv": (masked_by_variation, frozenset({"threshold", "cap", "drift_coef"})),
    "dppo_kl": (masked_by_divergence, frozenset({"threshold", "cap", "drift_coef"})),
    "clip_cov": (without_covariant, frozenset({"threshold", "clip_low", "clip_high", "dual_clip"})),
    "distillation": (from_teacher, frozenset({"beta"})),
    "kl_cov": (punished_covariant, frozenset({"threshold", "coef", "dual_clip"})),
}


def uncorrected(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return weights of 1."""
    return torch.ones_like(tokens.anchor)


def truncated(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return min(p_old / p_rollout, cap) of each token or response (Yao et al. 2025)."""
    log_ratio = tokens.anchor - tokens.rollout
    if choice.words["level"] == "sequence":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    return torch.exp(log_ratio).clamp(max=choice["cap"])


def within_band(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return p_old / p_rollout of each token inside [low, high], else 0 (IcePop, arXiv:2510.18855)."""
    ratio = torch.exp(tokens.anchor - tokens.rollout)
    return torch.where((ratio >= choice["low"]) & (ratio <= choice["high"]), ratio, 0.0)


def by_geometric_mean(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 1 if geometric mean p_old / p_rollout is in [low, high], else 0 (Liu 2025)."""
    return _accepted(float((tokens.anchor - tokens.rollout).mean().exp()), tokens, choice)


def by_product(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 1 for responses whose p_old / p_rollout is inside [low, high], else 0 (Liu 2025)."""
    return _accepted(float((tokens.anchor - tokens.rollout).sum().exp()), tokens, choice)


def _accepted(ratio: float, tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    weight = 1.0 if choice["low"] <= ratio <= choice["high"] else 0.0
    return weight * torch.ones_like(tokens.anchor)


def bad_and_distant(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 0 where A < 0 and mean log(p_rollout / p) > delta (OPSM, arXiv:2512.02556)."""
    distance = float((tokens.rollout - tokens.logprobs.detach()).mean())
    leaves_out = tokens.advantages < 0 if distance > choice["delta"] else torch.zeros(len(tokens.anchor)).bool()
    return torch.where(leaves_out, 0.0, torch.ones_like(tokens.anchor))


# Name -> (formula, the settings that it reads).
CORRECTIONS: Mapping[str, tuple[Callable[[ResponseTokens, NamedSettings], Tensor], frozenset[str]]] = {
    "none": (uncorrected, frozenset()),
    "tis": (truncated, frozenset({"level", "cap"})),
    "icepop": (within_band, frozenset({"low", "high"})),
    "geometric_rejection": (by_geometric_mean, frozenset({"low", "high"})),
    "sequence_rejection": (by_product, frozenset({"low", "high"})),
    "opsm": (bad_and_distant, frozenset({"delta"})),
}
