"""`mega-rl verify engines` finds what the FSDP engine gets wrong: each planted fault is seen where it shows first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_rl.verify.layouts import FP32, REFERENCE, LayoutErrors, Plan, fsdp
from mega_rl.verify.run import problems
from mega_rl.verify.twin import write_random_twin
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import without
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import TIED_DENSE, bare_config, measure_all, measure_broken

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

STEPS = 2  # one more than Adam's first, which does not depend on how fast moments decay
# Fault -> how a line of what is out of tolerance begins.
PLANTED = {
    "one weight": "log-probs",
    "positions": "log-probs",
    "one gradient": "gradient of model.layers.0.self_attn.k_norm.weight",
    "averaged gradients": "gradient norm",
    "padding row": "gradient of model.embed_tokens.weight",
    "optimizer": "step of",
}
PLANTED = without(PLANTED, "one weight", "averaged gradients", "padding row")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutErrors]:
    """What two ranks of the FSDP engine compute, without a fault ("") and with each."""
    root = tmp_path_factory.mktemp("engines")
    bare = bare_config(root / "bare", {**TINY[TIED_DENSE], "tie_word_embeddings": True})
    write_random_twin(bare, root / "twin", multiple=4)
    plan = Plan(str(root / "twin"), str(root), (REFERENCE,), steps=STEPS, timeout_s=60.0)
    run_ranks(1, measure_all, [plan])
    plans = {}
    for fault in ("", *PLANTED):
        folder = root / (fault or "right")
        folder.mkdir()
        for reference in (plan.reference_tensors, plan.reference_facts):
            (folder / reference.name).symlink_to(reference)
        plans[fault] = replace(plan, folder=str(folder), layouts=(fsdp(2),))
    run_ranks(2, measure_faults, plans[""], {fault: plans[fault] for fault in PLANTED})
    return {fault: LayoutErrors.read(plan.answer(fsdp(2))) for fault, plan in plans.items()}


def measure_faults(rank: int, right: Plan, broken: dict[str, Plan]) -> None:
    """Without a fault, then with each."""
    measure_all(rank, [right])
    measure_broken(rank, broken)


def test_engines_agree(answers: dict[str, LayoutErrors]) -> None:
    """Every tensor of the model is compared, and moves."""
    actual = answers[""]
    assert problems(actual, FP32) == []
    assert len(actual.weights) == len(actual.gradients) > 20
    assert actual.num_microbatches >= 2


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_named(answers: dict[str, LayoutErrors], fault: str) -> None:
    lines = problems(answers[fault], FP32)
    assert any(line.startswith(PLANTED[fault]) for line in lines), lines


def test_optimizer_faults_show_only_in_weights(answers: dict[str, LayoutErrors]) -> None:
    """Adam's first step does not depend on how fast the first moment decays, so a single step would not show it."""
    assert [line.partition(" ")[0] for line in problems(answers["optimizer"], FP32)] == ["step"]
    assert max(answers["optimizer"].gradients.values()) <= FP32["gradient"]
