"""Composition and inversion of plans as arithmetic, on elements that are all different."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.offline.slabs import possible_slabs, slab_of, whole_model
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import ColumnRange, Home, compose, home_faults, invert
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from tests.unit_tests.converters.tiny_configs import TINY

State = Mapping[str, Tensor]


def applied(copies: Iterable[Copy], shape: tuple[int, ...], state: State) -> Tensor:
    """A tensor written element by element as the docstring of `Copy` says; what no copy writes stays -1."""
    result = torch.full(matrix_shape(shape), -1, dtype=torch.int64)
    for c in copies:
        if c.hf_name is None:
            result[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols] = 0
            continue
        source = state[c.hf_name].view(matrix_shape(tuple(state[c.hf_name].shape)))
        rows, cols = torch.arange(c.rows)[:, None], torch.arange(c.cols)[None, :]
        if c.transposed:
            values = source[c.src_row + cols, c.src_col + rows * c.step]
        else:
            values = source[c.src_row + rows, c.src_col + cols]
        result[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols] = values
    return result.view(shape)


def written(windows: Iterable[ColumnRange], shape: tuple[int, ...], state: State) -> Tensor:
    """A tensor from the windows that `invert` gives."""
    result = torch.full(matrix_shape(shape), -1, dtype=torch.int64)
    for window in windows:
        columns = result[:, window.first_col :: window.step]
        actual = applied(window.copies, tuple(columns.shape), state)
        result[:, window.first_col :: window.step] = torch.where(actual < 0, columns, actual)
    return result.view(shape)


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors whose elements are all different and none zero."""
    state, at = {}, 1
    for name, shape in shapes.items():
        state[name] = torch.arange(at, at + prod(shape)).view(shape)
        at += prod(shape)
    return state


def config_of(family: str, **changes: Any) -> Any:
    """The architecture of a tiny family with its prediction layers."""
    return replace(parse_hf_config(TINY[family] | changes), mtp="load")


def disk_state(sharding: Sharding) -> dict[str, Tensor]:
    """Numbered Hugging Face tensors."""
    return numbered({name: t.shape for name, t in hf_tensors(sharding.hf, head=sharding.head).items()})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_inversion_gives_back_every_tensor(family: str, fused: bool) -> None:
    hf = replace(config_of(family), fused_experts=fused or family == "gpt_oss")
    sharding = Sharding(hf)
    disk = disk_state(sharding)
    plans = whole_model(sharding)
    params = {plan.canonical: applied(plan.copies, plan.shape, disk) for plan in plans}
    windows = invert(plans)
    assert set(windows) == set(disk)
    for name, tensor in disk.items():
        assert torch.equal(written(windows[name], tuple(tensor.shape), params), tensor), name


def test_parts_of_a_transposed_copy_are_found() -> None:
    """A transposed source in four quarters, each at another place of its store."""
    whole = torch.arange(1, 25).view(4, 6)
    stored = {name: torch.zeros(5, 7, dtype=torch.int64) for name in "abcd"}
    homes = []
    for i, name in enumerate("abcd"):
        row, col = 2 * (i // 2), 3 * (i % 2)
        stored[name][i : i + 2, 4 - i : 7 - i] = whole[row : row + 2, col : col + 3]
        homes.append(Home(name, Copy("whole", row, col, i, 4 - i, 2, 3)))
    copy = Copy("whole", 1, 1, 0, 0, 5, 3, transposed=True)
    assert torch.equal(applied(compose([copy], {"whole": homes}), (5, 3), stored), whole[1:4, 1:6].T)
    assert home_faults("whole", (4, 6), homes) == []
    assert home_faults("whole", (4, 6), homes[:3]) == ["whole rows 2..4 columns 3..6 are missed"]
    assert home_faults("whole", (4, 6), [*homes, homes[0]])


def test_zero_rows_and_other_parameters_pass_through() -> None:
    copy = Copy("p", 2, 0, 5, 1, 3, 4)
    zeros = Copy(None, 0, 0, 0, 0, 5, 4)
    homes = {"p": [Home("x", Copy("p", 0, 0, 7, 2, 3, 9)), Home("y", Copy("p", 3, 0, 0, 0, 9, 9))]}
    assert compose([zeros, copy], homes) == (
        zeros,
        Copy("x", 9, 2, 5, 1, 1, 4),
        Copy("y", 0, 0, 6, 1, 2, 4),
    )


def test_every_parameter_has_a_place_of_its_own_in_a_distributed_checkpoint() -> None:
    for family in TINY:
        sharding = Sharding(config_of(family))
        plans = whole_model(sharding)
        slabs = [slab_of(plan, sharding.hf) for plan in plans]
        assert len({(slab.key, slab.place) for slab in slabs}) == len(plans), family
        shapes: dict[str, tuple[int, ...]] = {}
        for plan, slab in zip(plans, slabs, strict=True):
            assert next(possible_slabs(plan, sharding.hf)) == slab
            assert all(at < size for at, size in zip(slab.place, slab.lead, strict=True))
            assert shapes.setdefault(slab.key, (*slab.lead, *plan.shape)) == (*slab.lead, *plan.shape)
