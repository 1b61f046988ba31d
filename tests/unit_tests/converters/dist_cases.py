"""What test_torch_dist.py does on ranks: live models and Megatron-Core's own distributed checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.selection import FULL

# family -> layouts by world size; sp wherever a model with experts or latent attention is cut.
WORLDS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"1": {}},
    2: {
        "tp2": {"tp": 2, "sequence_parallel": True},
        "pp2-vpp2": {"pp": 2, "vpp": 2},
        "uneven": {"pp": 2, "pipeline": (3, 1)},
        "ep2": {"ep": 2},
    },
}

# What the layout has with other models, and the model on other layouts: in `make test-full`.
FULL_ONLY = {
    ("pp2-vpp2", "qwen2_moe"), ("pp2-vpp2", "gpt_oss"), ("uneven", "qwen2_moe"), ("uneven", "qwen3_moe"),
    ("ep2", "qwen3_moe"),
}  # fmt: skip


def _weights(chunks: list[nn.Module]) -> list[dict[str, Tensor]]:
    from mega_rl.converters.live.load import weights_of

    return [{name: tensor.detach().clone() for name, tensor in weights_of(chunk).items()} for chunk in chunks]


def _sharded_state(chunks: list[nn.Module], dp_cp_group: Any) -> dict[str, Any]:
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    metadata = {"dp_cp_group": dp_cp_group}
    return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)}


def _differing(chunks: list[nn.Module], expected: list[dict[str, Tensor]]) -> list[str]:
    return [
        f"{stage}.{name}"
        for stage, (actual, wanted) in enumerate(zip(_weights(chunks), expected, strict=True))
        for name in wanted
        if not torch.equal(actual[name], wanted[name])
    ]


def _spoil(chunks: list[nn.Module]) -> None:
    from mega_rl.converters.live.load import weights_of

    for chunk in chunks:
        for tensor in weights_of(chunk).values():
            tensor.data.fill_(float("nan"))


def load_and_save(rank: int, root: str, world_size: int, models: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Names that differ, by what was done: loading offline conversions into live models, and saving those.

    `root`/{name} holds for every model its Hugging Face checkpoint `hf` and `dist`; live models
    are saved into `saved-{layout}`. A rank on a CPU that forks is named, too: see tests/helpers/upstream_writers.py.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from megatron.core import dist_checkpointing

    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout
    from tests.helpers.loaded_model import load_model

    actual: dict[str, list[str]] = {}
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("a process forked beside threads of gloo"))
    for layout, sizes in WORLDS[world_size].items():
        built = groups.initialize(ParallelLayout(world_size=world_size, **sizes), accelerator=accelerator, timeout_s=60)
        groups.seed_model_parallel(1, built)
        for name, model in models.items():
            if (layout == "ep2" and not model["moe"]) or (not FULL and (layout, name) in FULL_ONLY):
                continue
            folder = Path(root) / name
            live = load_model(folder / "hf", groups=built, accelerator=accelerator, dtype="fp32", mtp=model["mtp"])
            expected = _weights(live.chunks)
            _spoil(live.chunks)
            state = dist_checkpointing.load(_sharded_state(live.chunks, built.collection.dp_cp), str(folder / "dist"))
            for key, chunk in zip(
                sorted(_sharded_state(live.chunks, built.collection.dp_cp)), live.chunks, strict=True
            ):
                chunk.load_state_dict(state[key])
            actual[f"{name} {layout} dist_checkpointing.load"] = _differing(live.chunks, expected)
            saved = folder / f"saved-{layout}"
            saved.mkdir(exist_ok=True)
            dist_checkpointing.save(_sharded_state(live.chunks, built.collection.dp_cp), str(saved))
        groups.destroy()
    actual["forks"] = forks if accelerator.name == "cpu" else []
    return actual


def load_critic(rank: int, policy: str, dist: str) -> dict[str, Tensor]:
    """The weights of a critic's engine that has loaded an offline conversion, by name on disk."""
    from tests.helpers.engines import exported, make_config, running_engine

    with running_engine(make_config(Path(policy), layout="1"), head="value", trainable=False) as engine:
        from megatron.core import dist_checkpointing

        state = _sharded_state(engine.models, engine.groups.collection.dp_cp)
        engine.models[0].load_state_dict(dist_checkpointing.load(state, dist)["model"])
        return exported(engine)
