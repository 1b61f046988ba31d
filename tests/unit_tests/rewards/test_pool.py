"""Workers of reward functions: whatever a response does to one, the others get their scores, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mega_rl.rewards import pool as pool_module
from mega_rl.rewards.pool import FunctionRewards
from mega_rl.rewards.score import Outcome, Response, RewardError, RewardFailure
from mega_rl.types import Prompt
from tests.helpers.selection import without
from tests.unit_tests.rewards.reward_cases import FILE, kinds, own, pooled, some

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
GOOD = tuple(str(number / 7) for number in range(20))


def outcomes(rewards: FunctionRewards, *responses: str) -> list[Outcome]:
    return rewards.score(some(*responses))


@pytest.fixture(scope="module")
def pool() -> Iterator[FunctionRewards]:
    """One worker for all cases, so that each follows on the harm that others did."""
    with pooled("naughty", alone=False) as rewards:
        yield rewards


def test_worker_is_a_main_thread_without_device_and_input(pool: FunctionRewards) -> None:
    assert outcomes(pool, "environment") == [1.0]


def test_scores_equal_those_in_this_process() -> None:
    """Bit for bit, whatever a row holds, in order and again in the next batch."""
    row = {"π": [1, 0.1, 1e300, None, True], "text": 'é\n"\ud800', "deep": {"a": [[], {}]}, "big": 10**30}
    prompts = [
        Prompt(index=i, token_ids=(1,), text=f"{i}\u2028", answer=["x", i], row=row | {"i": i / 3}) for i in range(20)
    ]
    items = [
        (prompt, Response("answer 🙂", num_tokens=3 + sample // 2, finish="stop" if sample % 2 else "length"))
        for prompt in prompts
        for sample in range(4)
    ]
    expected = own("many_kinds").score(items)
    assert len(set(map(str, expected))) == len(items)
    with pooled("many_kinds", num_workers=2) as rewards:
        assert rewards.score(items) == expected
        assert rewards.score(items[::-1]) == expected[::-1]
        bytes_in_row = Prompt(index=17, token_ids=(1,), text="1+1=", answer="2", row={"image": b"\x89PNG"})
        with pytest.raises(
            RewardError, match=r"prompt 17: .*bytes is not JSON serializable; set reward.source.workers=0"
        ):
            rewards.score([(bytes_in_row, items[0][1])])


@pytest.mark.parametrize("function", ["short", "awaited", "several", "several_later"])
def test_every_kind_of_function_gives_the_same_outcomes(function: str) -> None:
    """Of one response or several, synchronous or not, in the rank and in workers."""
    responses = ("1.5", "raise", "exit", "none", "nan", *GOOD)
    here = outcomes(own(function, concurrency=3, batch_size=4), *responses)
    assert kinds(here) == [1.5, "error", "error", None, "error", *map(float, GOOD)]
    texts = [one.what for one in here if isinstance(one, RewardFailure)]
    assert texts[0].startswith("the reward function raised ValueError: no such answer: é (at ")
    assert texts[1].startswith("the reward function raised SystemExit: enough (at ")
    assert texts[2] == "the reward function returned nan, which is not finite in float32"
    with pooled(function, num_workers=2, concurrency=4, batch_size=4) as rewards:
        assert outcomes(rewards, *responses) == here
        assert outcomes(rewards, *responses[::-1]) == here[::-1]


def test_two_workers_work_at_a_time(tmp_path: Path) -> None:
    """Neither response has its score before the other is being scored."""
    here, there = tmp_path / "here", tmp_path / "there"
    with pooled("naughty", num_workers=2) as rewards:
        assert outcomes(rewards, f"meet {here} {there}", f"meet {there} {here}") == [1.0] * 2


@pytest.mark.parametrize(
    ("function", "trouble", "kind"),
    [
        ("short", "hang", "timeout"),
        ("awaited", "wait", "timeout"),
        ("awaited", "block", "timeout"),
        ("awaited", "die", "crash"),
        ("several", "hang", "timeout"),
        ("several", "die", "crash"),
        ("several_later", "wait", "timeout"),
        ("several_later", "die", "crash"),
    ],
)
def test_one_guilty_response_costs_only_itself(
    function: str, trouble: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine that waits is cancelled; what blocks or ends the process costs a worker."""
    monkeypatch.setattr(pool_module, "GRACE_S", 0.2)
    with pooled({"own": f"{FILE}:{function}"}, timeout_s=0.5, concurrency=8, batch_size=8) as rewards:
        scored = outcomes(rewards, "1", "2", trouble, "3")
        assert kinds(scored) == [{"own": 1.0}, {"own": 2.0}, kind, {"own": 3.0}]
        assert isinstance(failure := scored[2], RewardFailure)
        late = "took longer than reward.source.timeout_s=0.5"
        ending = late if kind == "timeout" else "crashed its process, which ended with exit code 3"
        assert failure.what == f"the reward function 'own' {ending}"
        assert outcomes(rewards, "4") == [{"own": 4.0}]


@pytest.mark.parametrize(
    ("response", "what"),
    [("segfault", "died of SIGSEGV"), ("leave", "ended with exit code 3"), ("interrupt", "died of SIGINT")],
)
def test_crash_is_described_and_costs_one_worker(pool: FunctionRewards, response: str, what: str) -> None:
    (before,) = outcomes(pool, "pid")
    crashed, after = outcomes(pool, response, "score 2")
    assert crashed == RewardFailure("crash", f"the reward function crashed its process, which {what}")
    assert after == 2.0
    assert outcomes(pool, "pid") != [before]


def test_crash_that_does_not_happen_again_costs_nothing(pool: FunctionRewards, tmp_path: Path) -> None:
    assert outcomes(pool, f"crash_once {tmp_path / 'crashed'}") == [5.0]


def test_fork_that_comes_back_gives_no_score(pool: FunctionRewards) -> None:
    """Two processes would answer and read messages in turn."""
    assert outcomes(pool, "twice", "score 2", "score 3") == [7.0, 2.0, 3.0]


def test_alarm_does_not_reach_the_next_response(pool: FunctionRewards) -> None:
    (before,) = outcomes(pool, "pid")
    assert outcomes(pool, "alarm 1", "sleep 2", "pid") == [1.0, 2.0, before]


def test_memory_has_its_limit() -> None:
    with pooled("naughty", memory_bytes=1 << 29) as rewards:
        greedy, other = outcomes(rewards, "memory", "score 1")
    assert isinstance(greedy, RewardFailure)
    assert "raised MemoryError" in greedy.what
    assert other == 1.0


def test_fork_bomb_ends_at_the_deadline(tmp_path: Path) -> None:
    """A busy machine starts it in seconds."""
    pids = tmp_path / "pids"
    with pooled("naughty", timeout_s=5.0) as rewards:
        assert kinds(outcomes(rewards, f"bomb {pids}", "score 2")) == ["timeout", 2.0]
    ids = [int(pid) for pid in pids.read_text().split()]
    assert len(ids) >= 128
    assert not [one.pid for one in psutil.process_iter(["status"]) if one.pid in ids and one.info["status"] != "zombie"]


def test_processes_that_never_stay_are_killed_as_a_group(tmp_path: Path) -> None:
    """One by one they are not: the others light them again. A signal to the group is outrun by no fork."""
    steps = tmp_path / "steps"
    with pooled("naughty", timeout_s=2.0) as rewards:
        assert kinds(outcomes(rewards, f"embers {steps}", "score 2")) == ["timeout", 2.0]
        size = steps.stat().st_size
        assert size > 20
        time.sleep(0.2)
        assert steps.stat().st_size == size


HOSTILE = {
    "power of powers": r"\boxed{9^{9^{9^{9}}}}",
    "factorial": r"\boxed{((99999!)!)!}",
    "megabyte of digits": r"\boxed{" + "7" * (1 << 20) + "}",
    "unbalanced braces": r"\boxed{" * 20_000,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2001,
    "nested brackets": r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "null characters": r"\boxed{" + "\x00" * 1000 + "}",
}
SLOW = ("megabyte of digits", "unbalanced braces", "nested fractions", "nested brackets")


def test_no_answer_to_mathematics_costs_another_its_reward() -> None:
    """A worker of math_verify gives each of them 0 or none, and the right answer after it 1."""
    prompt = Prompt(index=1, token_ids=(1,), text="6*7=", answer="42")
    with pooled("math_verify", timeout_s=6.0, memory_bytes=4 << 30) as rewards:
        for name, text in without(HOSTILE, *SLOW).items():
            hostile, right = rewards.score([(prompt, Response(one, 1, "stop")) for one in (text, r"\boxed{42}")])
            assert hostile == 0.0 or isinstance(hostile, RewardFailure), name
            assert right == 1.0, name


@pytest.mark.parametrize("function", ["several", "several_later"])
def test_failed_batch_is_scored_one_by_one(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rank and in a worker, which goes on."""
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    for trouble, kind in (("raise", "error"), ("exit", "error"), ("fewer", 1.0)):  # alone that gets one score
        here = outcomes(own(function), "1", "2", trouble, "3")
        assert kinds(here) == [1.0, 2.0, kind, 3.0]
        with pooled(function) as rewards:
            assert outcomes(rewards, "1", "2", trouble, "3") == here
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == 6 * [4, 1, 1, 1, 1]


@pytest.mark.parametrize(("num_workers", "batch_size", "sizes"), [(1, 8, [8, 8, 4]), (2, 64, [10, 10])])
def test_workers_share_what_waits(
    num_workers: int, batch_size: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    with pooled("several", num_workers=num_workers, batch_size=batch_size) as rewards:
        outcomes(rewards, *GOOD)
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == sizes


OWNER = """
import pathlib, sys, threading, time
from mega_rl.rewards.call import plan
from mega_rl.rewards.pool import WorkerPool
from tests.unit_tests.rewards.reward_cases import FILE
pids = pathlib.Path(sys.argv[1])
def tell():
    while not pids.exists() or len(pids.read_text().split()) < 16:
        time.sleep(0.01)
    print("ready", flush=True)
threading.Thread(target=tell, daemon=True).start()
pool = WorkerPool(f"{FILE}:naughty", num_workers=1, timeout_s=60.0)
pool.score(plan(lambda response: 0.0), [{"response": f"linger_and_hang {pids}", "prompt_index": 1}])
"""


def test_killing_the_rank_leaves_no_process(tmp_path: Path) -> None:
    """Not even a worker that hangs, and what it has started."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "pids")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        processes = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGKILL)
    assert len(processes) >= 1 + 16  # worker, and those of the response
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S / 3)
    try:
        assert not alive
    finally:
        for process in alive:
            process.kill()
