"""Layouts of mixtures of experts and what a training engine finds on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mega_rl.config.schema import Config
from tests.helpers.engines import exported, exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses, whole

# name -> (world size, parallel settings); what is left of the world is data parallel
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2-sp-etp1": (2, {"tp": 2, "sequence_parallel": True, "etp": 1}),
    "tp2-sp-ep2": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
    "ep4": (4, {"ep": 4}),
    "ep2-dp4": (4, {"ep": 2}),
    "ep2-etp2": (4, {"ep": 2, "etp": 2}),
    "ep2-pp2": (4, {"ep": 2, "pp": 2}),
    "ep2-pp2-vpp2": (4, {"ep": 2, "pp": 2, "vpp": 2}),
    "tp2-sp-ep2-dp2": (4, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
    "tp2-sp-ep2-etp2": (4, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2}),
}
FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "mistral4", "glm4_moe", "kimi_k2",
    "gpt_oss",
)  # fmt: skip
DENSE = ("gemma3_text", "glm4", "apertus")  # other norms, windows, rotations and activations than Llama's


def write_family(root: Path, family: str, *, layers: int = 2) -> Path:
    """A tiny checkpoint of few layers, of which at least the last is a mixture."""
    windows = family in ("gpt_oss", "gemma3_text")
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)} if windows else {}
    tied = family == "gemma3_text"
    return write_tiny_checkpoint(root / family, family=family, tied=tied, num_hidden_layers=layers, **kinds)


def config_of(checkpoint: Path, layout: str, **moe: Any) -> Config:
    """A config for this layout of `LAYOUTS`, with whole gradients on every rank."""
    config = replaced(make_config(checkpoint), "engine.megatron", **LAYOUTS[layout][1])
    config = replaced(config, "optim", lr=1e-3, clip_grad=0.5)
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    return replaced(config, "engine.megatron.moe", **moe)


def run_case(
    checkpoint: str,
    layout: str,
    *,
    sharded: bool = False,
    padded: bool = False,
    ddp: dict[str, Any] | None = None,
    **moe: Any,
) -> dict[str, Any]:
    """Log-probs, metrics, gradients (unless `sharded`) and weights after a step; of one rank also those before it."""
    config = config_of(Path(checkpoint), layout, **moe)
    config = replaced(config, "engine.megatron.optimizer", distributed=sharded)
    config = replaced(config, "trainer.microbatch", packing=not padded, size=2)
    config = replaced(config, "engine.megatron.ddp", **(ddp or {}))
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        result: dict[str, Any] = {"logprobs": whole(engine.forward(rows).logprobs, engine)}
        if layout == "1":
            result["start"] = exported(engine)
        result["metrics"] = engine.train_minibatch(rows, losses("lm"), lr=1e-3)
        if not sharded:
            result["gradients"] = exported_gradients(engine)  # as clipped
        result["weights"] = exported(engine)
    return result


def run_cases(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Every case, as rank 0 found it."""
    actual = {}
    for name, case in cases.items():
        try:
            actual[name] = run_case(**case)
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    return actual if rank == 0 else None
