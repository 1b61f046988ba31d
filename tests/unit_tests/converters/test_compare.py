"""Comparing checkpoints: what is found, and the round trip in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mega_rl.converters.offline import compare as compare_module
from mega_rl.converters.offline.compare import Comparison, compare, round_trip
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from tests.unit_tests.converters.fakes import hf_state, small_config

State = dict[str, Tensor]


def state() -> State:
    """Three tensors of different types, one with a nan."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(300, 7, generator=generator).bfloat16(),
        "b.bias": torch.randn(5, generator=generator),
        "c.weight": torch.randn(2, 3, 4, generator=generator).half(),
    }
    tensors["b.bias"][3] = float("nan")
    return tensors


def compared(folder: Path, first: State, second: State, **options: object) -> Comparison:
    """Writes both to folders of one and several shards, and compares these."""
    write_checkpoint(folder / "first", first.items())
    write_checkpoint(folder / "second", reversed(second.items()), shard_bytes=100)
    with CheckpointReader(folder / "first") as a, CheckpointReader(folder / "second") as b:
        return compare(a, b, **options)  # type: ignore[arg-type]


def test_equal_contents_in_other_shards_and_order(tmp_path: Path) -> None:
    """Shards and order do not count, and a nan equals itself."""
    actual = compared(tmp_path, state(), state())
    assert actual.equal
    assert actual.num_equal == 3


@pytest.mark.parametrize("name", ["a.weight", "b.bias", "c.weight"])
def test_one_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """The smallest change of the last element is named, counted and measured."""
    other = state()
    flat = other[name].view(-1)
    before = flat[-1].clone()
    flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)[-1] ^= 1
    actual = compared(tmp_path, state(), other)
    assert not actual.equal
    (different,) = actual.different
    assert (different.name, different.elements, different.numel) == (name, 1, flat.numel())
    assert different.max_abs == abs(before.double() - flat[-1].double()).item() > 0


def test_names_types_and_shapes(tmp_path: Path) -> None:
    """Each kind of difference has its place; allowed names do not count."""
    other = state()
    other["a.weight"] = other["a.weight"].float()
    other["c.weight"] = other["c.weight"].view(4, 6)
    other["extra.weight"] = other.pop("b.bias")
    actual = compared(tmp_path, state(), other)
    assert actual.only_first == ("b.bias",)
    assert actual.only_second == ("extra.weight",)
    assert actual.mismatched == (
        "a.weight: bfloat16 [300, 7] against float32 [300, 7]",
        "c.weight: float16 [2, 3, 4] against float16 [4, 6]",
    )
    (tmp_path / "allowed").mkdir()
    del other["a.weight"], other["c.weight"]
    first = {"b.bias": state()["b.bias"]}
    allowed = compared(tmp_path / "allowed", first, other, allow_missing=["*.bias", "extra.*"])
    assert allowed.equal
    assert allowed.allowed == ("b.bias", "extra.weight")


def test_round_trip_names_what_a_wrong_plan_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two rows of the plan's copies exchanged the tensors they belong to are named."""
    hf = small_config()
    write_checkpoint(tmp_path / "hf", hf_state(hf).items())
    right = compare_module.common_plan

    def wrong(*args: object) -> tuple[object, ...]:
        def shifted(param):  # type: ignore[no-untyped-def]
            if param.canonical != "decoder.layers.2.self_attention.linear_qkv.weight":
                return param
            q, *rest = param.copies
            return replace(param, copies=(q._replace(src_row=q.src_row + 1), *rest))

        return tuple(shifted(param) for param in right(*args))  # type: ignore[arg-type]

    monkeypatch.setattr(compare_module, "common_plan", wrong)
    with CheckpointReader(tmp_path / "hf") as reader:
        _, lost = round_trip(reader, Sharding(hf))
    assert lost == ("model.layers.2.self_attn.q_proj.weight",)
