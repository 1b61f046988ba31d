"""Weights that `model.frozen` names stay as they are, and the others train as if on one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig, OptimConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, load_state, make_config, own_rows, replaced, running_engine, save_state
from tests.helpers.models import random_experience, write_tiny_checkpoint
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
    "pp2-vpp2": (2, MegatronConfig(pp=2, vpp=2), True),
    "pp2-dp2": (4, MegatronConfig(pp=2), True),
}
# What the layout has with another name, and the name on another layout: in `make test-full`.
FULL_ONLY = (
    *(("dp2", "embedding, recomputed"), ("dp2", "tied embedding"), ("pp2", "first stage"), ("pp2", "two layers")),
    *(("pp2-vpp2", "tied embedding"), ("pp2-dp2", "tied embedding")),
)
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
        from mega_rl.ddp.access import named_parameters

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


pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

# fp32 sums in another order, through clipped steps of Adam whose eps damps what rounding does to it.
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-6
CASES = [(layout, name) for layout in LAYOUTS for name in FROZEN if selected(layout, name)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every rank found, by case."""
    root: Path = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "untied", family="qwen3", tied=False)
    write_tiny_checkpoint(root / "routed", family="qwen3_moe", tied=False)
    actual: dict[str, list[Any]] = {}
    for world_size in (1, 2, 4):
        answers = run_ranks(world_size, train_all, str(root), world_size, timeout_s=240)
        actual |= {case: [answer[case] for answer in answers] for case in answers[0]}
    return actual


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_frozen_weights_keep_every_bit_and_the_others_move(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """On every rank; no more and no less than the patterns say."""
    for actual in ranks[f"{layout} {name}"]:
        assert actual["trainable"]
        moved = {key for key, start in actual["start"].items() if not torch.equal(actual["weights"][key], start)}
        frozen = {key for key in actual["start"] if key.startswith(FROZEN[name].names)}
        assert frozen
        assert moved == actual["start"].keys() - frozen


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[0] != "1"])
def test_the_others_train_as_on_one_rank(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """Gradient norm of every step and weights after the last."""
    (one,) = ranks[f"1 {name}"]
    for many in ranks[f"{layout} {name}"]:
        assert many["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE)
        for key, expected in one["weights"].items():
            assert (many["weights"][key] - expected).abs().max() <= WEIGHT_TOLERANCE, key


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[0] in ("dp2", "pp2")])
def test_checkpoints_of_partly_frozen_models(ranks: dict[str, list[Any]], layout: str, name: str) -> None:
    """Saved, trained on, loaded and trained on again: the same bits, though some layers have no optimizer state."""
    for actual in ranks[f"{layout} {name}"]:
        assert actual["resumed"]
        assert actual["same"]


@pytest.mark.parametrize("name", list(FROZEN))
def test_recomputation_changes_nothing(ranks: dict[str, list[Any]], name: str) -> None:
    """Layers behind a frozen embedding get the same gradients whether or not they are recomputed."""
    plain, recomputed = name.removesuffix(", recomputed"), name
    (expected,), (actual,) = ranks[f"1 {plain}"], ranks[f"1 {recomputed}"]
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-6)


@pytest.mark.parametrize("name", list(FROZEN))
def test_only_trained_weights_have_optimizer_state(ranks: dict[str, list[Any]], name: str) -> None:
    """As many first moments as elements that train, over all ranks; a tied embedding counts on both its stages."""
    (one,) = ranks[f"1 {name}"]
    trained = {key for key in one["start"] if not key.startswith(FROZEN[name].names)}
    elements = sum(one["start"][key].numel() for key in trained)
    for layout in ("1", "dp2", "dp2 not sharded", "pp2", "pp2 not sharded", "pp2-dp2"):
        if selected(layout, name):
            assert [actual["moments"] for actual in ranks[f"{layout} {name}"]] == [elements] * LAYOUTS[layout][0], (
                layout
            )


@pytest.mark.parametrize("name", list(MISTAKES))
def test_patterns_that_cannot_be_meant(ranks: dict[str, list[Any]], name: str) -> None:
    """An error on all ranks of the pipeline alike, though each sees its own stage only; none for what one stage has."""
    messages = ranks[f"mistake {name}"]
    expected = {
        "no such weight": "model.frozen=['decoder.layers.9.*']: no weight of the model has such a name",
        "the last stage has it": "",
        "everything": "freezes every weight: nothing is left to train",
        "tied output layer": "model.frozen=['output_layer.*']: no weight of the model has such a name",
    }[name]
    for message in messages:
        assert expected in message
        assert bool(message) == bool(expected)


def test_experts_are_numbered_over_the_whole_model(ranks: dict[str, list[Any]]) -> None:
    """Under expert parallelism the second rank's experts are 2 and 3 of 4."""
    for rank, names in enumerate(ranks["experts"]):
        numbers = {int(name.split("local_experts.")[1].split(".")[0]) for name in names}
        assert numbers == {2 * rank, 2 * rank + 1}
