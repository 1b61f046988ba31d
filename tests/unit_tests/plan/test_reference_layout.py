"""The plan of a reference on its own layout, of distillation over the whole vocabulary, of checkpoints in memory."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.plan.cost import step_traffic
from mega_rl.plan.memory import host_bytes, memory_of_stages, projection_bytes
from mega_rl.plan.report import as_text, plan_of
from mega_rl.plan.search import is_legal
from mega_rl.plan.setup import Machine, RunSetup, smallest_world
from mega_rl.plan.state import weight_bytes
from tests.unit_tests.plan.models import QWEN3_8B, QWEN3_32B

DISTILLED = {
    "model.path": "student",
    "model.ref_path": "teacher",
    "algorithm.advantage": "distillation",
    "algorithm.loss": "distillation",
    "algorithm.loss_aggregation": "token-mean",
    "trainer.microbatch.max_tokens": 16384,
    "data.max_prompt_tokens": 512,
    "rollout.n": 1,
    "rollout.max_new_tokens": 1536,
    "trainer.prompts_per_step": 64,
    "trainer.minibatch_size": 64,
}
STUDENT = {"engine.megatron.tp": 2, "engine.megatron.sequence_parallel": True}


def setup(**own: Any) -> RunSetup:
    """An 8B student over tp2 dp4, and a 32B teacher with these sizes of its own."""
    sizes = {f"engine.megatron.reference.{name}": size for name, size in own.items()}
    config = with_settings(Config(), DISTILLED | STUDENT | sizes)
    run = RunSetup(config, {"model.path": QWEN3_8B, "model.ref_path": QWEN3_32B}, Machine(8, gpu_memory=80 * 10**9))
    assert is_legal(run)
    return run


def test_teacher_has_the_state_of_its_layout() -> None:
    shared, own = memory_of_stages(setup()), memory_of_stages(setup(tp=8))
    assert [each.rank for each in own] == [0]
    weights = own[0].states["reference"].weights
    assert weights == pytest.approx(2 * weight_bytes(QWEN3_32B, 1) / 8, rel=1e-3)
    assert shared[0].states["reference"].weights == pytest.approx(4 * weights, rel=1e-3)
    assert own[0].states["actor"] == shared[0].states["actor"]
    assert smallest_world(setup(tp=4, pp=2).config) == 8


def test_every_stage_of_the_teacher_is_planned() -> None:
    memory = memory_of_stages(setup(pp=4))
    assert [(each.rank, each.pp_rank) for each in memory] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert memory[0].states["reference"].weights > memory[1].states["reference"].weights  # has the embedding


def test_copies_text_and_traffic_follow_the_layout() -> None:
    run = setup(tp=8)
    assert (projection_bytes(setup(), 0), projection_bytes(run, 0)) == (0, 151936 * 5120 * 2 // 2)
    assert next(as_text(plan_of(run))).endswith("; reference tp8-dp1-sp")
    for each, expected in ((setup(), {2}), (run, {2, 8})):
        assert {sent.ranks for sent in step_traffic(each, 0) if sent.use == "tensor parallelism"} == expected


@pytest.mark.parametrize(("nodes", "interval", "copies"), [(1, 1, 2), (2, 1, 2), (1, 0, 0)])
def test_checkpoints_in_memory_are_counted(nodes: int, interval: int, copies: int) -> None:
    """14 bytes per parameter of actor and critic, which has a small head; several hosts keep copies of another's."""
    settings = {"algorithm.advantage": "gae", "checkpoint.memory.interval": interval, "engine.megatron.tp": 2}
    config = with_settings(Config(), {**settings, "model.path": "actor"})
    run = RunSetup(config, {"model.path": QWEN3_8B}, Machine(8, 8 // nodes))
    planned = host_bytes(run, memory_of_stages(run)).get("checkpoints in memory", 0)
    assert planned == pytest.approx(copies * 2 * 14 * weight_bytes(QWEN3_8B, 1), rel=0.05)
