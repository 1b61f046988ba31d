"""Limits on the mismatch of trainer and rollout engine: rounding passes, other weights do not."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config.schema.rollout import MismatchConfig
from mega_rl.trainer.mismatch import MismatchGuard, RolloutMismatchError, usual_limits
from mega_rl.types import Metrics, TokenOutputs
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout

TOKENS = 20_000


def compare(difference: Tensor, *, in_fp32: bool = False, **limits: Any) -> Metrics:
    """Compare log-probs that differ by `difference` [N] in the N response tokens of one row."""
    rollout = make_rollout([len(difference)])
    logprobs = rollout.rollout_logprobs.clone()
    logprobs[rollout.loss_mask] += difference.to(logprobs.dtype)
    settings = MismatchConfig(**{f"{name}_limit": value for name, value in limits.items()})
    guard = MismatchGuard(usual_limits(settings, in_fp32=in_fp32), ranks=FakeRanks())
    return guard(rollout, TokenOutputs(logprobs=logprobs))


def rounding(*large: float) -> Tensor:
    """[TOKENS] differences of bf16 engines: steps of 0.125 in a fifth of the tokens, and these large ones."""
    generator = torch.Generator().manual_seed(0)
    difference = 0.125 * (torch.rand(TOKENS, generator=generator) < 0.2)
    difference[: len(large)] = torch.tensor(large)
    return difference


def test_rounding_of_bf16_with_rare_large_differences_passes() -> None:
    """Routing that flips in a few tokens of a mixture; a limit of 1 nat on the largest would stop the run."""
    metrics = compare(rounding(1.4, 2.5, 6.0))
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(6.0, rel=1e-3)
    assert 0.02 < metrics["rollout/logprob_diff_mean"] < 0.04


@pytest.mark.parametrize(("temperature", "low", "high"), [(1.0, -4.5, 4.5), (1.1, -inf, -4.5), (0.9, 4.5, inf)])
def test_sampler_of_another_temperature_shows(temperature: float, low: float, high: float) -> None:
    """Tokens drawn at a temperature that is not the trainer's: the sum of log p + entropy, in its deviations."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(4_000, 16, generator=generator)
    drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    logprobs, rollout = logits.log_softmax(-1), make_rollout([4_000])
    outputs = [torch.zeros(1, 4_002) for _ in range(2)]
    outputs[0][rollout.loss_mask] = rollout.rollout_logprobs[rollout.loss_mask] = logprobs[torch.arange(4_000), drawn]
    outputs[1][rollout.loss_mask] = -(logprobs.exp() * logprobs).sum(-1)
    guard = MismatchGuard(usual_limits(MismatchConfig(), in_fp32=True), ranks=FakeRanks())
    metrics = guard(rollout, TokenOutputs(logprobs=outputs[0], entropy=outputs[1]))
    assert low < metrics["rollout/sampling_deviation"] < high
    assert "rollout/sampling_deviation" not in guard(rollout, TokenOutputs(logprobs=outputs[0]))
    cut = replace(guard, samples_all=False)(rollout, TokenOutputs(logprobs=outputs[0], entropy=outputs[1]))
    assert "rollout/sampling_deviation" not in cut


@pytest.mark.parametrize(
    ("difference", "options", "words"),
    [
        (
            rounding() + 0.2,
            {},
            "the mean differs by 0.2.* beyond rollout.mismatch.mean_limit=0.15; the worst is tok",
        ),
        (
            rounding(*[2.0] * 300),
            {"mean": 1.0},
            "a share of 0.015 of the tokens.* rollout.mismatch.share_limit=0.01",
        ),
        (rounding(1.4), {"in_fp32": True, "mean": 1.0}, "a token differs by 1.4.* rollout.mismatch.max_limit=1;"),
        (rounding(1.4), {"max": 1.2}, "a token differs by 1.4.* beyond rollout.mismatch.max_limit=1.2"),
        (rounding() * 0.05, {"in_fp32": True}, "the mean differs by .* beyond rollout.mismatch.mean_limit=0.001"),
        (rounding(nan), {}, "a log-prob is not finite"),
        (rounding(inf), {"mean": 9.0, "max": 99.0}, "a log-prob is not finite"),
    ],
)
def test_other_weights_stop_the_run(difference: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutMismatchError, match=words):
        compare(difference, **options)


def test_engines_in_fp32_pass_their_stricter_limits() -> None:
    assert compare(1e-5 * torch.ones(TOKENS), in_fp32=True)["rollout/logprob_diff_mean"] < 1e-4
