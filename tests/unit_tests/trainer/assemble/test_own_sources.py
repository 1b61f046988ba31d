"""Rollout and data sources of a user's own: whole runs with them, resumed, on several ranks, and their mistakes."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.tracking.records.reader import read_record
from mega_rl.verify.replay import compare, prepare, result_of
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer.assemble.own_sources_on_ranks import SOURCES, run_all
from tests.unit_tests.verify.replay_on_ranks import replay_plans

REPLAY = {"rollout.backend": "none", "rollout.verify_interval": 10, "rollout.mismatch.mean_limit": 100.0}
RECORDED = {"metrics.records.interval": 1, "metrics.records.weights": True}
FORKS = {"rollout.source.forks": True, "rollout.source.first": 3}
LIMITS = {"rollout.source.timeout_s": 0.5, "rollout.source.max_failed_share": 0.9}
REPLAY |= {"rollout.mismatch.share_limit": 1.0, "rollout.mismatch.max_limit": 100.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("own"))
    (folder / "own.py").write_text(SOURCES)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """Outcomes of every run on one rank."""
    rows = {"data.source": f"{folder}/own.py:Sums", "data.train_files": [], "trainer.val_interval": 1}
    replay = {"rollout.source": f"{folder}/own.py:Recorded", **REPLAY, **rows}
    save = {"checkpoint.save_final": True, "run": "resumed"}
    turns = {"rollout.source": f"{folder}/own.py:Turns"}
    sampled = {"trainer.val_interval": 1, "validation.n": 2, "validation.temperature": 1.0}
    sampled |= {"validation.sets": {"held": f"{folder}/train.jsonl"}}
    wanted = [
        ("built in", {}),
        ("validated", sampled),
        ("one turn", {**turns, "rollout.source.turns": 1, **rows, "trainer.val_interval": 0}),
        ("one turn, validated", {**turns, "rollout.source.turns": 1, **sampled}),
        ("three turns", {**turns, "rollout.source.turns": 3}),
        ("forks", {**turns, **FORKS, "trainer.steps": 1, "metrics.records.interval": 1}),
        ("scored early", early(folder)),
        ("scored", {"rollout.source": f"{folder}/own.py:Scored", "reward.source": "environment"}),
        ("scores", scored_turns(folder)),
        ("hostile", {"rollout.source": f"{folder}/own.py:Hostile", **LIMITS, "trainer.steps": 1}),
        ("replay", replay),
        ("begun", {**replay, "trainer.steps": 1, **save}),
        ("resumed", {**replay, **save}),
        ("other rows", {**replay, "data.source.start": 1, "trainer.steps": 4, "run": "resumed"}),
    ]
    (outcomes,) = run_ranks(1, run_all, str(folder), "1", wanted, timeout_s=180)
    return outcomes  # type: ignore[no-any-return]


def early(folder: Path) -> dict[str, Any]:
    """Settings of trajectories that are scored while others run, by a function that gives the same rewards."""
    patient = {"rollout.source": f"{folder}/own.py:Patient", "rollout.source.turns": 1}
    return {**patient, "rollout.source.timeout_s": 20.0, "reward.function": f"{folder}/own.py:odd_digits"}


def scored_turns(folder: Path) -> dict[str, Any]:
    """Settings of forks whose turns have scores, which a critic's returns over turns read."""
    turns = {"rollout.source": f"{folder}/own.py:Turns", **FORKS, "rollout.source.scores": True}
    gae = {"name": "gae", "discount_per": "turn", "gamma": 0.9, "gae_lambda": 0.8}
    return {**turns, "reward.source": "environment", "algorithm.advantage": gae, **RECORDED}


def same_rows(first: dict[str, Any], second: dict[str, Any]) -> bool:
    pairs = zip(first["rows"], second["rows"], strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def numbers(outcome: dict[str, Any], *, without: str = "time/") -> list[dict[str, float]]:
    """Metrics of each step but for times."""
    left_out = ("time/", "perf/", "memory/", "agent/", "sync/", "checkpoint/", without)
    return [{k: v for k, v in step.items() if not k.startswith(left_out)} for step in outcome["metrics"]]


def test_one_turn_of_rows_of_a_source_is_what_the_built_in_sources_give(runs: dict[str, Any]) -> None:
    """Bit for bit, rows, metrics and weights: the same random numbers, order of prompts and batches."""
    own, built_in = runs["one turn"], runs["built in"]
    assert same_rows(own, built_in)
    assert numbers(own) == numbers(built_in)
    assert own["exported"] == built_in["exported"]
    assert [step["agent/turns_mean"] for step in own["metrics"]] == [1.0, 1.0]


def test_scores_of_an_environment_are_rewards(runs: dict[str, Any]) -> None:
    """Bit for bit, rewards and weights of the run whose reward function computes the same."""
    scored, built_in = runs["scored"], runs["built in"]
    assert "error" not in scored, scored["error"]
    assert scored["exported"] == built_in["exported"]
    own, given = ([s for s in numbers(run) if "reward/mean" in s] for run in (scored, built_in))
    assert [{name: s[name] for name in one} for one, s in zip(own, given, strict=True)] == own
    assert own[0]["reward/std"] > 0


def test_training_is_the_same_with_sampled_validations(runs: dict[str, Any]) -> None:
    """Bit for bit, rows and weights: validations draw random numbers of their own."""
    validated, built_in = runs["validated"], runs["built in"]
    assert "error" not in validated, validated["error"]
    assert {"val/held/pass_at_1", "val/held/maj_at_2_low"} <= validated["metrics"][0].keys()
    assert validated["exported"] == built_in["exported"]
    assert [step["reward/mean"] for step in validated["metrics"] if "reward/mean" in step] == [
        step["reward/mean"] for step in built_in["metrics"] if "reward/mean" in step
    ]


def test_evaluations_of_one_turn_are_those_of_the_built_in_source(runs: dict[str, Any]) -> None:
    """Two samples of each prompt at a temperature, with pass@k and maj@k, to the last bit."""
    own, built_in = runs["one turn, validated"], runs["validated"]
    assert "error" not in own, own["error"]
    assert "val/held/pass_at_1" in numbers(own)[0]
    assert numbers(own) == numbers(built_in)


def test_turns_train_on_what_the_policy_sampled(runs: dict[str, Any]) -> None:
    """The first turn is that of one turn; the tool's answer is off the mask, between turns; 8 tokens are all.

    The guard that compares each sampled token's log-prob with the trainer's has passed, to 1e-3 nats on average.
    """
    several, one = runs["three turns"], runs["one turn"]
    with_holes = 0
    for tokens, mask, logprobs, _ in several["rows"]:
        first = mask.int().argmax(dim=1)
        length = (tokens != 0).sum(dim=1).maximum(first)
        with_holes += sum(
            int((~mask[row, start : int(mask[row].nonzero().max())]).any()) for row, start in enumerate(first.tolist())
        )
        assert (logprobs[~mask] == 0).all()
        assert (logprobs[mask] <= 0).all()
        assert (length - first <= 8).all()
    assert with_holes
    first_turns = [mask.sum() for _, mask, *_ in one["rows"]]
    assert sum(mask.sum() for _, mask, *_ in several["rows"]) > sum(first_turns)
    assert several["metrics"][0]["rollout/logprob_diff_max"] < 1e-4


def test_forks_are_rows_of_one_trajectory(runs: dict[str, Any]) -> None:
    """Every second sample has two rows, whose first turn trains in one; the guard compares all tokens that train."""
    (step,) = (step for step in runs["forks"]["metrics"] if "reward/mean" in step)
    assert step["agent/branches_mean"] == 1.5
    ((tokens, mask, *_),) = runs["forks"]["rows"]
    assert len(tokens) > step["rollout/sequences"]  # a fork without a turn of its own is no row
    assert step["rollout/response_tokens"] == int(mask.sum()) == step["actor/trained_tokens"]
    assert step["rollout/logprob_diff_max"] < 1e-4


def test_trajectories_scored_early_train_as_those_scored_late(folder: Path, runs: dict[str, Any]) -> None:
    """Bit for bit; the function sees each response once."""
    check_early(folder, runs["scored early"], runs["built in"])


def check_early(folder: Path, scored_early: dict[str, Any], late: dict[str, Any]) -> None:
    assert "error" not in scored_early, scored_early["error"]
    assert same_rows(scored_early, late)
    assert numbers(scored_early) == numbers(late)
    assert scored_early["exported"] == late["exported"]
    counts = {path.read_text().count("1") for path in folder.glob("own.py.scored-*")}
    assert counts <= {64, 32}  # of one rank, and of each of two


def test_a_record_holds_turns_of_forks(folder: Path, runs: dict[str, Any]) -> None:
    """With forks: each turn trains in one row, and the rows that read it have its tokens and number."""
    assert "error" not in runs["forks"], runs["forks"]["error"]
    record = read_record(folder / "own-1-forks" / "records" / "step_000001")
    tensors = record.tensors
    places: dict[tuple[int, int, int], list[tuple[list[int], bool]]] = {}
    keys = zip(tensors["prompt_index"].tolist(), tensors["sample_index"].tolist(), strict=True)
    for row, (prompt, sample) in enumerate(keys):
        tokens, turn, mask = (tensors[name][row] for name in ("tokens", "turn", "loss_mask"))
        assert (turn[mask] > 0).all()
        for number in sorted({*turn.tolist()} - {0}):
            own = turn == number
            assert mask[own].all() or not mask[own].any()
            places.setdefault((prompt, sample, number), []).append((tokens[own].tolist(), bool(mask[own].all())))
        texts = "".join(text for number, text in record.rows[row]["conversation"] if number)
        assert texts == "".join(record.rows[row]["token_texts"][place] for place in turn.nonzero()[0])
    assert all([trains for _, trains in rows].count(True) == 1 for rows in places.values())
    assert all(ids == rows[0][0] for rows in places.values() for ids, _ in rows)
    assert [len(rows) for rows in places.values()].count(2) >= 8


@pytest.mark.parametrize("layout", ["1", "tp2", "fsdp2"])
def test_recorded_branches_replay_on_layout(folder: Path, runs: dict[str, Any], layout: str) -> None:
    """Forks, and turn scores with a critic after an update; on the layout that recorded them bit for bit."""
    steps = {"forks": 1, "scores": 2}
    prepared = [
        prepare(folder / f"own-1-{name}" / "records" / f"step_{step:06d}", layout, folder / f"{name}-{layout}")
        for name, step in steps.items()
    ]
    for _, (plan,) in prepared:
        Path(plan.target).mkdir(parents=True)
    run_ranks(1 if layout == "1" else 2, replay_plans, [plan for _, (plan,) in prepared], timeout_s=180)
    for record, (plan,) in prepared:
        assert record.tensors["branch"].any()
        differences = {one.tensor: one for one in result_of(record, plan)}
        assert {"old_logprobs", "ref_logprobs", "advantages", "token_weights", "loss_weights"} <= differences.keys()
        assert [one for one in differences.values() if not one.good] == []
        assert layout != "1" or {one.largest for one in differences.values()} == {0.0}
    scored = prepared[1][0].tensors
    assert {"values", "returns", "turn_scores"} <= scored.keys()
    assert scored["turn_scores"].any()


def test_hostile_environments_cost_their_samples(runs: dict[str, Any]) -> None:
    assert "error" not in runs["hostile"], runs["hostile"]["error"]
    (step,) = (step for step in runs["hostile"]["metrics"] if "reward/mean" in step)
    failed = step["agent/failed_error"] + step["agent/failed_timeout"]
    assert step["agent/failed_error"] > 0
    assert step["agent/failed_timeout"] > 0
    assert step["rollout/failed_samples"] == failed


def test_sources_without_an_engine_get_the_weights_and_resume(runs: dict[str, Any]) -> None:
    """Sums of the weights after the last publish; two steps at once, and one and one, bit for bit; held-out rows."""
    whole, resumed = runs["replay"], runs["resumed"]
    assert whole["received"] == whole["exported"]
    assert len(whole["received"]) > 10
    assert numbers(resumed) == numbers(whole)
    assert resumed["exported"] == whole["exported"]
    assert [step.get("replay/calls") for step in whole["metrics"]] == [None, 2.0, 4.0]  # of validations, too
    assert all("val/reward_mean" in step for step in whole["metrics"])


def test_a_checkpoint_of_other_rows_is_refused(runs: dict[str, Any]) -> None:
    assert runs["other rows"]["error"].startswith("UserError 2: ")
    assert "data" in runs["other rows"]["error"]


def test_rows_do_not_depend_on_the_layout(folder: Path, runs: dict[str, Any]) -> None:
    """Each rank samples its share of the prompts, and a source that depends on the rank is refused on all."""
    three = {"rollout.source": f"{folder}/own.py:Turns", "rollout.source.turns": 3}
    ranks = {"data.source": f"{folder}/own.py:of_ranks", "data.train_files": []}
    forks = {**three, "rollout.source.turns": 2, **FORKS, "trainer.steps": 1}
    wanted = [("three turns", three), ("forks", forks), ("scores", scored_turns(folder)), ("ranks", ranks)]
    wanted += [("built in", {}), ("scored early", early(folder))]
    for layout in ("tp2", "dp2", "pp2", "fsdp 2") if FULL else ("dp2",):
        outcomes = run_ranks(2, run_all, str(folder), layout, copy.deepcopy(wanted), timeout_s=180)
        for outcome, name in itertools.product(outcomes, ("three turns", "forks", "scores")):
            assert "error" not in outcome[name], outcome[name]["error"]
            for row, alone in zip(outcome[name]["rows"], runs[name]["rows"], strict=True):
                for own, one in zip(row, alone, strict=True):  # log-probs: sums in another order
                    torch.testing.assert_close(own, one, rtol=0.0, atol=1e-4 if own.is_floating_point() else 0.0)
            for name_of_sum, total in outcome[name]["exported"].items():
                assert total == pytest.approx(runs[name]["exported"][name_of_sum], abs=1e-3, rel=1e-4)
        alone, record = (
            read_record(folder / f"own-{where}-scores" / "records" / "step_000001") for where in ("1", layout)
        )
        assert [one for one in compare(alone, record, atol=1e-4) if not one.good] == []
        for outcome in outcomes:
            check_early(folder, outcome["scored early"], outcome["built in"])
            assert "rank 1 and rank 0 read different prompts" in outcome["ranks"]["error"]
