"""What each rank does in the tests of frozen weights: two steps with parts of the model taken out of training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig, OptimConfig
from tests.helpers.engines import exported, load_state, make_config, own_rows, replaced, running_engine, save_state
from tests.helpers.models import random_experience
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.engine_cases import losses

STEPS = 2
FIRST_NAMES = ("model.embed_tokens", "model.layers.0.", "model.layers.1.")
FIRST_HALF = ["embedding.*", "decoder.layers.0.*", "decoder.layers.1.*"]
LAST_HALF = ["decoder.layers.2.*", "decoder.layers.3.*", "decoder.final_layernorm.*", "output_layer.*"]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Patterns, and the beginnings of the Hugging Face names that they mean."""

    patterns: list[str]
    names: tuple[str, ...]
    model: str = "untied"
    recompute: str = "none"


FROZEN = {
    "embedding": Frozen(["embedding.*"], ("model.embed_tokens",)),
    "tied embedding": Frozen(["embedding.word_embeddings.weight"], ("model.embed_tokens",), model="tied"),
    "two layers": Frozen(["decoder.layers.[03].*"], ("model.layers.0.", "model.layers.3.")),
    "one matrix of each layer": Frozen(["*.linear_fc2.weight"], tuple(f"model.layers.{i}.mlp.down" for i in range(4))),
    "first stage": Frozen(FIRST_HALF, FIRST_NAMES),
    "last stage": Frozen(LAST_HALF, ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")),
    "all but the head": Frozen(["embedding.*", "decoder.*"], ("model.",)),
    "embedding, recomputed": Frozen(["embedding.*"], ("model.embed_tokens",), recompute="full"),
    "first stage, recomputed": Frozen(FIRST_HALF, FIRST_NAMES, recompute="full"),
}
LAYOUTS: dict[str, tuple[int, MegatronConfig, bool]] = {  # world size, layout, whether optimizer state is sharded
    "1": (1, MegatronConfig(), True),
    "dp2": (2, MegatronConfig(), True),
    "dp2 not sharded": (2, MegatronConfig(), False),
    "pp2": (2, MegatronConfig(pp=2), True),
    "pp2 not sharded": (2, MegatronConfig(pp=2), False),
    "tp2-sp": (2, MegatronConfig(tp=2, sequence_parallel=True), True),
    "pp2-vpp2": (2, MegatronConfig(pp=2, vpp=2, overlap_p2p=True), True),
    "pp2-dp2": (4, MegatronConfig(pp=2), True),
}
# What the layout has with another name, and the name on another layout: in `make test-full`.
FULL_ONLY = (("dp2", "embedding, recomputed"), ("pp2", "first stage"), ("pp2-dp2", "tied embedding"))
MISTAKES = {
    "no such weight": ["embedding.*", "decoder.layers.9.*"],
    "the last stage has it": ["output_layer.*"],
    "everything": ["decoder.*", "embedding.*", "output_layer.*"],
    "tied output layer": ["output_layer.*"],
}


def selected(layout: str, name: str) -> bool:
    """Each layout goes through the cases that say something about it."""
    few = {
        "dp2": ("tied embedding", "two layers", "all but the head", "embedding, recomputed"),
        "pp2": ("tied embedding", "two layers", "first stage", "last stage", "first stage, recomputed"),
        "tp2-sp": ("one matrix of each layer",),
        "dp2 not sharded": ("embedding",),
        "pp2 not sharded": ("first stage",),
        "pp2-vpp2": ("tied embedding", "first stage"),
        "pp2-dp2": ("tied embedding", "first stage"),
    }
    if not FULL and (layout, name) in FULL_ONLY:
        return False
    return layout == "1" or name in few[layout]


def train(root: Path, frozen: Frozen, layout: str) -> dict[str, Any]:
    """Norms and weights of two steps, and how many elements of optimizer state all ranks hold together."""
    _, parallel, sharded = LAYOUTS[layout]
    optim, optimizer = OptimConfig(lr=1e-2, eps=1e-2, clip_grad=0.1), MegatronOptimizerConfig(distributed=sharded)
    config = make_config(root / frozen.model, optim=optim, optimizer=optimizer, megatron=parallel)
    config = replaced(config, "model", frozen=frozen.patterns, recompute=frozen.recompute)
    config = replaced(config, "trainer.microbatch", max_tokens=48)
    with running_engine(config) as engine:
        from mega_rl.ddp.optimizer import torch_optimizers

        rows = own_rows(random_experience(), engine)
        start = exported(engine)
        norms = [engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"] for _ in range(STEPS)]
        folder = root / f"{layout} {frozen.patterns} {frozen.recompute}"
        with_checkpoint = layout in ("dp2", "pp2")
        if with_checkpoint:
            save_state(engine, folder)
        moments = [s["exp_avg"] for o in torch_optimizers(engine.optimizer) for s in o.state.values() if "exp_avg" in s]
        held = torch.tensor(sum(moment.numel() for moment in moments))
        held = int(engine.replica.sum(held) if not sharded else engine.data_parallel.sum(engine.replica.sum(held)))
        gradients = [p for m in engine.models for p in m.parameters() if hasattr(p, "main_grad")]
        actual = {
            "start": start,
            "weights": exported(engine),
            "norms": norms,
            "moments": held,
            "trainable": all(p.requires_grad for p in gradients),
        }
        if with_checkpoint:
            norm = engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"]
            after = exported(engine)
            load_state(engine, folder)
            actual["resumed"] = engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"] == norm
            again = exported(engine)
            actual["same"] = all(torch.equal(again[key], after[key]) for key in after)
        return actual


def mistake(root: Path, name: str, parallel: MegatronConfig) -> str:
    """What the engine says to patterns that cannot be meant."""
    from mega_rl.errors import UserError

    model = "tied" if name.startswith("tied") else "untied"
    config = make_config(root / model, megatron=parallel)
    try:
        with running_engine(replaced(config, "model", frozen=MISTAKES[name])):
            return ""
    except UserError as error:
        return str(error)


def expert_names(root: Path) -> list[str]:
    """Names of a layer's expert weights on this rank of EP2."""
    config = make_config(root / "routed", megatron=MegatronConfig(ep=2))
    with running_engine(config, trainable=False) as engine:
        from mega_rl.ddp.frozen import named_parameters

        return [name for name, _ in named_parameters(engine.models) if "layers.2.mlp.experts" in name]


def train_all(rank: int, root: str, world_size: int) -> dict[str, Any]:
    """Every case of a world size."""
    actual: dict[str, Any] = {}
    for layout, (size, _, _) in LAYOUTS.items():
        for name, frozen in FROZEN.items():
            if size == world_size and selected(layout, name):
                actual[f"{layout} {name}"] = train(Path(root), frozen, layout)
    if world_size == 2:
        for name in MISTAKES:
            actual[f"mistake {name}"] = mistake(Path(root), name, MegatronConfig(pp=2))
        actual["experts"] = expert_names(Path(root))
    return actual
