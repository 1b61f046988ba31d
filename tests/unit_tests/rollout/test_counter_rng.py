"""Counter-based uniforms: the known hash, uniform, independent of their neighbours, equal in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mega_rl.rollout.sampling import _mix, stream_keys, uniform_at

NUM = 200_000


def grid(seed: tuple[int, ...] = (7, 3)) -> Tensor:
    """[prompts 100, samples 20, positions 100] uniforms."""
    keys = stream_keys(seed, torch.arange(100)[:, None], torch.arange(20)[None, :])
    return uniform_at(keys[:, :, None], torch.arange(100))


def mix_reference(word: int) -> int:
    mask = (1 << 64) - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def test_mix_is_splitmix64_in_wrapping_unsigned_arithmetic() -> None:
    words = [0, 1, 2**31, 2**62 + 12345, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    mixed = [value % (1 << 64) for value in _mix(signed).tolist()]
    assert mixed == [mix_reference(word) for word in words]
    # First output of the published generator seeded with 0: mix(golden gamma).
    assert mix_reference(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = grid().flatten()
    assert values.dtype == torch.float64
    assert len(values) == NUM
    assert 0.0 <= values.min() < 1e-4
    assert 1.0 - 1e-4 < values.max() < 1.0
    assert len(values.unique()) == NUM
    # Chi-square over 256 cells: mean 255, sd sqrt(510) = 22.6; five sd.
    counts = torch.histc(values, bins=256, min=0.0, max=1.0)
    expected = NUM / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(510)
    # Kolmogorov-Smirnov: sqrt(n) D exceeds 1.95 with probability 0.001.
    ranks = torch.arange(1, NUM + 1, dtype=torch.float64) / NUM
    distance = (values.sort().values - ranks).abs().max() + 1 / NUM
    assert math.sqrt(NUM) * float(distance) < 1.95


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["prompt", "sample", "position"])
@pytest.mark.parametrize("lag", [1, 2, 8])
def test_neighbours_are_uncorrelated(dim: int, lag: int) -> None:
    values = grid() - 0.5
    size = values.shape[dim]
    first, second = values.narrow(dim, 0, size - lag), values.narrow(dim, lag, size - lag)
    correlation = float((first * second).mean()) * 12  # variance of a uniform is 1/12
    assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_every_part_of_the_counter_matters_and_so_does_its_place() -> None:
    zero = torch.tensor(0)
    one = torch.tensor(1)
    keys = [
        stream_keys((0,), zero, zero),
        stream_keys((0,), zero, one),
        stream_keys((0,), one, zero),
        stream_keys((1,), zero, zero),
        stream_keys((0, 0), zero, zero),
        stream_keys((0, 0), one),  # the words of the second key, divided elsewhere
        stream_keys((), zero, zero),
        stream_keys((2**63 + 5,), zero, zero),
        stream_keys((-1,), zero, zero),
    ]
    values = [float(uniform_at(key, position)) for key in keys for position in (0, 1)]
    assert len(set(values)) == len(values)
