"""The table of features in docs/workers/model_engine.md says what the engines do: every cell is tried.

A row of a setting is tried with the rules that refuse what an engine cannot do, every other row with running engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.values import ModelFacts
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.engines.models import specs
from mega_rl.errors import UserError
from mega_rl.verify.layouts import ALL, REFERENCE, fsdp, resolve_all
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.engines.feature_cases import ENGINES, see_all, write_inputs

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launch

PAGE = Path(__file__).parents[3] / "docs" / "workers" / "model_engine.md"
ROW = re.compile(r"^\| (?P<feature>[^|]+?) \| (?P<megatron>yes|no) \| (?P<fsdp>yes|no) \|", re.MULTILINE)
TABLE_LINE = re.compile(r"^\| (?!feature |---)", re.MULTILINE)
DENSE = ModelFacts(num_layers=12, num_heads=16, num_kv_heads=8, ffn_hidden_size=96, max_position_embeddings=4096)
MIXTURE = ModelFacts(**{**vars(DENSE), "num_experts": 8, "expert_ffn_hidden_size": 96})

Measured = dict[str, dict[str, bool]]  # by engine and name
Check = Callable[[str, Measured], bool]


def accepts(engine: str, measured: Measured, *overrides: str, facts: ModelFacts = DENSE) -> bool:
    """Whether an engine takes these settings on four ranks; what it says of others is an error of this test."""
    given = load(None, [f"engine.backend={engine}", *overrides])
    actual = check(given, world_size=4, models={"model.path": facts})
    keys = [override.partition("=")[0] for override in overrides]
    assert all(any(line.startswith(key) for key in keys) for line in actual), actual
    return not actual


def setting(*overrides: str, facts: ModelFacts = DENSE) -> Check:
    """Settings that an engine takes or refuses."""
    return lambda engine, measured: accepts(engine, measured, *overrides, facts=facts)


def shown(name: str) -> Check:
    """Something that running engines show: see feature_cases.py."""
    return lambda engine, measured: measured[engine][name]


def flash_attention(engine: str, measured: Measured) -> bool:
    """Where there are a GPU and the package, in the engine's best layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs, "_has_flash_attn", lambda: True)
        try:
            chosen = specs.choose_attention(
                "flash_attention_2",
                key="model.attn_implementation",
                hf=parse_hf_config(TINY["qwen3"]),
                impl="te" if engine == "megatron" else "hf",
                device_type="cuda",
                dtype="bf16",
            )
        except UserError:
            return False
        return "flash" in chosen


def verified_by_layouts(engine: str, measured: Measured) -> bool:
    return engine in {layout.engine for layout in resolve_all(ALL, parse_hf_config(TINY["qwen3_moe"]))}


def verified_by_engines(engine: str, measured: Measured) -> bool:
    return engine in {REFERENCE.engine, fsdp(2).engine}


experts = partial(setting, facts=MIXTURE)
ROUTED = ("engine.megatron.moe.routing_replay=true", "algorithm.old_logprobs=recompute")
SERVED = ("rollout.backend=sglang", "trainer.async_steps=1", "algorithm.correction=tis")
CHECKS: dict[str, Check] = {
    "tensor parallel": setting("engine.megatron.tp=2"),
    "sequence parallel": setting("engine.megatron.tp=2", "engine.megatron.sequence_parallel=true"),
    "pipeline": setting("engine.megatron.pp=2"),
    "virtual stages": setting("engine.megatron.pp=2", "engine.megatron.vpp=2"),
    "uneven stages": setting("engine.megatron.pp=2", "engine.megatron.pipeline=Ettttt|tL"),
    "context parallel": setting("engine.megatron.cp=2"),
    "expert parallel": experts("engine.megatron.ep=2"),
    "expert tensor parallel": experts(
        "engine.megatron.tp=2", "engine.megatron.sequence_parallel=true", "engine.megatron.etp=1"
    ),
    "the reference on a layout of its own": setting(
        "engine.megatron.reference.tp=2", "algorithm.kl=loss", "algorithm.kl.coef=0.1"
    ),
    "data parallel": shown("data parallelism"),
    "weights shared out over ranks": shown("shared weights"),
    "optimizer state shared out over ranks": shown("shared moments"),
    "several copies of what is shared out (hybrid sharding)": shown("copies"),
    "optimizer state in host memory": shown("optimizer on the host"),
    "a share of the optimizer state in host memory": setting("engine.megatron.optimizer.cpu_offload=0.5"),
    "weights and gradients in host memory": setting("engine.fsdp.cpu_offload=true"),
    "whole layers recomputed": shown("recompute"),
    "some layers recomputed": setting("model.recompute=full", "model.recompute_layers=2"),
    "some modules recomputed": setting("model.recompute=selective"),
    "memory given back and taken again, bit for bit": shown("offload"),
    "packed sequences": shown("packed"),
    "bf16 with FP32 main weights and moments": shown("bf16"),
    "logits in FP32": setting("model.fp32_head=true"),
    "Muon": setting("optim.name=muon"),
    "divergence from a teacher over the whole vocabulary": setting(
        "algorithm.loss=distillation", "algorithm.advantage=distillation", "model.ref_path=teacher"
    ),
    "moments in bf16": setting(
        "engine.megatron.optimizer.precision_aware=true", "engine.megatron.optimizer.moment_dtype=bf16"
    ),
    "bf16 gradients added up in FP32": setting(
        "engine.megatron.ddp.reduce_scatter_fp32_accumulation=true", "engine.megatron.ddp.grad_reduce_in_fp32=false"
    ),
    "every family that trains": shown("families"),
    "frozen weights": shown("frozen"),
    "attention `eager`": shown("eager"),
    "attention `sdpa`": shown("sdpa"),
    "attention `flash_attention_2`": flash_attention,
    "an attention kernel for each role": shown("kernel of a role"),
    "layers of Transformer Engine": setting("engine.megatron.transformer_impl=transformer_engine"),
    "routing replay": experts(*ROUTED),
    "load-balancing loss, expert bias": experts(
        "engine.megatron.moe.aux_loss_coef=0.01", "engine.megatron.moe.expert_bias_update_rate=0.001"
    ),
    "critic": shown("critic"),
    "reference": shown("reference"),
    "reward model": shown("reward model"),
    "embedded rollouts": shown("embedded rollouts"),
    "weights to servers by process group": shown("by distributed"),
    "generation ahead of training": setting(*SERVED),
    "checkpoints, and going on from them": shown("resume"),
    "going on under another layout": shown("resume elsewhere"),
    "going on from the other engine's checkpoint": shown("checkpoint of the other engine"),
    "Hugging Face checkpoints that the other engine reads": shown("Hugging Face checkpoint"),
    "`mega-rl verify layouts`": verified_by_layouts,
    "`mega-rl verify engines`": verified_by_engines,
}
CELLS = [(feature, engine) for feature in CHECKS for engine in ENGINES]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What both of two ranks have seen."""
    if not FULL:
        pytest.skip("make test-full: every cell of a table, tried on running engines")
    folder = tmp_path_factory.mktemp("features")
    write_inputs(folder)
    first, second = run_ranks(2, see_all, str(folder), timeout_s=200)
    return {
        engine: {name: seen and second[engine][name] for name, seen in features.items()}
        for engine, features in first.items()
    }


@pytest.fixture(scope="module")
def done(measured: Measured) -> dict[tuple[str, str], bool]:
    """Whether an engine has a feature, of every cell."""
    return {(feature, engine): CHECKS[feature](engine, measured) for feature, engine in CELLS}


def claims(text: str) -> dict[tuple[str, str], bool]:
    """What a page says, of every cell."""
    return {(row["feature"], engine): row[engine] == "yes" for row in ROW.finditer(text) for engine in ENGINES}


def wrong(text: str, done: dict[tuple[str, str], bool]) -> list[tuple[str, str]]:
    """The cells of a page that are not so."""
    return [cell for cell, claimed in claims(text).items() if done[cell] != claimed]


def test_the_table_is_true(done: dict[tuple[str, str], bool]) -> None:
    assert wrong(PAGE.read_text(encoding="utf-8"), done) == []


def test_every_row_is_tried() -> None:
    """In the order of the page, none twice, and no row of its tables has anything but yes and no."""
    text = PAGE.read_text(encoding="utf-8")
    tables = text.partition("## Features")[2].partition("\n## ")[0]
    assert [row["feature"] for row in ROW.finditer(tables)] == list(CHECKS)
    assert len(TABLE_LINE.findall(tables)) == len(CHECKS)
    assert claims(text) == claims(tables)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_have_what_the_protocol_asks_for(engine: str, measured: Measured) -> None:
    assert measured[engine]["protocol"]
