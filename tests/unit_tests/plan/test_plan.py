"""The plan of whole runs: verdicts on recipes of the first release, changes, monotonic sizes, speed, and the search."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config import packaged
from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.activations import (
    ACTIVATIONS,
    LOGITS,
    WORKING,
    forward_pass,
    shape_of,
    tokens_of_a_pass,
    training_pass,
)
from mega_rl.plan.cost import step_traffic
from mega_rl.plan.memory import host_bytes, judge, memory_of_stages
from mega_rl.plan.report import as_text, plan_of
from mega_rl.plan.search import advice, changed, cheapest, is_legal, search
from mega_rl.plan.setup import Machine, RunSetup, parse_bytes, read_setup, smallest_world
from tests.unit_tests.converters.hub_configs import DEEPSEEK_V3
from tests.unit_tests.plan.models import QWEN3_0_6B, QWEN3_8B, QWEN3_32B

GB = 10**9
MEGATRON = "engine.megatron"
# Settings of three recipes that were written before anything was computed, with the embedded engine.
OF_32B = {
    **{f"{MEGATRON}.tp": 8, f"{MEGATRON}.sequence_parallel": True, f"{MEGATRON}.pp": 4, f"{MEGATRON}.vpp": 2},
    **{"model.recompute": "full", "algorithm.advantage": "grpo"},
    **{"rollout.n": 16, "rollout.max_new_tokens": 4096, "trainer.prompts_per_step": 256},
}
OF_8B = {
    **{f"{MEGATRON}.tp": 4, f"{MEGATRON}.sequence_parallel": True, "model.recompute": "selective"},
    **{"algorithm.advantage": "gae", "algorithm.kl": "reward"},
    **{"rollout.n": 4, "rollout.max_new_tokens": 2048, "trainer.prompts_per_step": 256},
}
COMMON = {"data.max_prompt_tokens": 512, "trainer.microbatch.max_tokens": 16384, "trainer.minibatch_size": 64}
RUNS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "32b": (QWEN3_32B, 64, OF_32B),
    "8b": (QWEN3_8B, 8, OF_8B),
    "8b fsdp": (
        QWEN3_8B,
        8,
        {"engine.backend": "fsdp", "model.recompute": "full", "algorithm.advantage": "grpo", "rollout.n": 8},
    ),
    "0.6b": (QWEN3_0_6B, 1, {"algorithm.advantage": "grpo", "rollout.n": 8, "rollout.max_new_tokens": 1024}),
}


def run(name: str, memory: int | None = 80 * GB, **settings: Any) -> RunSetup:
    """One of `RUNS`; settings with two underscores for a dot."""
    hf, gpus, own = RUNS[name]
    values = {key.replace("__", "."): value for key, value in settings.items()}
    config = with_settings(Config(), {**COMMON, "model.path": "model", **own, **values})
    setup = RunSetup(config, {"model.path": hf}, Machine(gpus, gpu_memory=memory))
    assert is_legal(setup)
    return setup


@pytest.mark.parametrize(
    ("name", "fits", "needed"), [("32b", False, 165.6), ("8b", False, 124.2), ("0.6b", True, 62.4)]
)
def test_embedded_engine_fits_only_small_models(name: str, fits: bool, needed: float) -> None:
    """It has a whole copy of the model and the cache of all rows on every GPU, next to the trainer's whole state."""
    verdict = judge(run(name))
    assert verdict.fits is fits
    assert "--gpu-memory" in judge(run(name, memory=None)).sentence
    generating = next(phase for phase in verdict.memory.phases if phase.name == "generating")
    assert generating is verdict.memory.peak
    assert generating.needed / 1e9 == pytest.approx(needed, abs=0.5)


@pytest.mark.parametrize("name", ["32b", "8b", "8b fsdp", "0.6b"])
def test_proposed_change_makes_the_run_fit(name: str) -> None:
    setup = run(name)
    proposal = cheapest(setup)
    assert proposal is not None
    new = changed(setup, proposal.settings)
    assert new.machine.world_size == setup.machine.world_size
    assert is_legal(new)
    assert judge(new, memory_of_stages(new)).fits
    words = advice(setup, proposal)
    assert all(f"{key}=" in words for key in proposal.settings)
    assert ("rollout.backend=sglang (now hf)" in words) or name != "32b"


def test_bucket_holds_the_largest_tensor() -> None:
    """The embedding of 8B, 1.24 GB in bf16, travels whole: beside a buffer for its parts, and as servers get it."""
    embedding = 2 * 151936 * 4096

    def sending(mib: int, **given: Any) -> int:
        return memory_of_stages(run("8b", rollout__bucket_mib=mib, **given))[0].phases[0].entries["export buckets"]

    assert [sending(mib) for mib in (64, 1024, 2048)] == [2 * embedding] * 2 + [2 * 2048 << 20]
    sglang = {"rollout__backend": "sglang"}
    assert sending(256, **sglang) == 3 * embedding + 2 * (256 << 20)
    assert sending(256, **sglang, rollout__sglang__placement="separate") == 4 * embedding


@pytest.mark.parametrize(
    ("settings", "fewer"),
    [
        ({"trainer.microbatch.max_tokens": 8192}, "training the actor"),
        ({"model.recompute": "full"}, "training the actor"),
        ({f"{MEGATRON}.tp": 8}, "training the actor"),
        ({f"{MEGATRON}.pp": 2}, "training the critic"),
        ({f"{MEGATRON}.optimizer.cpu_offload": 1.0}, "the optimizer step of the actor"),
        ({"rollout.hf.batch_size": 32}, "generating"),
        ({"rollout.max_new_tokens": 1024}, "generating"),
    ],
)
def test_changes_save_memory(settings: dict[str, Any], fewer: str) -> None:
    """Each of these makes its phase smaller, and no phase larger."""
    setup = run("8b")
    before = {phase.name: phase.needed for phase in memory_of_stages(setup)[0].phases}
    after = {phase.name: phase.needed for phase in memory_of_stages(changed(setup, settings))[0].phases}
    assert after[fewer] < before[fewer]
    assert all(after[name] <= size * 1.001 for name, size in before.items())


def test_float32_logits_take_twice_the_memory() -> None:
    """And the backward of the head both gradients in float32, half of the logits' gradient in bf16, and a product."""
    setup = changed(run("8b"), {f"{MEGATRON}.pp": 1})
    fp32 = changed(setup, {"model.fp32_head": True})
    columns, hidden, tokens = 151936 // setup.layout.tp, 4096, tokens_of_a_pass(setup)
    before, after = (training_pass(each, each.actor, 0) for each in (setup, fp32))
    assert (before[LOGITS], after[LOGITS]) == (2 * tokens * columns, 4 * tokens * columns)
    products = 4 * columns * hidden + 4 * tokens * hidden + 4 * max(columns, tokens) * hidden + 2 * tokens * columns
    assert after[WORKING] >= products
    forwards = [forward_pass(each, each.actor, 0) for each in (setup, fp32)]
    assert forwards[1][LOGITS] == 2 * forwards[0][LOGITS] > 0


def test_colocated_servers_take_turns_with_the_trainer() -> None:
    """While servers generate the trainer's state is on the host; while it trains servers keep what they cannot free."""
    setup = run("8b", rollout__backend="sglang", rollout__sglang__placement="colocated")
    phases = {phase.name: phase.entries for phase in memory_of_stages(setup)[0].phases}
    assert "optimizer" not in phases["generating"]
    assert phases["generating"]["servers' weights"] == 2 * 8_190_735_360
    assert phases["training the actor"]["servers' residue"] > 0
    assert "servers' weights" not in phases["training the actor"]
    states = memory_of_stages(setup)[0].states.values()
    kept = sum(state.weights + state.optimizer for state in states)  # gradients are zero when they come back
    assert host_bytes(setup, memory_of_stages(setup))["models that leave their devices, pinned"] == 8 * kept


def test_servers_over_several_hosts_are_proposed() -> None:
    """Hosts of one GPU each: two of them have room for a server of 32B beside the trainer."""
    setup = run("32b", rollout__backend="sglang", rollout__sglang__server__host="eth0")
    setup = replace(setup, machine=Machine(64, gpus_per_node=1, gpu_memory=80 * GB))
    assert judge(setup).fits is False
    proposal = cheapest(setup)
    assert proposal is not None
    assert proposal.settings["rollout.sglang.server.nodes"] == proposal.settings["rollout.sglang.server.tp"] == 2


def ppo_of_32b(**settings: Any) -> RunSetup:
    """PPO with a critic and a reference on two hosts, with servers on other devices."""
    own = {"algorithm__advantage": "gae", "algorithm__kl": "reward", "rollout__backend": "sglang"}
    setup = run("32b", **{**own, "rollout__sglang__placement": "separate", "rollout__n": 4, **settings})
    setup = changed(replace(setup, machine=replace(setup.machine, world_size=16)), {f"{MEGATRON}.pp": 2})
    assert is_legal(setup)
    return setup


def test_turns_count_one_model_at_a_time() -> None:
    """The state of the role at work, of which a pass without gradients needs the weights; the rest is on the host."""
    together, turns = ppo_of_32b(), ppo_of_32b(engine__resident_roles="one")
    assert (together.takes_turns, turns.takes_turns) == (False, True)
    states = memory_of_stages(turns)[0].states
    phases = {phase.name: phase.entries for phase in memory_of_stages(turns)[0].phases}
    for role in ("actor", "critic"):
        for name in (f"training the {role}", f"the optimizer step of the {role}"):
            held = tuple(phases[name][part] for part in ("weights", "gradients", "optimizer"))
            assert held == (states[role].weights, states[role].gradients, states[role].optimizer)
    assert "optimizer" not in phases["computing log-probs and values"]
    assert phases["computing log-probs and values"]["weights"] in {state.weights for state in states.values()}
    assert phases["sending weights"]["weights"] == states["actor"].weights
    fullest = [max(each.peak.needed for each in memory_of_stages(setup)) for setup in (together, turns)]
    assert fullest[1] < 0.55 * fullest[0]
    kept = [sum(state.weights + state.optimizer for state in each.states.values()) for each in memory_of_stages(turns)]
    assert host_bytes(turns, memory_of_stages(turns))["models that leave their devices, pinned"] == 8 * max(kept)
    assert "models that leave their devices, pinned" not in host_bytes(together, memory_of_stages(together))


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ({}, "varlen"),
        ({f"{MEGATRON}.cp": 2, f"{MEGATRON}.tp": 2}, "classes"),
        ({"model.dtype": "fp32"}, "classes"),
        ({"trainer.microbatch.packing": False, "trainer.microbatch.size": 4}, "classes"),
        ({"model.attn_implementation": "eager"}, "eager"),
        ({f"{MEGATRON}.transformer_impl": "transformer_engine"}, "packed"),
    ],
)
def test_attention_follows_the_kernel_of_a_gpu(settings: dict[str, Any], kernel: str) -> None:
    """`attention_kernels.fits_varlen`; Transformer Engine's layers keep less; padding comes from length classes."""
    setup = changed(run("8b"), settings)
    te = replace(setup, machine=replace(setup.machine, has_te=True))
    kept, of_local = (training_pass(each, each.actor, 0)[ACTIVATIONS] for each in (te, setup))
    assert kept <= of_local
    shape = shape_of(setup, setup.actor, moe=False)
    assert shape.kernel == kernel
    assert (shape.padding > 1) == (kernel in ("classes", "eager") and setup.config.trainer.microbatch.packing)


def test_source_without_engine_counts_no_generation() -> None:
    """No second model, cache, server or time for responses, and the report says so."""
    own = {"rollout.backend": "none", "rollout.source": "own.py:Replay"}
    setup = changed(run("8b"), own)
    phases = [phase for each in memory_of_stages(setup) for phase in each.phases]
    entries = {name for phase in phases for name in phase.entries}
    assert "training the actor" in {phase.name for phase in phases}
    assert "generating" not in {phase.name for phase in phases}
    assert not entries & {"rollout model", "KV cache", "KV cache and logits", "servers' weights", "servers' residue"}
    text = "\n".join(as_text(plan_of(setup)))
    assert "generation:" not in text
    assert "servers:" not in text
    assert "rollout.source=own.py:Replay: its own work is not counted" in text


def test_search_proposes_layouts_that_fit() -> None:
    setup = changed(run("8b"), {"rollout.backend": "sglang"})
    candidates = search(setup, most=3)
    assert 0 < len(candidates) <= 3
    assert all(each.needed <= (setup.machine.gpu_memory or 0) for each in candidates)
    assert [round(each.work, 2) for each in candidates] == sorted(round(each.work, 2) for each in candidates)


def test_four_thousand_ranks_in_less_than_a_second() -> None:
    """DeepSeek-V3: 16 stages of 256 ranks, 64 of which share the experts."""
    settings = {
        **{f"{MEGATRON}.tp": 8, f"{MEGATRON}.sequence_parallel": True, f"{MEGATRON}.pp": 16, f"{MEGATRON}.etp": 1},
        **{f"{MEGATRON}.pipeline": "E" + "|".join(["tttt"] * 15 + ["t"]) + "L", f"{MEGATRON}.ep": 64},
        **{"model.path": "model", "model.recompute": "full", "algorithm.advantage": "grpo", "rollout.n": 16},
        **{"rollout.backend": "sglang", "trainer.prompts_per_step": 256},
    }
    config = with_settings(Config(), settings)
    setup = RunSetup(config, {"model.path": parse_hf_config(DEEPSEEK_V3)}, Machine(4096, gpu_memory=80 * GB))
    assert is_legal(setup)
    start = time.process_time()
    memory = memory_of_stages(setup)
    verdict = judge(setup, memory)
    traffic = step_traffic(setup, verdict.memory.pp_rank)
    assert time.process_time() - start < 1.0
    assert len(memory) == 16
    assert {each.collective for each in traffic} >= {"all-to-all", "reduce-scatter", "send"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("80G", 80 * GB), ("80GB", 80 * GB), ("79.5GiB", int(79.5 * 2**30)), ("141e9", 141 * GB)),
        *((text, None) for text in ("80", "much", "1e99")),
    ],
)
def test_only_sizes_of_gpus_are_read(text: str, size: int | None) -> None:
    with pytest.raises(UserError, match="--gpu-memory=") if size is None else nullcontext():
        assert parse_bytes(text) == size


@pytest.mark.parametrize("name", packaged.names())
def test_every_packaged_recipe_can_be_planned(name: str) -> None:
    """Whatever it says: a plan of it is made without an error."""
    config = load(name)
    hf = QWEN3_32B if "32b" in name else QWEN3_8B if "8b" in name else QWEN3_0_6B
    setup = RunSetup(config, {"model.path": hf}, Machine(smallest_world(config), gpu_memory=80 * GB))
    assert list(as_text(plan_of(setup)))


def test_setup_has_every_mistake_and_the_smallest_world(tmp_path: Path) -> None:
    with pytest.raises(UserErrors) as refusal:
        read_setup(None, [f"model.path={tmp_path}", f"{MEGATRON}.vpp=2", "algorithm.advantage=grpo"], Machine(3))
    assert len(refusal.value.problems) >= 3
    config = with_settings(Config(), {f"{MEGATRON}.tp": 2, f"{MEGATRON}.pp": 2, f"{MEGATRON}.ep": 4})
    assert smallest_world(config) == 16
    fsdp = with_settings(Config(), {"engine.backend": "fsdp", "engine.fsdp.shard_ranks": 4})
    assert smallest_world(fsdp) == 4
