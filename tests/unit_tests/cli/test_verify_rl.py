"""`mega-rl verify rl` from the command line: tables, JSON, exit codes, and what is said of mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_rl.cli.app import main
from mega_rl.config.keys import value_of
from mega_rl.verify.layouts import TOLERANCES, UPDATES
from mega_rl.verify.rl import faults
from mega_rl.verify.rl import run as lockstep
from mega_rl.verify.rl.compare import UpdateErrors
from mega_rl.verify.rl.inputs import SIZES, read_run

RIGHT = UpdateErrors(
    "actor", 0, 1, {phase: min(1e-7, tolerance) for phase, tolerance in TOLERANCES.items()}, "lm_head.weight"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `mega-rl verify rl`."""
    code = main(["verify", "rl", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def wrong_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locksteps of two updates, the second of which has another loss and so another gradient."""
    wrong = replace(RIGHT, errors={**RIGHT.errors, "loss": 0.16, "gradient": math.inf})

    def follow_layouts(config: Any, layouts: Any, folder: Path, **settings: Any) -> Iterator[lockstep.Lockstep]:
        for layout in layouts:
            updates = (RIGHT, wrong) if layout.name == "tp2" else (RIGHT,)
            yield layout, updates, lockstep.problem_of(updates, settings["tolerances"])

    monkeypatch.setattr(lockstep, "follow_layouts", follow_layouts)


@pytest.mark.usefixtures("wrong_loss")
def test_a_table_of_every_update_and_the_first_phase_that_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--layouts", "1,tp2")
    assert code == 1
    assert "1: agrees" in out
    assert "tp2: DIFFERS first at step 1, actor update 2: loss off by 0.16, tolerance 1e-05" in out
    assert "1.6e-01 !" in out
    assert all(phase in out for phase in TOLERANCES if phase != UPDATES)
    assert run(capsys, "--layouts", "1")[0] == 0
    assert run(capsys, "--layouts", "tp2", "--tolerance", "loss=1,gradient=1")[0] == 1  # an infinite error never passes


@pytest.mark.usefixtures("wrong_loss")
def test_json_holds_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--layouts", "tp2", "--json", "--steps", 3)
    answer = json.loads(out)
    assert code == 1
    assert not answer["good"]
    assert answer["steps"] == 3
    assert answer["layouts"][0]["updates"][1]["errors"]["gradient"] is None
    assert answer["layouts"][0]["updates"][0]["errors"]["gradient"] == 1e-7


@pytest.mark.parametrize("phase", [faults.FAULTS[0].phase, "loss", ""])
def test_a_planted_fault_that_is_not_named_ends_with_1(
    phase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = faults.FAULTS[0]
    update = RIGHT if phase else None
    monkeypatch.setattr(faults, "self_check", lambda folder, timeout_s: iter([(fault, update, phase)]))
    code, out, _ = run(capsys, "--self-check")
    named = phase == fault.phase
    assert code == int(not named)
    assert ("named" if named else f"NOT as {fault.phase}" if phase else "MISSED") in out
    assert fault.name in out
    assert f"{int(named)} of 1 planted faults" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--self-check"], "--self-check has its own runs"),
        (["engine.megatron.tp=2"], "engine.megatron.tp: verify rl has its own; leave it out"),
        (["quickstart", "gsm8k_qwen3_8b_8gpu"], "gsm8k_qwen3_8b_8gpu"),
        (["no_such_recipe"], "no_such_recipe"),
        (["--tolerance", "speed=1"], "--tolerance=speed=1: must be PHASE=NUMBER"),
        (["--layouts", "tp3x"], "'tp3x' is not a layout"),
        (["model.path=nowhere"], "nowhere"),
        (
            ["algorithm.kl=reward", "algorithm.advantage=grpo", "--layouts", "1"],
            "algorithm.kl=reward",
        ),
        (["trainer.minibatch_size=3", "--layouts", "1"], "trainer.minibatch_size=3"),
        (["reward.source=none", "--layouts", "1"], "reward.source=none with algorithm.advantage=grpo: it makes"),
        (["reward.source=http", "--layouts", "1"], "reward.source: verify rl has its own; leave it out"),
        (
            ["algorithm.loss=kl_cov", "algorithm.advantage=grpo"],
            "algorithm.old_logprobs=auto with algorithm.loss=kl_cov: |log ratio| has no derivative",
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2, out + err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_recipe_gives_its_algorithm_and_optimizer_and_the_command_the_rest() -> None:
    """Warm-ups fit the short run; sizes of the command line win."""
    settings = ["optim.lr=1e-4", "optim.warmup_steps=7", "rollout.temperature=0.6"]
    recipe = read_run("quickstart", settings[1:], steps=6).config
    assert recipe.algorithm.kl.coef == 0.01
    assert recipe.optim.schedule == "linear"
    assert recipe.optim.warmup_steps == 7  # given: the rules judge it
    assert recipe.rollout.temperature == 0.6
    assert recipe.trainer.steps == 6
    assert all(value_of(recipe, key) == value for key, value in SIZES.items())
    short = read_run("quickstart", settings[:1], steps=3).config
    assert (short.optim.warmup_steps, short.optim.lr) == (1, 1e-4)
