"""Metrics of a step against numpy in float64, and the same on one rank, on two and on four."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.mismatch import importance_metrics, importance_summary
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits
from mega_rl.trainer.step_metrics import NGRAM, experience_metrics, repeated_fractions, rollout_metrics
from mega_rl.types import Experience, Metrics, Rewards, Rollout, TokenOutputs, ends_of
from tests.helpers.fakes import FakeRanks
from tests.helpers.threads import on_simulated_ranks

PROMPTS, SAMPLES, WIDTH = 8, 4, 40
ROWS = PROMPTS * SAMPLES


class SimulatedRanks(FakeRanks):
    """One of several ranks, which gets sums."""

    def __init__(self, rank: int, size: int, total: Any) -> None:
        self.rank, self.size, self.total = rank, size, total

    def sum(self, tensor: Tensor) -> Tensor:
        return self.total(tensor)  # type: ignore[no-any-return]


def batch(*, rewards: Tensor | None = None) -> tuple[Rollout, Rewards, Experience]:
    """Responses of 1 to 36 tokens of four kinds, so that n-grams come back; a tool's tokens in the longer ones."""
    draw = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 4, (ROWS,), generator=draw)
    lengths = prompt + torch.randint(1, WIDTH - 3, (ROWS,), generator=draw)
    tokens = torch.randint(0, 2, (ROWS, WIDTH), generator=draw)
    columns = torch.arange(WIDTH)
    mask = (columns >= prompt[:, None]) & (columns < lengths[:, None]) & ~((columns > 30) & (columns < 33))
    noise = [torch.randn(ROWS, WIDTH, generator=draw) for _ in range(5)]
    logprobs = -noise[0].abs() * mask
    rollout = Rollout.from_rows(
        tokens,
        prompt_lengths=prompt,
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=logprobs + 0.3 * noise[1] * mask,
        end=ends_of(torch.rand(ROWS, generator=draw) < 0.7),
        prompt_index=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        sample_index=torch.arange(SAMPLES).repeat(PROMPTS),
    )
    if rewards is None:
        rewards = torch.randint(0, 5, (ROWS,), generator=draw) / 7
    experience = Experience.from_rows(
        tokens,
        prompt_lengths=prompt,
        lengths=lengths,
        loss_mask=mask,
        old_logprobs=logprobs,
        rollout_logprobs=rollout.rollout_logprobs,
        ref_logprobs=logprobs + 0.1 * noise[2],
        advantages=noise[3] * 3.0,
        values=noise[4] + 100.0,
        returns=noise[4] + 100.5 + noise[3],
    )
    return rollout, Rewards(rewards), experience


def metrics_of(rows: Tensor, ranks: Any) -> Metrics:
    """All of a step's metrics that need no model, of some rows on a rank."""
    rollout, rewards, experience = batch()
    own, kept = rollout[rows], experience[rows]  # type: ignore[index]
    guard = MismatchGuard(MismatchLimits(mean=10.0, share=1.0, max=100.0), ranks=ranks)
    return (
        rollout_metrics(own, rewards[rows], ranks)
        | experience_metrics(kept, ranks, has_reference=True, has_critic=True)
        | guard(own, TokenOutputs(logprobs=kept.old_logprobs))
    )


@pytest.mark.parametrize("size", [2, 4])
def test_the_metrics_are_those_of_one_rank(size: int) -> None:
    """Prompts are dealt out unevenly and out of order; the last of four ranks has none."""
    whole = metrics_of(torch.arange(ROWS), FakeRanks())
    place = (torch.arange(ROWS).div(SAMPLES, rounding_mode="floor") % 3).clamp(max=size - 1)

    def on_rank(rank: int) -> Any:
        return lambda total: metrics_of((place == rank).nonzero().flatten(), SimulatedRanks(rank, size, total))

    results = on_simulated_ranks([on_rank(rank) for rank in range(size)])
    assert len(whole) > 70
    for result in results:
        assert result == results[0]
        assert result == pytest.approx(whole, rel=1e-9, abs=1e-12)
        exact = [name for name in whole if name.startswith(("reward/", "rollout/right", "rollout/response"))]
        assert [result[name] for name in exact] == [whole[name] for name in exact]


def test_rewards_and_lengths_against_numpy() -> None:
    rollout, rewards, _ = batch()
    metrics = rollout_metrics(rollout, rewards, FakeRanks())
    tokens = rollout.loss_mask.sum(1).double().numpy()
    reward, finished = rewards.totals.double().numpy(), rollout.finished.numpy()
    groups = reward.reshape(PROMPTS, SAMPLES)
    means = groups.mean(1, keepdims=True)
    right, wrong = (groups > means).ravel(), (groups < means).ravel()
    expected = {"reward/group_std_mean": groups.std(1).mean()}
    expected |= {"reward/finished_mean": reward[finished].mean(), "reward/truncated_mean": reward[~finished].mean()}
    expected |= {"rollout/response_tokens_min": tokens.min(), "rollout/truncated_fraction": (~finished).mean()}
    expected["rollout/prompt_tokens_mean"] = rollout.prompt_lengths.double().numpy().mean()
    for name, chosen in (("", tokens >= 0), ("right_", right), ("wrong_", wrong), ("truncated_", ~finished)):
        expected[f"rollout/{name}response_tokens_mean"] = tokens[chosen].mean()
        for q in (10, 50, 90):
            expected[f"rollout/{name}response_tokens_p{q}"] = np.percentile(tokens[chosen], q)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_tokens_against_numpy() -> None:
    _, _, experience = batch()
    metrics = experience_metrics(experience, FakeRanks(), has_reference=True, has_critic=True)
    mask = experience.loss_mask.numpy()
    for area, column in (("advantage", experience.advantages), ("values", experience.values)):
        x = column.double().numpy()[mask]
        exact = {"std": x.std(), "min": x.min(), "max": x.max(), "mean": x.mean()}
        assert {end: metrics[f"{area}/{end}"] for end in exact} == pytest.approx(exact, rel=1e-9)
        for q in (5, 50, 95):
            value = np.percentile(x, q, method="inverted_cdf")
            assert metrics[f"{area}/p{q:02}"] == pytest.approx(value, rel=1 / 128)


def test_importance_weights_against_numpy() -> None:
    rollout, _, experience = batch()
    mask = rollout.loss_mask
    summary = importance_summary(experience.old_logprobs, rollout.rollout_logprobs, mask)
    metrics = importance_metrics(summary[None])
    trainer, sampler = (x.double().numpy() for x in (experience.old_logprobs, rollout.rollout_logprobs))
    ratio = trainer - sampler
    w = np.exp(ratio[mask.numpy()])
    products = np.array([np.exp(r[m].sum()) for r, m in zip(ratio, mask.numpy(), strict=True)])
    geometric = np.array([np.exp(r[m].mean()) for r, m in zip(ratio, mask.numpy(), strict=True)])
    expected = {
        "weight_min": w.min(), "weight_max": w.max(), "weight_mean": w.mean(),
        "effective_fraction": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "k3": (w - 1 - np.log(w)).mean(), "chi2": ((w - 1) ** 2).mean(),
        "response_weight_mean": products.mean(), "response_weight_max": products.max(),
        "response_effective_fraction": products.sum() ** 2 / (len(products) * (products**2).sum()),
        "response_geometric_min": geometric.min(), "response_geometric_max": geometric.max(),
        "trainer_perplexity": np.exp(-trainer[mask.numpy()].mean()),
        "rollout_perplexity": np.exp(-sampler[mask.numpy()].mean()),
    }  # fmt: skip
    assert metrics == pytest.approx({f"importance/{name}": value for name, value in expected.items()}, rel=1e-9)


def test_repetition_against_a_search() -> None:
    rollout, _, _ = batch()
    for row, fraction in enumerate(repeated_fractions(rollout.tokens, rollout.loss_mask).tolist()):
        tokens, mask = rollout.tokens[row].tolist(), rollout.loss_mask[row].tolist()
        places = [i for i in range(WIDTH - NGRAM + 1) if all(mask[i : i + NGRAM])]
        grams = [tuple(tokens[i : i + NGRAM]) for i in places]
        expected = 1 - len(set(grams)) / len(grams) if grams else float("nan")
        assert fraction == pytest.approx(expected, nan_ok=True)
