"""Families on every kind of layout compute what one rank computes; a planted fault is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.verify.layouts import ALL, FP32, REFERENCE, Layout, LayoutErrors, Plan, resolve
from mega_rl.verify.run import problems
from mega_rl.verify.twin import write_random_twin
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL, covering, without
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import ROUTED, TIED_DENSE, bare_config, measure_all, measure_broken

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

FAMILIES = (TIED_DENSE, ROUTED, "deepseek_v3", *(("qwen2", "llama", "mixtral") if FULL else ()))
EXPERTS_ONLY = ("ep2", "ep2+etp2", "tp2+ep2+sp")
MIXTURES = (ROUTED, "mixtral", "deepseek_v3")
# Every layout once and every family twice: test_expert_parallel.py and test_engine_parity.py have more of them. All
# families on all layouts in `make test-full`.
PAIRS = covering(
    (family, name) for family in FAMILIES for name in ALL.split(",") if name not in EXPERTS_ONLY or family in MIXTURES
)
# Fault -> (family, layout, what the worst gradient's name must hold).
PLANTED = {
    "sp: norms": (TIED_DENSE, "tp2+sp", "norm.weight"),
    "pp: tied embedding": (TIED_DENSE, "pp2", "embed_tokens.weight"),
    "dp: experts": (ROUTED, "tp2+sp+etp1", ".experts."),
    "one copy": (TIED_DENSE, "tp2+sp", "final_layernorm"),
}
PLANTED = without(PLANTED, "sp: norms", "dp: experts")


class Folders:
    """The twin and the answers of each family."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.threads: list[list[int]] = []  # of each rank of each launch, after each plan
        for family in FAMILIES:
            bare = bare_config(root / family / "bare", {**TINY[family], "tie_word_embeddings": family == TIED_DENSE})
            write_random_twin(bare, root / family / "twin", multiple=4)

    def layout(self, family: str, name: str) -> Layout:
        return resolve(name, read_hf_config(self.root / family / "twin"))

    def plan(self, family: str, layouts: Sequence[Layout], *, folder: str) -> Plan:
        """Return a plan; the reference lies in the family's folder whatever the plan's own is."""
        where = self.root / family / folder
        where.mkdir(exist_ok=True)
        for reference in ("reference.safetensors", "reference.json"):
            there = self.root / family / "answers" / reference
            if folder != "answers" and not (where / reference).exists():
                (where / reference).symlink_to(there)
        return Plan(str(self.root / family / "twin"), str(where), tuple(layouts), timeout_s=120.0)

    def results(self, family: str, name: str, *, folder: str = "answers") -> LayoutErrors:
        return LayoutErrors.read(Plan("", str(self.root / family / folder), ()).answer(self.layout(family, name)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The twins, and what one rank computes."""
    folders = Folders(tmp_path_factory.mktemp("matrix"))
    run_ranks(1, measure_all, [folders.plan(family, [REFERENCE], folder="answers") for family in FAMILIES])
    return folders


@pytest.fixture(scope="module")
def answers(folders: Folders) -> Folders:
    """The answers of all layouts; one launch for each number of ranks."""
    for ranks in (2, 4):
        plans = []
        for family in FAMILIES:
            wanted = [folders.layout(family, name) for there, name in PAIRS if there == family]
            if of_this_size := [layout for layout in wanted if layout.ranks == ranks]:
                plans.append(folders.plan(family, of_this_size, folder="answers"))
        folders.threads += run_ranks(ranks, measure_all, plans, timeout_s=400)
    return folders


@pytest.fixture(scope="module")
def broken(folders: Folders) -> Folders:
    """The answers with each fault; one launch."""
    plans = {
        fault: folders.plan(family, [folders.layout(family, name)], folder=fault.replace(":", ""))
        for fault, (family, name, _) in PLANTED.items()
    }
    run_ranks(2, measure_broken, plans, timeout_s=200)
    return folders


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_a_layout_computes_what_one_rank_computes(answers: Folders, family: str, name: str) -> None:
    """Within the tolerances that users get, over every tensor of the model."""
    results = answers.results(family, name)
    assert problems(results, FP32) == []
    assert len(results.weights) >= len(results.gradients) > 20
    assert results.num_microbatches >= 2


def test_layouts_leave_no_threads(answers: Folders) -> None:
    """Each group of gloo has three, which live as long as anything knows the group."""
    assert len(answers.threads) == 2 + 4
    for counts in answers.threads:
        assert len(set(counts)) == 1, f"threads after each family: {counts}"


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_named(broken: Folders, fault: str) -> None:
    """Without one of the reductions the layout differs, and the tensor that lacks it is named."""
    family, name, culprit = PLANTED[fault]
    results = broken.results(family, name, folder=fault.replace(":", ""))
    lines = problems(results, FP32)
    assert any(culprit in line for line in lines), lines
    worst, error = next(iter(results.gradients.items()))
    if fault == "one copy":  # what the exporter takes is right: only the comparison of copies sees it
        assert error <= FP32["gradient"]
    else:
        assert culprit in worst
        assert error > 100 * FP32["gradient"]


def test_errors_are_far_below_the_tolerances(answers: Folders) -> None:
    """A margin of five, so that another machine's order of sums changes no verdict."""
    strict = {name: allowed / 5 for name, allowed in FP32.items()}
    for family, name in PAIRS:
        assert problems(answers.results(family, name), strict) == [], (family, name)
