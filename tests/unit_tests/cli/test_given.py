"""Commands that learn from given answers set their kind, and distillation keeps whole or right answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mega_rl.cli.train import of_kind, write_answers
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.errors import UserError
from tests.helpers.selection import FULL

SCRIPT = Path(__file__).parents[3] / "scripts" / "post_training.py"


@pytest.mark.parametrize(
    ("command", "given", "kind"),
    [("sft", [], "sft"), ("dpo", ["algorithm.kind.beta=0.5"], "dpo"), ("dpo", ["algorithm.kind=kto"], "kto")],
)
def test_command_sets_its_kind(command: str, given: list[str], kind: str) -> None:
    config = load(None, of_kind(command, None, given))
    assert (config.algorithm.kind.name, config.reward.source.name, config.rollout.backend) == (kind, "none", "none")
    assert check(config, world_size=1) == []


def test_unfit_settings_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"algorithm.kind=rm: is not for mega-rl dpo; legal: dpo, ipo"):
        of_kind("dpo", None, ["algorithm.kind=rm"])
    problems = check(load(None, of_kind("sft", None, ["rollout.n=4", "algorithm.loss=gspo"])), world_size=1)
    assert [line.partition(" has no effect: it needs ")[0] for line in problems] == [
        "algorithm.loss=gspo",
        "rollout.n=4",
    ]
    assert all("algorithm.kind=rl: other kinds sample nothing" in line for line in problems)


@pytest.mark.parametrize(("only_right", "answers"), [(False, ["7", "8"]), (True, ["7"])])
def test_distillation_keeps_whole_answers(tmp_path: Path, only_right: bool, answers: list[str]) -> None:
    rows = [("7", "stop", True), ("8", "stop", False), ("99", "length", True)]
    samples = [{"prompt": "3+4=", "response": one, "finish": end, "right": right} for one, end, right in rows]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    write_answers(tmp_path / "samples.jsonl", tmp_path / "rows.jsonl", only_right=only_right)
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written == [{"prompt": "3+4=", "completion": one} for one in answers]
    (tmp_path / "samples.jsonl").write_text(json.dumps({**samples[0], "given_tokens": 3}))
    with pytest.raises(UserError, match=r"samples.jsonl:1: tools wrote a part of this response"):
        write_answers(tmp_path / "samples.jsonl", tmp_path / "rows.jsonl", only_right=only_right)


@pytest.mark.skipif(not FULL, reason="make test-full: twelve commands, five of them on two ranks")
def test_script_runs_every_stage(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--size", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = re.findall(
        r"^\| (\w+) \| (?:([\d.]+)% \([\d.]+% to [\d.]+%\))? \| (\d+) \|$", done.stdout, flags=re.MULTILINE
    )
    assert [name for name, *_ in rows] == ["base", "sft", "rm", "ppo", "dpo", "distill"]
    assert [name for name, right, _ in rows if not right] == ["rm"]
