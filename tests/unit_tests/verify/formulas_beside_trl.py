"""The independent trainer's formulas of losses give what TRL's own functions give; run by `test_formulas`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

from mega_rl.verify.rl.independent.formulas import Formulas, aggregation_weights, divergence
from mega_rl.verify.rl.independent.losses import CORRECTIONS, LOSSES, ResponseTokens
from mega_rl.verify.rl.inputs import algorithm_run
from mega_rl.verify.rl.rewards import lockstep_settings

LENGTHS = (7, 3, 5, 1)
PLAIN = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}
CLIP, GATES = {"clip_low": 0.2, "clip_high": 0.28}, {"tau_positive": 1.0, "tau_negative": 1.05}
OPSM = {"name": "opsm", "delta": 0.02}
# (aggregation, loss, its settings, correction) of the run, settings of TRL's trainer.
CASES: dict[str, tuple[tuple[str, str, dict[str, float], dict[str, object]], dict[str, object]]] = {
    "grpo": (("seq-mean-token-mean", "ppo", PLAIN, {}), {"loss_type": "grpo"}),
    "dapo": (("token-mean", "ppo", PLAIN, {}), {"loss_type": "dapo"}),
    "dr_grpo": (("seq-mean-token-sum-norm", "ppo", PLAIN, {}), {"loss_type": "dr_grpo"}),
    "dual clip": (("token-mean", "ppo", {**PLAIN, "dual_clip": 1.3}, {}), {"loss_type": "dapo", "delta": 1.3}),
    "gspo": (
        ("seq-mean-token-mean", "gspo", CLIP, {}),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (("token-mean", "cispo", {"cap": 1.3}, {}), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": (("seq-mean-token-mean", "sapo", GATES, {}), {"loss_type": "sapo"}),
    "opsm": (("token-mean", "ppo", PLAIN, OPSM), {"loss_type": "dapo", "off_policy_mask_threshold": 0.02}),
}


def rows() -> dict[str, Tensor]:
    """Return log-probs now, at the updates' start and of the sampler, [B, S] float64, advantages [B] and a mask."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = torch.randn(shape, generator=generator, dtype=torch.float64).exp().neg()
    moves = 0.3 * torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "anchor": logprobs + moves[0],
        "rollout": logprobs + moves[0] + moves[1] / 3,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.6], dtype=torch.float64),
        "mask": torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None],
    }


def of_follower(batch: dict[str, Tensor], run: tuple[str, str, dict[str, float], dict[str, object]]) -> Tensor:
    """Return the loss of a batch by the independent trainer's formulas."""
    aggregation, name, own, correction = run
    chosen = {"algorithm.loss": {"name": name, **own}, "algorithm.loss_aggregation": aggregation}
    chosen |= {"algorithm.correction": correction} if correction else {}
    settings = lockstep_settings(algorithm_run({"algorithm.advantage": "grpo", **chosen}).config)
    weights = aggregation_weights(list(zip((0, 0, 1, 1), LENGTHS, strict=True)), settings)
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(LENGTHS):
        numbers = (batch[name][i, :length] for name in ("logprobs", "anchor", "rollout"))
        blank = torch.zeros(length, 1)
        tokens = ResponseTokens(*numbers, batch["advantages"][i].expand(length), blank, None, 1.0)
        loss = LOSSES[settings.loss.name][0](tokens, settings.loss, Formulas())
        total = (
            total + weights[i] * (CORRECTIONS[settings.correction.name][0](tokens, settings.correction) * loss).sum()
        )
    return total


def of_trl(batch: dict[str, Tensor], settings: dict[str, Any], *, max_response_tokens: int) -> Tensor:
    """Return the loss of a batch by TRL's trainer, whose model is replaced by the log-probs at hand."""
    arguments = SimpleNamespace(
        delta=settings.pop("delta", None),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=False,
        steps_per_generation=1,
    )
    state: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (batch["logprobs"], batch["logprobs"].detach(), None),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "_metrics": {"train": defaultdict(list)},
        "_entropy_bonus_enabled": False,
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "args": arguments,
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_high": 0.28,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "max_completion_length": max_response_tokens,
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        **settings,
    }
    mask = batch["mask"].double()
    inputs = {
        **{"prompt_ids": torch.zeros(len(mask), 1).long(), "prompt_mask": torch.ones(len(mask), 1).long()},
        **{"completion_ids": torch.zeros_like(mask).long(), "completion_mask": mask},
        **{"advantages": batch["advantages"], "old_per_token_logps": batch["anchor"]},
        **{"sampling_per_token_logps": batch["rollout"], "num_items_in_batch": mask.sum()},
    }
    loss: Tensor = GRPOTrainer._compute_loss(SimpleNamespace(**state), None, inputs)
    return loss


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    """Return the derivative of a loss."""
    (result,) = torch.autograd.grad(loss, of)
    return result


@pytest.mark.parametrize("case", CASES)
def test_policy_loss_and_gradient_equal_trl(case: str) -> None:
    """In float64: sums in another order alone."""
    run, theirs = CASES[case]
    batch = rows()
    leaf = batch["logprobs"].requires_grad_()
    limit = algorithm_run({"algorithm.advantage": "grpo"}).config.rollout.max_new_tokens
    expected = of_trl(batch, dict(theirs), max_response_tokens=limit)
    loss = of_follower(batch, run)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(loss, leaf), gradient(expected, leaf), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_and_gradient_equal_trl(beta: float) -> None:
    """In float64; TRL's `generalized_jsd_loss` sums over tokens and divides by the number of rows."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 1, 6, 31, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=0.7, reduction="sum")
    loss = divergence(student[0], teacher[0], 0.7, beta).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(loss, student), gradient(expected, student), rtol=1e-12, atol=1e-14)
