"""Mixtures and some dense families on every layout compute what one rank computes, up to weights and loads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.selection import without
from tests.unit_tests.distributed.expert_cases import DENSE, FAMILIES, LAYOUTS, run_cases, write_family

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

# fp32: sums of a few hundred terms in another order. Measured: gradients 2e-6, norms 3e-7, log-probs 1e-6.
LOGPROB_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
NORM_TOLERANCE = 2e-6
# Of a step of 1e-3. Adam divides by the gradient's own size, so rounding counts for much where a gradient is small.
WEIGHT_TOLERANCE = 2e-5
SMALL_GRADIENT = 1e-6  # where rounding, of some 1e-8, is a part of the step that WEIGHT_TOLERANCE does not allow
# layout -> families with whole gradients; the last one of some layouts a second time with a sharded optimizer.
PLAN = {
    "ep2": FAMILIES,
    "pp2": ("glm4_moe", "kimi_k2", "deepseek_v3", "gpt_oss", *DENSE),
    "cp2-ep2": ("qwen3_moe", "deepseek_v3"),
    "tp2-sp": ("qwen2_moe", "olmoe", "deepseek_v2", *DENSE),
    "tp2-sp-etp1": ("mixtral", "gpt_oss"),
    "tp2-sp-ep2": ("qwen2_moe", "mistral4", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    "ep4": ("mixtral", "gpt_oss"),
    "ep2-dp4": ("qwen3_moe", "deepseek_v3"),
    "ep2-etp2": ("olmoe", "kimi_k2"),
    "ep2-pp2": ("glm4_moe", "gpt_oss"),
    "tp2-sp-ep2-dp2": ("deepseek_v2", "gpt_oss"),
    "tp2-sp-ep2-etp2": ("qwen2_moe",),
}
CASES: dict[str, dict[str, Any]] = {
    f"{layout} {family}": {"layout": layout, "family": family} for layout, chosen in PLAN.items() for family in chosen
}
CASES |= {
    f"{layout} {PLAN[layout][-1]} sharded": {"layout": layout, "family": PLAN[layout][-1], "sharded": True}
    for layout in ("ep2", "cp2-ep2", "tp2-sp-etp1", "tp2-sp-ep2", "ep2-etp2", "ep2-pp2", "tp2-sp-ep2-dp2")
}
CASES |= {
    f"{layout} {family} allgather": {"layout": layout, "family": family, "dispatcher": "allgather"}
    for layout, family in {
        "ep2": "mixtral", "pp2": "glm4_moe", "tp2-sp-ep2": "gpt_oss", "ep2-etp2": "kimi_k2"
    }.items()
}  # fmt: skip
CASES |= {
    f"{layout} {family} padded": {"layout": layout, "family": family, "padded": True}
    for layout, family in {"ep2": "qwen2_moe", "tp2-sp-ep2": "deepseek_v3"}.items()
}
CASES["tp2-sp-ep2 deepseek_v2 shared experts overlap"] = {
    "layout": "tp2-sp-ep2", "family": "deepseek_v2", "shared_expert_overlap": True
}  # fmt: skip
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
CASES |= {
    f"{layout} {family} sharded {name}": {"layout": layout, "family": family, "sharded": True, "ddp": ddp}
    for layout, family, name, ddp in (
        ("tp2-sp-ep2", "deepseek_v3", "overlap", OVERLAP),
        ("ep2-dp4", "glm4_moe", "instances", {"optimizer_instances": 2}),
        ("ep2-etp2", "olmoe", "average", {"average_in_collective": True}),
    )
}

# Of each layout at least one family stays in `make test`, with whole gradients, and of each family at least one layout;
# a sharded optimizer, a dispatcher and padding are each met with several of both.
CASES = without(
    CASES, "ep2 mixtral", "ep2 qwen2_moe", "ep2 olmoe", "ep2 glm4_moe", "ep2 kimi_k2", "pp2 kimi_k2", "tp2-sp olmoe",
    "tp2-sp-ep2 deepseek_v2", "ep4 mixtral", "ep2-dp4 qwen3_moe", "ep2-pp2 gpt_oss", "tp2-sp-ep2-dp2 deepseek_v2",
    "pp2 glm4_moe allgather", "ep2-pp2 gpt_oss sharded", "ep2-etp2 kimi_k2 sharded", "ep2 deepseek_v2",
    "ep2 qwen3_moe", "ep2 gpt_oss", "tp2-sp-etp1 gpt_oss", "cp2-ep2 deepseek_v3", "tp2-sp-ep2 deepseek_v3",
    "tp2-sp-ep2 gpt_oss sharded", "ep2-etp2 kimi_k2", "pp2 deepseek_v3", "pp2 gpt_oss", "pp2 glm4", "tp2-sp qwen2_moe",
    "pp2 apertus", "ep2 mistral4",
    "tp2-sp gemma3_text", "tp2-sp-ep2 gpt_oss", "tp2-sp-ep2-dp2 gpt_oss sharded", "ep2 gpt_oss sharded",
    "tp2-sp-ep2 deepseek_v2 shared experts overlap", "ep2 mixtral allgather",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by case; one launch for each number of ranks."""
    root = tmp_path_factory.mktemp("families")
    paths = {family: str(write_family(root, family)) for family in (*FAMILIES, *DENSE)}
    ones = {f"1 {family}": {"layout": "1", "family": family} for family in paths}
    answers: dict[str, Any] = {}
    for world_size in (1, 2, 4):
        cases = {
            name: {"checkpoint": paths[case["family"]], **{k: v for k, v in case.items() if k != "family"}}
            for name, case in {**ones, **CASES}.items()
            if LAYOUTS[case["layout"]][0] == world_size
        }
        answers |= run_ranks(world_size, run_cases, cases, timeout_s=300)[0]
    return answers


@pytest.mark.parametrize("name", list(CASES))
def test_layout_computes_what_one_rank_computes(results: dict[str, Any], name: str) -> None:
    """Log-probs, every clipped gradient, the norm before clipping, and the weights after the step."""
    one, many = results[f"1 {CASES[name]['family']}"], results[name]
    assert (many["logprobs"] - one["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=NORM_TOLERANCE)
    assert one["metrics"]["grad_norm"] > 0.6  # more than is clipped to, so that the norm takes part in every gradient
    if "gradients" in many:
        distance, worst = worst_difference(many["gradients"], one["gradients"])
        assert distance <= GRADIENT_TOLERANCE, worst
    for weight, gradient in one["gradients"].items():
        settled = gradient.abs() > SMALL_GRADIENT
        assert ((many["weights"][weight] - one["weights"][weight]).abs() * settled).max() <= WEIGHT_TOLERANCE, weight


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["family"] in FAMILIES])
def test_load_metrics_are_those_of_one_rank(results: dict[str, Any], name: str) -> None:
    """Counts of real tokens are whole numbers: equal, not close."""
    one, many = results[f"1 {CASES[name]['family']}"]["metrics"], results[name]["metrics"]
    loads = {key: value for key, value in one.items() if key.startswith("moe_")}
    assert set(loads) == {"moe_load_max_over_mean", "moe_load_max_over_mean_max", "moe_experts_without_tokens"}
    assert {key: many[key] for key in loads} == loads
    assert loads["moe_load_max_over_mean_max"] >= loads["moe_load_max_over_mean"] > 1.0


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_every_kind_of_weight_learns(results: dict[str, Any], family: str) -> None:
    """Routers, experts, shared experts, gates, norms and biases: each kind has a gradient and moves."""
    one = results[f"1 {family}"]
    moved: dict[str, float] = {}
    for name in one["weights"]:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        way = float((one["weights"][name] - one["start"][name]).abs().max())
        moved[kind] = max(moved.get(kind, 0.0), way)
    still = [kind for kind, way in moved.items() if way == 0.0]
    # The first moves by its own rule, the others are constants of xIELU.
    assert still == [kind for kind in moved if kind.endswith(("e_score_correction_bias", "act_fn.beta", "act_fn.eps"))]
