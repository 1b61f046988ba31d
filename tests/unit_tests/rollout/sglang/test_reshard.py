"""Where each byte goes in buckets: on all trained families, without processes."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.sharding import Sharding, check_layout
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.weights.reshard import first_ranks, plan_buckets
from mega_rl.rollout.sglang.weights.transport import filled, slot_tensor
from tests.unit_tests.converters.fakes import hf_state
from tests.unit_tests.converters.tiny_configs import TINY

LAYOUTS = (
    ParallelLayout(),
    ParallelLayout(world_size=2, tp=2),
    ParallelLayout(world_size=2, pp=2),
    ParallelLayout(world_size=3),
    ParallelLayout(world_size=4, tp=2),
    ParallelLayout(world_size=4, tp=2, pp=2),
    ParallelLayout(world_size=4, tp=2, pp=2, vpp=2),
    ParallelLayout(world_size=2, cp=2),
)
EXPERT_LAYOUTS = (
    ParallelLayout(world_size=2, ep=2),
    ParallelLayout(world_size=4, ep=2),
    ParallelLayout(world_size=2, tp=2, ep=2),
    ParallelLayout(world_size=4, ep=2, etp=2),
    ParallelLayout(world_size=8, tp=2, pp=2, ep=2),
)
# What one parameter of SGLang's is made of: stacked_params_mapping of srt/models/{llama, qwen2, qwen3, glm4,
# gemma3_causal, mixtral, olmoe, qwen2_moe, qwen3_moe, glm4_moe, olmo2, exaone4, granite, ministral3}.py, and
# srt/models/deepseek_common/deepseek_weight_loader.py, which keeps one of the last pair only until the end of a
# request.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def sharding_of(family: str, layout: ParallelLayout = LAYOUTS[0], **changes: Any) -> Sharding:
    """A tiny model of a family; multi-token prediction layers are left out, as in training."""
    config = {"model_type": family, "architectures": ["X"], **TINY[family], "num_nextn_predict_layers": 0, **changes}
    return Sharding(parse_hf_config(config), layout)


def layouts_for(family: str) -> list[ParallelLayout]:
    hf = sharding_of(family).hf
    possible = LAYOUTS + (EXPERT_LAYOUTS if hf.moe is not None else ())
    return [layout for layout in possible if not check_layout(hf, layout)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_buckets_keep_order_bounds_and_what_sglang_fuses(family: str, data: st.DataObject) -> None:
    """No gap and no misaligned tensor; larger than asked only when it is one unit; fused tensors together."""
    layout = data.draw(st.sampled_from(layouts_for(family)))
    bucket_bytes = data.draw(st.integers(1, 60_000))
    itemsize = data.draw(st.sampled_from([2, 4]))
    sharding = sharding_of(family, layout)
    plan = export_plan(sharding)
    buckets = plan_buckets(sharding, bucket_bytes=bucket_bytes, itemsize=itemsize)
    assert [unit for bucket in buckets for unit in bucket.units] == list(plan)
    place = {}
    for number, bucket in enumerate(buckets):
        assert bucket.nbytes <= bucket_bytes or len(bucket.units) == 1
        at = 0
        for slot in bucket.slots:
            element = 4 if slot.float32 else itemsize
            assert slot.start == at
            assert slot.start % element == 0
            at = slot.end
            assert slot.end - slot.start == prod(slot.shape) * element
            assert place.setdefault(slot.name, number) == number
    fused = 0
    for name, number in place.items():
        for group in FUSED:
            actual = re.fullmatch(rf"(.*\.){group[0]}(\..*)", name)
            for other in group[1:] if actual else ():
                together = f"{actual[1]}{other}{actual[2]}"
                fused += together in place
                assert place.get(together, number) == number, f"{name} and {together} are in different buckets"
    # glm4's gate and up are one tensor, mixtral's experts have other names: attention is left. phi3's are whole.
    assert fused >= 4 or family == "phi3"


@pytest.mark.parametrize("family", FAMILIES)
def test_buckets_by_stage_alternate_between_stages(family: str) -> None:
    for layout in layouts_for(family):
        sharding = sharding_of(family, layout)
        plan = export_plan(sharding)
        buckets = plan_buckets(sharding, bucket_bytes=9000, itemsize=4, by_stage=True)
        for stage in range(layout.pp):
            own = [unit for bucket in buckets if bucket.pp_rank == stage for unit in bucket.units]
            assert own == [unit for unit in plan if unit.pp_rank == stage]
        assert [bucket.pp_rank for bucket in buckets[: 2 * layout.pp]] == [*range(layout.pp)] * 2
        assert layout.coordinates(first_ranks(layout)[-1]).pp_rank == layout.pp - 1


def test_filled_takes_tensors_as_they_come() -> None:
    """Bucket after bucket, in turns of two buffers; a tensor that belongs nowhere is an error."""
    sharding = sharding_of("deepseek_v3")
    state = hf_state(sharding.hf)
    buckets = plan_buckets(sharding, bucket_bytes=20_000, itemsize=2)
    stream = [(name, state[name]) for bucket in buckets for unit in bucket.units for name, _, _ in unit.tensors]
    asked = []

    def memory(number: int, nbytes: int) -> Tensor:
        asked.append((number, nbytes))
        return torch.zeros(nbytes, dtype=torch.uint8)

    for bucket, data in filled(iter(stream), buckets, memory, torch.bfloat16):
        for slot in bucket.slots:
            expected = state[slot.name].to(torch.float32 if slot.float32 else torch.bfloat16)
            assert torch.equal(slot_tensor(data, slot, torch.bfloat16), expected)
    assert asked == [(number, bucket.nbytes) for number, bucket in enumerate(buckets)]
    with pytest.raises(AssertionError, match="belongs to no bucket"):
        list(filled(iter([*stream, ("x", torch.zeros(1))]), buckets, memory, torch.bfloat16))
