"""`mega-rl eval` as one types it: files, results, layouts, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mega_rl.algorithms.evaluation import pass_at_k
from mega_rl.cli.app import main
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.cli.quickstart.sums import TOKENS, write_data
from mega_rl.tracking.health.records import read_records
from tests.helpers.selection import without
from tests.helpers.sglang import wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
REWARD = "def odd(response):\n    return {'odd': float(len(response) % 2), 'short': 0.0}\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    write_fresh_model(folder / "model", TOKENS, seed=1)
    write_data(folder, seed=0, num_held_out=6)
    (folder / "odd.py").write_text(REWARD)
    return folder


def command(inputs: Path, out: str, *more: str) -> list[str]:
    arguments = ["--out", f"{inputs}/{out}", f"model.path={inputs}/model", f"reward.function={inputs}/odd.py:odd"]
    arguments += [f"validation.sets.sums={inputs}/held_out.jsonl", "validation.n=4", "validation.k=[1,4]"]
    arguments += [
        "validation.max_new_tokens=4",
        "model.dtype=fp32",
        "trainer.device=cpu",
        "data.max_prompt_tokens=16",
        *more,
    ]
    return [sys.executable, "-m", "mega_rl.cli", "eval", *arguments]


def run(inputs: Path, out: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(inputs, out, *more), capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False
    )


def test_samples_and_numbers_are_the_same_on_any_layout(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank, two of tensor parallelism, two replicas that take the prompts in parts: every byte of the samples.

    Numbers are those of the written samples.
    """
    layouts = {"parts": ("validation.chunk=8", "rollout.max_new_tokens=3"), "two": ("engine.megatron.tp=2",)}
    one = run(inputs, "one")
    assert one.returncode == 0, one.stderr
    written = (inputs / "one" / "samples.jsonl").read_text()
    for other, settings in without(layouts, "two").items():
        done = run(inputs, other, "--nproc-per-node", "2", *settings)
        assert done.returncode == 0, done.stderr
        assert (inputs / other / "samples.jsonl").read_text() == written
        sets = [json.loads((inputs / name / "results.json").read_text())["sets"] for name in ("one", other)]
        assert sets[0] == sets[1]
    assert not (inputs / "parts" / "samples.jsonl.part").exists()
    rows = [json.loads(line) for line in written.splitlines()]
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(6) for s in range(4)]
    assert all(row["right"] == (len(row["response"]) % 2 == 1) for row in rows)
    results = json.loads((inputs / "one" / "results.json").read_text())
    estimate = results["sets"]["sums"]["estimates"]["pass_at_4"]
    right = [sum(row["right"] for row in rows if row["prompt_index"] == prompt) for prompt in range(6)]
    assert estimate["mean"] == pytest.approx(sum(pass_at_k(4, c, 4) for c in right) / 6)
    assert "pass_at_4" in one.stdout
    assert len({row["response"] for row in rows}) > 6
    assert main(command(inputs, "one")[3:]) == 2
    assert "one: holds samples.jsonl and results.json of an earlier evaluation" in capsys.readouterr().err
    assert (inputs / "one" / "samples.jsonl").read_text() == written


AGENT = """
from dataclasses import dataclass
import mega_rl

@dataclass
class Agent(mega_rl.Environment):
    context: mega_rl.RolloutContext
    turns: int = 2

    async def run(self, policy, prompt, trajectory):
        if trajectory.sample_index == 3 and prompt.index == 5:
            raise ValueError("the tool broke")
        for turn in range(self.turns - 1):
            turn = await policy.turn(limit=2)
            trajectory.give(self.context.tokenizer(str(len(turn.token_ids)))["input_ids"])
        await policy.turn()
"""


def test_an_environment_is_evaluated_on_any_layout(inputs: Path) -> None:
    """Turns, ends and failures are counted; samples are the same from two replicas that take the prompts in parts."""
    (inputs / "agent.py").write_text(AGENT)
    source = (f"rollout.source={inputs}/agent.py:Agent", "rollout.source.max_turns=2", "validation.max_new_tokens=8")
    done = run(inputs, "agent", *source)
    assert done.returncode == 0, done.stderr
    assert "sample 3 of prompt 5: raised ValueError: the tool broke" in done.stderr
    done = run(inputs, "agent2", "--nproc-per-node", "2", "validation.chunk=8", *source)
    assert done.returncode == 0, done.stderr
    written = (inputs / "agent" / "samples.jsonl").read_text()
    assert (inputs / "agent2" / "samples.jsonl").read_text() == written
    rows = [json.loads(line) for line in written.splitlines()]
    assert [row["finish"] for row in rows].count("failed") == 1
    assert {row["given_tokens"] for row in rows if row["finish"] != "failed"} == {1}
    one, two = (
        json.loads((inputs / name / "results.json").read_text())["sets"]["sums"] for name in ("agent", "agent2")
    )
    for name, value in {"turns_mean": 46 / 24, "given_tokens_mean": 23 / 24, "failed_error": 1}.items():
        assert [each["means"][f"agent/{name}"] for each in (one, two)] == pytest.approx([value, value])
    ends = {end: one["means"][f"agent/end_{end}_fraction"] * 24 for end in ("done", "length", "turns", "error")}
    assert ends == {
        end: pytest.approx([row["finish"] for row in rows].count(finish))
        for end, finish in zip(ends, ("stop", "length", "turns", "failed"), strict=True)
    }
    right = [[row["right"] for row in rows if row["prompt_index"] == prompt] for prompt in range(5)]
    passed = sum(pass_at_k(4, sum(each), 4) for each in right) / 5  # prompt 5 has fewer than four answers
    assert one["estimates"]["pass_at_4"]["mean"] == two["estimates"]["pass_at_4"]["mean"] == pytest.approx(passed)


def test_one_turn_is_what_the_built_in_source_samples(inputs: Path) -> None:
    """Byte for byte, greedy."""
    greedy = ("validation.n=1", "validation.k=[1]", "validation.temperature=0")
    (inputs / "agent.py").write_text(AGENT)
    for out, more in {
        "plain": (),
        "turn": (f"rollout.source={inputs}/agent.py:Agent", "rollout.source.turns=1"),
    }.items():
        done = run(inputs, out, *greedy, *more)
        assert done.returncode == 0, done.stderr
    assert (inputs / "plain" / "samples.jsonl").read_text() == (inputs / "turn" / "samples.jsonl").read_text()


WAITS = """
import pathlib, time
def wait(response):
    pathlib.Path(__file__).with_suffix(".begun").touch()
    time.sleep(300)
"""


SIGNALS = {
    "SIGTERM to two ranks": (signal.SIGTERM, ("--nproc-per-node", "2", "trainer.timeout_s=60")),
    "Ctrl-C": (signal.SIGINT, ()),
}


@pytest.mark.parametrize(("number", "launcher"), without(SIGNALS, "Ctrl-C").values(), ids=without(SIGNALS, "Ctrl-C"))
def test_a_signal_ends_it_at_once_and_leaves_nothing_running(
    inputs: Path, tmp_path: Path, number: signal.Signals, launcher: tuple[str, ...]
) -> None:
    (tmp_path / "wait.py").write_text(WAITS)
    line = command(inputs, number.name, f"reward.function={tmp_path}/wait.py:wait", *launcher)
    process = subprocess.Popen(
        line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until("samples are scored", (tmp_path / "wait.begun").exists, timeout_s=240)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(read_records(inputs / number.name)) == (2 if launcher else 1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=10)[1]
    ends = [record.ended for record in read_records(inputs / number.name).values()]
    assert {end.kind for end in ends if end is not None} == {"stopped"}
    assert not (inputs / number.name / "results.json").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("validation.k=[9]",), "validation.k=[9]: 9 is not among 1 to validation.n=4"),
        (("validation.sets.x=no.jsonl",), "validation.sets.x: no.jsonl: no such file"),
    ],
)
def test_mistakes_end_with_2_and_a_line(
    inputs: Path, more: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(inputs, "never", *more)[3:]) == 2
    assert line in capsys.readouterr().err
    assert not (inputs / "never").exists()
