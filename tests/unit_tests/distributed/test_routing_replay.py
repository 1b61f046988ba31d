"""The experts of every token, recorded on any layout, replayed after the routers have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.types import Experience
from tests.helpers.distributed import initialized, run_ranks
from tests.helpers.engines import exported_gradients, own_rows, replaced, running_engine, worst_difference
from tests.helpers.models import random_experience
from tests.helpers.selection import without
from tests.unit_tests.distributed.engine_cases import losses
from tests.unit_tests.distributed.expert_cases import LAYOUTS, config_of, write_family


def with_routing(batch: Experience, routing: torch.Tensor | None) -> Experience:
    """The batch with this routing."""
    batch = batch.clone()
    batch.routing = routing
    return batch


def all_rows(routing: torch.Tensor, engine: Any) -> torch.Tensor:
    """[B, S, L, K] of all data-parallel ranks' rows of `own_rows`, in order."""
    ranks = engine.data_parallel
    count = int(ranks.sum(torch.tensor(routing.size(0))))
    full = torch.zeros(count, *routing.shape[1:], dtype=torch.int32)
    full[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size] = routing
    return ranks.sum(full)


def perturb_routers(engine: Any) -> None:
    """Other routers, the same on every layout."""
    from mega_rl.engines.models.moe import Router

    for model in engine.models:
        for module in model.modules():
            if isinstance(module, Router):
                noise = torch.Generator().manual_seed(module.layer_number)
                with torch.no_grad():
                    module.weight.add_(torch.randn(module.weight.shape, generator=noise).to(module.weight))
    engine.optimizer.reload_model_params()


def run_case(
    checkpoint: str, layout: str, *, padded: bool = False, recompute: str = "none", modules: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What is recorded before and after the routers change, with and without replay, and what training makes of it."""
    config = config_of(Path(checkpoint), layout, routing_replay=True)
    config = replaced(config, "trainer.microbatch", packing=not padded, size=2)
    config = replaced(config, "model", recompute=recompute, recompute_modules=list(modules or ("core_attn",)))
    result: dict[str, Any] = {}
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        before = engine.forward(rows)
        result["routing"] = all_rows(before.routing, engine)
        result["dtype"] = str(before.routing.dtype)
        for name, routing in (("free", None), ("replayed", before.routing)):
            metrics = engine.train_minibatch(with_routing(rows, routing), losses("lm"), lr=0.0)
            result[name] = {"gradients": exported_gradients(engine), "norm": metrics["grad_norm"]}
        perturb_routers(engine)
        result["moved"] = all_rows(engine.forward(rows).routing, engine)
        again = engine.forward(with_routing(rows, before.routing))
        result["again"] = all_rows(again.routing, engine)
        half = before.routing.clone()
        half[:, ::2] = -1
        result["half"] = all_rows(engine.forward(with_routing(rows, half)).routing, engine)
        for name, routing in (("moved free", None), ("moved replayed", before.routing)):
            metrics = engine.train_minibatch(with_routing(rows, routing), losses("lm"), lr=0.0)
            result[name] = {"loads": engine.routing.loads.clone(), "gradients": exported_gradients(engine)}
    return result


def refusals(checkpoint: str) -> list[str]:
    """What an engine says of a routing that cannot be of its model."""
    said = []
    with running_engine(config_of(Path(checkpoint), "1", routing_replay=True)) as engine:
        rows = random_experience()
        routing = engine.forward(rows).routing
        for wrong in (routing[..., :1], routing[:, :, :1], torch.full_like(routing, 99)):
            try:
                engine.forward(with_routing(rows, wrong))
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def unused(checkpoint: str) -> bool:
    """Whether an engine without replay records nothing, and takes no notice of a batch's routing."""
    with running_engine(config_of(Path(checkpoint), "1")) as engine:
        rows = random_experience()
        plain = engine.forward(rows)
        with_experts = engine.forward(with_routing(rows, torch.zeros(8, 24, 2, 2, dtype=torch.int16)))
        return (
            plain.routing is None
            and with_experts.routing is None
            and torch.equal(plain.logprobs, with_experts.logprobs)
        )


def travelling(size: int) -> list[int]:
    """The routing's first expert of rows exchanged over all ranks: it must travel with its row."""
    groups, _ = initialized()
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.comm import GroupRanks

    try:
        ranks = GroupRanks(groups.world)
        rows = random_experience()
        marks = 1000 * ranks.rank + torch.arange(8, dtype=torch.int16)
        rows.routing = marks[:, None, None, None].expand(8, 24, 3, 2).clone()
        received = ranks.exchange_rows(rows, torch.arange(8) % size)
        assert received.routing.dtype == torch.int16
        assert (received.routing == received.routing[:, :1, :1, :1]).all()
        return [int(mark) for mark in ranks.gather_rows(received).routing[:, 0, 0, 0]]
    finally:
        process_groups.destroy()


def run_cases(rank: int, size: int, cases: dict[str, dict[str, Any]], extras: str) -> dict[str, Any] | None:
    """Every case, and what is asked of one number of ranks alone."""
    actual: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            actual[name] = run_case(**case)
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    if size == 1:
        actual["refusals"], actual["unused"] = refusals(extras), unused(extras)
    else:
        actual[f"travelling {size}"] = travelling(size)
    return actual if rank == 0 else None


def real_tokens() -> torch.Tensor:
    """[B, S] bool, the tokens of `random_experience`."""
    batch = random_experience()
    return torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]


def loads_of(routing: torch.Tensor, experts: int) -> torch.Tensor:
    """[L, experts] float64, how many real tokens a recorded routing [B, S, L, K] sends to each expert."""
    chosen = routing[real_tokens()].long()  # [n, L, K]
    counts = [chosen[:, layer].flatten().bincount(minlength=experts) for layer in range(chosen.size(1))]
    return torch.stack(counts).double()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bit-equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

FULL = {"recompute": "full"}
MOE = {"recompute": "selective", "modules": ("moe",)}
# name -> family and how it runs; every one is held against one rank of its family
CASES: dict[str, dict[str, Any]] = {
    "1": {"family": "deepseek_v3", "layout": "1"},
    "1 padded": {"family": "deepseek_v3", "layout": "1", "padded": True},
    "1 moe": {"family": "deepseek_v3", "layout": "1", **MOE},
    "1 mixtral": {"family": "mixtral", "layout": "1"},
    "tp2-sp": {"family": "deepseek_v3", "layout": "tp2-sp"},
    "tp2-sp padded": {"family": "deepseek_v3", "layout": "tp2-sp", "padded": True, **FULL},
    "ep2": {"family": "deepseek_v3", "layout": "ep2"},
    "ep2 mixtral": {"family": "mixtral", "layout": "ep2", **MOE},
    "pp2": {"family": "deepseek_v3", "layout": "pp2"},
    "pp2 full": {"family": "mixtral", "layout": "pp2", **FULL},
    "cp2-ep2": {"family": "deepseek_v3", "layout": "cp2-ep2"},
    "cp2-ep2 padded": {"family": "mixtral", "layout": "cp2-ep2", "padded": True},
    "ep2-pp2-vpp2": {"family": "mixtral", "layout": "ep2-pp2-vpp2", **FULL},
}
# Each part of them stands in another case, too.
CASES = without(CASES, "1 padded", "1 moe", "ep2", "pp2", "cp2-ep2 padded")
ONE = {"deepseek_v3": "1", "mixtral": "1 mixtral"}
EXPERTS = {"deepseek_v3": 8, "mixtral": 4}
# As in test_expert_parallel: another order of sums in float32.
GRADIENT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by case."""
    root = tmp_path_factory.mktemp("families")
    paths = {family: str(write_family(root, family, layers=4)) for family in EXPERTS}
    answers: dict[str, Any] = {}
    for size in (1, 2, 4):
        cases = {
            name: {"checkpoint": paths[case["family"]], **{k: v for k, v in case.items() if k != "family"}}
            for name, case in CASES.items()
            if LAYOUTS[case["layout"]][0] == size
        }
        answers |= run_ranks(size, run_cases, size, cases, paths["deepseek_v3"], timeout_s=240)[0]
    return answers


@pytest.mark.parametrize("name", list(CASES))
def test_recorded_experts_do_not_depend_on_the_layout(results: dict[str, Any], name: str) -> None:
    """Equal numbers for every real token and mixture, prompts included; -1 on padding; int16."""
    one, many = results[ONE[CASES[name]["family"]]], results[name]
    layers = 3 if CASES[name]["family"] == "deepseek_v3" else 4  # the first layer of DeepSeek's is dense
    assert many["routing"].shape[:3] == (8, 24, layers)
    assert torch.equal(many["routing"], one["routing"])
    assert many["dtype"] == "torch.int16"
    assert (many["routing"][~real_tokens()] == -1).all()
    chosen = many["routing"][real_tokens()]
    assert chosen.min() == 0
    assert chosen.max() == EXPERTS[CASES[name]["family"]] - 1
    assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()  # no expert twice


@pytest.mark.parametrize("name", list(CASES))
def test_replay_of_unchanged_weights_changes_no_bit(results: dict[str, Any], name: str) -> None:
    """Gradients and norm."""
    free, replayed = results[name]["free"], results[name]["replayed"]
    assert same(free["gradients"], replayed["gradients"]) == []
    assert free["norm"] == replayed["norm"]


@pytest.mark.parametrize("name", list(CASES))
def test_changed_routers_take_the_recorded_experts(results: dict[str, Any], name: str) -> None:
    """In a forward and in training, where the counts of the experts say so; free, the routers would choose others."""
    many, experts = results[name], EXPERTS[CASES[name]["family"]]
    assert torch.equal(many["again"], many["routing"])
    changed = (many["moved"] != many["routing"]).any(-1)[real_tokens()]
    assert changed.float().mean() > 0.3
    assert torch.equal(many["moved replayed"]["loads"], loads_of(many["routing"], experts))
    assert torch.equal(many["moved free"]["loads"], loads_of(many["moved"], experts))
    assert not torch.equal(many["moved free"]["loads"], many["moved replayed"]["loads"])


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_flow_through_the_replayed_experts(results: dict[str, Any], name: str) -> None:
    """Those of one rank that replays, recomputing or not; the routers have some of their own."""
    one = results[ONE[CASES[name]["family"]]]["moved replayed"]["gradients"]
    many = results[name]["moved replayed"]["gradients"]
    distance, worst = worst_difference(many, one)
    assert distance <= GRADIENT_TOLERANCE, worst
    routers = [n for n in one if n.endswith(".gate.weight")]
    assert routers
    for router in routers:
        assert one[router].abs().max() > 0
        free = results[name]["moved free"]["gradients"][router]
        assert worst_difference({router: one[router]}, {router: free})[0] > 1e-2


@pytest.mark.parametrize("name", ["1", "tp2-sp", "cp2-ep2"])
def test_tokens_without_a_record_choose_for_themselves(results: dict[str, Any], name: str) -> None:
    """Of a record of every second token these keep theirs; in the first mixture the others choose as if alone."""
    many = results[name]
    kept, inside = many["half"][:, 1::2], real_tokens()
    assert torch.equal(kept[inside[:, 1::2]], many["routing"][:, 1::2][inside[:, 1::2]])
    # Deeper mixtures see hidden states that the replay of the other tokens has changed.
    assert torch.equal(many["half"][:, ::2, 0], many["moved"][:, ::2, 0])


def test_records_that_cannot_be_the_models_are_refused(results: dict[str, Any]) -> None:
    """Another number of experts per token or of mixtures, and experts that there are not."""
    first, second, third = results["refusals"]
    assert "RunError: routing has (3, 1) choices per token, the model (3, 4)" in first
    assert "RunError: routing has (1, 4) choices per token, the model (3, 4)" in second
    assert third == "RunError: routing names experts outside 0..7"


def test_nothing_is_recorded_unless_asked(results: dict[str, Any]) -> None:
    assert results["unused"]


@pytest.mark.parametrize("size", [2, 4])
def test_routing_travels_with_its_row(results: dict[str, Any], size: int) -> None:
    """Rows i of all ranks meet on rank i modulo their number."""
    expected = [1000 * rank + row for to in range(size) for rank in range(size) for row in range(to, 8, size)]
    assert results[f"travelling {size}"] == expected
