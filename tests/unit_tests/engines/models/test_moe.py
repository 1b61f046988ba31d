"""Idle experts and ranks, the balance loss, moving biases and recomputation, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.models import random_experience
from tests.helpers.selection import without
from tests.unit_tests.distributed.expert_cases import LAYOUTS, write_family
from tests.unit_tests.engines.models.moe_cases import BIAS, USED, run_cases, write_lopsided

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

# float32: sums of a few hundred terms in another order.
TOLERANCE = 2e-5
# Recomputing a norm or the shared experts changes the order in which the gradients of their input's uses are added:
# 1e-6 is measured, on the gradient of a key's bias, which is small beside its terms. Other modules: not a bit.
REORDERED = {"layernorm": 5e-6, "shared_experts": 5e-6}
IDLE: dict[str, dict[str, Any]] = {
    "ep2": {"layout": "ep2"},
    "ep2 allgather": {"layout": "ep2", "dispatcher": "allgather"},
    "tp2-sp": {"layout": "tp2-sp"},
    "tp2-sp-ep2": {"layout": "tp2-sp-ep2"},
    "tp2-sp-ep2 allgather": {"layout": "tp2-sp-ep2", "dispatcher": "allgather"},
    "ep4 allgather": {"layout": "ep4", "dispatcher": "allgather"},
    "ep2-etp2": {"layout": "ep2-etp2"},
    "ep2-pp2": {"layout": "ep2-pp2"},
}
BALANCE: dict[str, dict[str, Any]] = {
    "1 padded": {"layout": "1", "padded": True},
    "1 full": {"layout": "1", "recompute": "full"},
    "ep2": {"layout": "ep2"},
    "tp2-sp": {"layout": "tp2-sp", "recompute": "full"},
    "pp2": {"layout": "pp2"},
    "cp2-ep2": {"layout": "cp2-ep2"},
    "cp2-ep2 padded": {"layout": "cp2-ep2", "padded": True},
    "ep2-dp4": {"layout": "ep2-dp4"},
    "ep2-dp4 average": {"layout": "ep2-dp4", "average": True},
}
BIASES: dict[str, dict[str, Any]] = {
    "1 full": {"layout": "1", "recompute": "full"},
    "ep2": {"layout": "ep2"},
    "tp2-sp": {"layout": "tp2-sp"},
    "pp2": {"layout": "pp2", "recompute": "full"},
    "cp2-ep2": {"layout": "cp2-ep2"},
}
MODULES = {
    "qwen2_moe": ("core_attn", "layernorm", "moe", "shared_experts"),
    "deepseek_v3": ("core_attn", "layernorm", "mlp", "moe", "mla_up_proj", "shared_experts"),
}
RECOMPUTE: dict[str, dict[str, Any]] = {}
for _family, _modules in MODULES.items():
    for _layout in ("1", "tp2-sp-ep2") if _family == "deepseek_v3" else ("1",):
        _how: dict[str, dict[str, Any]] = {"full": {"recompute": "full"}, "none": {}}
        _chosen = _modules if _layout == "1" else tuple(m for m in _modules if m not in ("core_attn", "shared_experts"))
        _how |= {module: {"recompute": "selective", "modules": (module,)} for module in _chosen}
        RECOMPUTE |= {
            f"{_layout} {_family} {n}": {"family": _family, "layout": _layout, **how} for n, how in _how.items()
        }
# Their parts stand in other cases, too: these are for `make test-full`.
IDLE = without(IDLE, "ep2", "ep2 allgather", "ep2-etp2", "tp2-sp-ep2 allgather")
BALANCE = without(BALANCE, "1 padded", "ep2-dp4", "cp2-ep2", "tp2-sp")
BIASES = without(BIASES, "1 full", "ep2")
RECOMPUTE = without(
    RECOMPUTE, "1 qwen2_moe core_attn", "1 qwen2_moe layernorm", "1 qwen2_moe moe", "1 deepseek_v3 core_attn",
    "1 deepseek_v3 layernorm", "1 deepseek_v3 moe", "tp2-sp-ep2 deepseek_v3 mlp",
)  # fmt: skip
FAMILY = {"balance": "deepseek_v3", "bias": "deepseek_v3", "idle": "lopsided"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by kind and name; one launch for each number of ranks."""
    root = tmp_path_factory.mktemp("families")
    paths = {family: str(write_family(root, family)) for family in ("qwen2_moe", "deepseek_v3", "mixtral")}
    paths["lopsided"] = str(write_lopsided(root))
    saved = str(root / "saved")
    cases: dict[str, dict[str, Any]] = {
        "idle 1": {"kind": "idle", "layout": "1"},
        "balance 1": {"kind": "balance", "layout": "1"},
        "bias 1": {"kind": "bias", "layout": "1", "folder": saved},
    }
    for kind, chosen in {"idle": IDLE, "balance": BALANCE, "bias": BIASES, "recompute": RECOMPUTE}.items():
        cases |= {f"{kind} {name}": {"kind": kind, **case} for name, case in chosen.items()}
    answers: dict[str, Any] = {}
    for world_size in (1, 2, 4):
        here = {name: dict(case) for name, case in cases.items() if LAYOUTS[case["layout"]][0] == world_size}
        for case in here.values():
            case["checkpoint"] = paths[case.pop("family", None) or FAMILY[case["kind"]]]
        if world_size == 1:
            for family in ("deepseek_v3", "mixtral"):
                here[f"by hand {family}"] = {"kind": "by hand", "checkpoint": paths[family]}
            here["balance 1 mixtral"] = {"kind": "balance", "layout": "1", "checkpoint": paths["mixtral"]}
            here["fusions"] = {"kind": "fusions", "checkpoint": paths["qwen2_moe"]}
        answers |= run_ranks(world_size, run_cases, here, timeout_s=300)[0]
    return answers


@pytest.mark.parametrize("name", list(IDLE))
def test_experts_and_ranks_without_tokens(results: dict[str, Any], name: str) -> None:
    """No hang; everything as on one rank, though whole ranks have no token for their experts and no rows."""
    one, many = results["idle 1"], results[f"idle {name}"]
    assert (many["logprobs"] - one["logprobs"]).abs().max() <= 1e-5
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=2e-6)
    distance, weight = worst_difference(many["gradients"], one["gradients"])
    assert distance <= TOLERANCE, weight
    for weight, gradient in many["gradients"].items():
        if ".mlp.experts." in weight:
            expert = int(weight.split(".experts.")[1].split(".")[0])
            assert (float(gradient.abs().max()) > 0) == (expert in USED), weight


@pytest.mark.parametrize("name", ["1", *IDLE])
def test_only_real_tokens_count(results: dict[str, Any], name: str) -> None:
    """Dummy micro-batches and padding are computed, and are in no load: two experts for each token of three rows."""
    tokens = int(random_experience()[:3].lengths.sum())
    case = results[f"idle {name}"]
    expected = torch.tensor([[tokens if expert in USED else 0 for expert in range(8)]], dtype=torch.float64)
    assert torch.equal(case["loads"], expected)
    assert case["metrics"]["moe_experts_without_tokens"] == 6.0
    assert case["metrics"]["moe_load_max_over_mean"] == 4.0
    assert case["metrics"]["moe_load_max_over_mean_max"] == 4.0


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_balance_loss_is_what_its_definition_says(results: dict[str, Any], family: str) -> None:
    """The mean over rows of E sum_e f_e P_e, summed over mixtures, times its coefficient; value and gradients."""
    by_hand = results[f"by hand {family}"]
    engine = results["balance 1" if family == "deepseek_v3" else "balance 1 mixtral"]
    assert engine["loss"] == pytest.approx(by_hand["loss"], rel=1e-6)
    distance, weight = worst_difference(engine["gradients"], by_hand["gradients"])
    assert distance <= TOLERANCE, weight
    routers = [name for name in by_hand["gradients"] if name.endswith(".gate.weight")]
    assert routers
    assert all(float(by_hand["gradients"][name].norm()) > 1e-4 for name in routers)


@pytest.mark.parametrize("name", list(BALANCE))
def test_balance_loss_does_not_depend_on_layout_or_micro_batches(results: dict[str, Any], name: str) -> None:
    """Value and gradients, of a loss that is nothing else."""
    one, many = results["balance 1"], results[f"balance {name}"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    distance, weight = worst_difference(many["gradients"], one["gradients"])
    assert distance <= TOLERANCE, weight


def test_biases_move_against_the_load(results: dict[str, Any]) -> None:
    """By the rate, once per update and for its tokens alone: the forward before does not count."""
    one = results["bias 1"]
    before, *after = one["biases"]
    tokens = int(random_experience().lengths.sum())
    for loads, moved in zip(one["loads"], after, strict=True):
        assert (loads.sum(1) == 4 * tokens).all()
        expected = before + 0.01 * (loads.mean(1, keepdim=True) - loads).sign().float()
        assert torch.equal(moved, expected)
        assert not torch.equal(moved, before)
        before = moved
    assert torch.equal(one["loaded"], before)


@pytest.mark.parametrize("name", list(BIASES))
def test_biases_are_those_of_one_rank(results: dict[str, Any], name: str) -> None:
    """Bit for bit, as exported; recomputation counts nothing twice."""
    one, many = results["bias 1"], results[f"bias {name}"]
    for expected, loads in zip(one["loads"], many["loads"], strict=True):
        assert torch.equal(loads, expected)
    for expected, bias in zip(one["biases"], many["biases"], strict=True):
        assert torch.equal(bias, expected), BIAS


def test_kernels_of_mixtures_are_asked_of_megatron_core(results: dict[str, Any]) -> None:
    """Tokens are rearranged by a kernel where Transformer Engine's layers run, unless bits are to repeat."""
    assert [list(switches.values()) for switches in results["fusions"]] == [
        [False, False],
        [True, False],
        [False, False],
        [True, True],
        [False, False],
    ]


@pytest.mark.parametrize("name", [name for name in RECOMPUTE if not name.endswith(" none")])
def test_recomputation_changes_no_gradient(results: dict[str, Any], name: str) -> None:
    """The same operations again; and every token is counted once."""
    case = RECOMPUTE[name]
    kept, again = results[f"recompute {case['layout']} {case['family']} none"], results[f"recompute {name}"]
    distance, weight = worst_difference(again["gradients"], kept["gradients"])
    assert distance <= REORDERED.get(name.split()[-1], 0.0), weight
    assert torch.equal(again["loads"], kept["loads"])
