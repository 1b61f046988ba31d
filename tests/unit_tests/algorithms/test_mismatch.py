"""Trainer against rollout log-probs: the numbers, the worst token, and the reduction over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.mismatch import LogprobMismatch, combine, logprob_mismatch


def batch(num_rows: int = 6, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(num_rows, length, generator=generator)
    return {
        "rollout_logprobs": rollout,
        "trainer_logprobs": rollout + 0.01 * torch.randn(num_rows, length, generator=generator),
        "loss_mask": torch.arange(length) >= torch.arange(num_rows)[:, None] % 4 + 1,
        "tokens": torch.randint(100, 200, (num_rows, length), generator=generator),
        "prompt_index": torch.arange(num_rows) // 2 + 10,
        "sample_index": torch.arange(num_rows) % 2,
    }


def summary(fields: dict[str, Tensor], rows: slice = slice(None)) -> LogprobMismatch:
    part = {name: tensor[rows] for name, tensor in fields.items()}
    first, second, mask = part.pop("rollout_logprobs"), part.pop("trainer_logprobs"), part.pop("loss_mask")
    return logprob_mismatch(first, second, mask, **part)


def test_numbers_and_worst_token() -> None:
    fields = batch()
    fields["trainer_logprobs"][3, 4] = fields["rollout_logprobs"][3, 4] - 0.75
    fields["trainer_logprobs"][0, 0] = -50.0  # a prompt token: not on the mask
    mask = fields["loss_mask"]
    difference = (fields["trainer_logprobs"].double() - fields["rollout_logprobs"].double()).abs()[mask]
    actual = summary(fields)
    assert actual.count == int(mask.sum())
    assert actual.sum == pytest.approx(float(difference.sum()), rel=1e-12)
    metrics = actual.metrics()
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.75, abs=1e-6)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(float(difference.mean()), rel=1e-12)
    place = actual.prompt_index, actual.sample_index, actual.position, actual.token_id
    assert place == (11, 1, 4, int(fields["tokens"][3, 4]))
    text = actual.describe_worst()
    for part in (f"token id {actual.token_id}", "position 4", "prompt_index=11", "sample_index=1", "difference 0.75"):
        assert part in text
    assert f"{float(fields['rollout_logprobs'][3, 4]):.6g}" in text
    assert f"{float(fields['trainer_logprobs'][3, 4]):.6g}" in text


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_the_worst(bad: float) -> None:
    fields = batch()
    fields["trainer_logprobs"][2, 4] = bad
    actual = summary(fields)
    assert actual.max == math.inf
    assert (actual.prompt_index, actual.sample_index, actual.position) == (11, 0, 4)
    again = combine(torch.stack([torch.zeros(10), actual.pack(), torch.zeros(10)]))
    assert again.max == math.inf
    assert again.position == 4


def test_equal_differences_name_the_same_token_in_every_layout() -> None:
    fields = batch()
    fields["trainer_logprobs"] = fields["rollout_logprobs"].clone()
    fields["rollout_logprobs"][[1, 4], 4] = -1.0
    fields["trainer_logprobs"][[1, 4], 4] = -1.5
    first, second = summary(fields, slice(0, 3)), summary(fields, slice(3, 6))
    swapped = combine(torch.stack([second.pack(), first.pack()]))
    assert (swapped.prompt_index, swapped.sample_index) == (10, 1)
    assert swapped == combine(torch.stack([first.pack(), second.pack()]))
