"""Workers of reward functions: whatever a response does to one, the others get their scores, and nothing stays."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mega_rl.workers.reward_calls import NoScore, Score
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import UnusableFunctionError, WorkerOrder, WorkerProcess
from tests.helpers.selection import without

FILE = Path(__file__).with_name("reward_file.py")
ROOT = Path(__file__).parents[4]
WAIT_S = 30.0


@contextmanager
def running(
    function: str = "naughty", *, num_workers: int = 1, timeout_s: float = 20.0, memory_bytes: int = 0
) -> Iterator[RewardPool]:
    """A pool, and that it leaves no process."""
    before = set(psutil.Process().children(recursive=True))
    order = WorkerOrder(f"{FILE}:{function}", memory_bytes)
    pool = RewardPool(order, num_workers=num_workers, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        pool.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def outcomes(pool: RewardPool, *responses: str) -> list[Score | NoScore | BaseException]:
    futures = [pool.submit({"response": response}) for response in responses]
    return [future.exception(WAIT_S) or future.result() for future in futures]


def score(pool: RewardPool, response: str) -> float:
    (outcome,) = outcomes(pool, response)
    assert isinstance(outcome, float), outcome
    return outcome


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """One worker for all cases, so that each follows on the harm that others did."""
    with running() as pool:
        yield pool


def test_a_worker_is_a_main_thread_without_device_torch_and_input(pool: RewardPool) -> None:
    assert score(pool, "environment") == 1.0


def test_outcomes_are_in_the_order_of_the_responses() -> None:
    with running(num_workers=2) as pool:
        scores = outcomes(pool, "sleep 0", *(f"score {i}" for i in range(1, 40)))
        pids = {score(pool, "pid") for _ in range(20)}
    assert scores == [float(i) for i in range(40)]
    assert len(pids) <= 2


def test_two_workers_work_at_a_time(tmp_path: Path) -> None:
    """Neither response has its score before the other is being scored."""
    here, there = tmp_path / "here", tmp_path / "there"
    with running(num_workers=2) as pool:
        both = outcomes(pool, f"meet {here} {there}", f"meet {there} {here}")
    assert both == [1.0] * 2


def test_a_response_that_hangs_costs_its_deadline() -> None:
    with running(timeout_s=0.5) as pool:
        begin = time.monotonic()
        first, hung, last = outcomes(pool, "score 1", "hang", "score 2")
        assert time.monotonic() - begin < WAIT_S
    assert (first, last) == (1.0, 2.0)
    assert hung == NoScore("timeout", "the reward function took longer than reward.pool.timeout_s=0.5")


@pytest.mark.parametrize(("trouble", "kind"), [("hang", "timeout"), ("leave", "crash")])
def test_responses_that_were_sent_ahead_of_one_that_fails_are_scored_once(
    trouble: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick ones are sent several at a time; a lost worker takes those with it that it has not begun."""
    sent: list[int] = []
    send = WorkerProcess.send

    def counted(worker: WorkerProcess, message: bytes) -> None:
        sent.append(worker.pid)
        send(worker, message)

    monkeypatch.setattr(WorkerProcess, "send", counted)
    monkeypatch.setattr("mega_rl.workers.reward_pool.pool.QUICK_S", 60.0)
    logged = [f"log {tmp_path / 'calls'} {number}" for number in range(1, 7)]
    with running(timeout_s=0.5) as pool:
        scores = outcomes(pool, *logged[:3], trouble, *logged[3:])
    assert [one.kind if isinstance(one, NoScore) else one for one in scores] == [1.0, 2.0, 3.0, kind, 4.0, 5.0, 6.0]
    assert (tmp_path / "calls").read_text().split() == list("123456")
    assert sent.count(sent[0]) == 1 + 7, "the order, and all responses: the fourth fails with three behind it"


@pytest.mark.parametrize(
    ("response", "what"),
    [
        ("segfault", "died of SIGSEGV, saying: Fatal Python error: Segmentation fault"),
        ("leave", "ended with exit code 3"),
        ("leave 167", "died of signal 39"),  # a signal without a name
        ("interrupt", "died of SIGINT, saying: KeyboardInterrupt: ('of the\\nfunction', '')"),
    ],
)
def test_a_response_that_crashes_its_worker_costs_itself(pool: RewardPool, response: str, what: str) -> None:
    before = score(pool, "pid")
    crashed, after = outcomes(pool, response, "score 2")
    assert isinstance(crashed, NoScore)
    assert crashed.kind == "crash"
    assert crashed.what.startswith(f"the reward function crashed its process, which {what}")
    assert after == 2.0
    assert score(pool, "pid") != before


def test_a_worker_that_died_of_something_else_costs_nothing(pool: RewardPool, tmp_path: Path) -> None:
    assert score(pool, f"crash_once {tmp_path / 'crashed'}") == 5.0


def test_output_is_read_shown_and_dropped(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert score(pool, "flood 3") == 3.0
    shown = [record.getMessage() for record in caplog.records if "reward worker 0: " in record.getMessage()]
    assert sum(map(len, shown)) < 200_000
    assert shown[-1] == "reward worker 0: the rest of its output is dropped for a minute"


def test_output_is_logged_as_whole_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), running() as pool:
        assert outcomes(pool, "colours 1", "interrupt", "score 3")[::2] == [1.0, 3.0]
    shown = [line for record in caplog.records if "reward worker" in (line := record.getMessage())]
    assert "reward worker 0: half a line" in shown
    assert "reward worker 0: \x1b[2J\r12:00:00 saved" in shown
    assert not [line for line in shown if line.endswith(": ^")], "a line is not cut at a write"


def test_a_fork_that_comes_back_gives_no_score(pool: RewardPool) -> None:
    """Two processes would answer and read messages in turn."""
    assert outcomes(pool, "twice", "score 2", "score 3") == [s for s in (7.0, 2.0, 3.0)]


@pytest.mark.parametrize(("what", "kind"), [("linger", "score"), ("crash_and_linger", "crash")])
def test_processes_that_a_response_leaves_are_gone_before_the_next(
    pool: RewardPool, tmp_path: Path, what: str, kind: str
) -> None:
    """Also those of other sessions, and those whose parents have ended."""
    (outcome,) = outcomes(pool, f"{what} {tmp_path / 'pids'}")
    assert (outcome.kind if isinstance(outcome, NoScore) else "score") == kind
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 16
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_processes_that_the_file_starts_stay(pool: RewardPool, tmp_path: Path) -> None:
    assert score(pool, f"linger {tmp_path / 'pids'}") == 4.0
    assert score(pool, "helper") == 1.0


def test_an_alarm_does_not_reach_the_next_response(pool: RewardPool) -> None:
    before = score(pool, "pid")
    assert [score(pool, each) for each in ("alarm 1", "sleep 2", "pid")] == [1.0, 2.0, before]


def test_memory_has_its_limit() -> None:
    with running(memory_bytes=1 << 29) as pool:
        greedy, other = outcomes(pool, "memory", "score 1")
    assert isinstance(greedy, NoScore)
    assert (greedy.kind, greedy.what) == ("crash", "the reward function crashed its process, which ran out of memory")
    assert other == 1.0


@pytest.mark.parametrize(("what", "least", "timeout_s"), [("bomb", 128, 5.0), ("comet", 20, 2.0)])
def test_a_fork_bomb_ends_at_the_deadline(tmp_path: Path, what: str, least: int, timeout_s: float) -> None:
    """One that grows, and one that is never at the same id for long; a busy machine starts the first one in seconds."""
    pids = tmp_path / "pids"
    with running(timeout_s=timeout_s) as pool:
        bomb, after = outcomes(pool, f"{what} {pids}", "score 2")
        size = pids.stat().st_size
        assert isinstance(bomb, NoScore)
        assert (bomb.kind, after) == ("timeout", 2.0)
        time.sleep(0.1)
        assert pids.stat().st_size == size
    ids = [int(pid) for pid in pids.read_text().split()]
    assert len(ids) >= least
    assert not [pid for pid in ids if psutil.pid_exists(pid)]


def test_processes_that_never_stay_are_killed_as_a_group(tmp_path: Path) -> None:
    """One by one they are not: the others light them again. A signal to the group is outrun by no fork."""
    steps = tmp_path / "steps"
    with running(timeout_s=2.0) as pool:
        outcome, after = outcomes(pool, f"embers {steps}", "score 2")
        size = steps.stat().st_size
        assert isinstance(outcome, NoScore)
        assert (outcome.kind, after) == ("timeout", 2.0)
        assert size > 20
        time.sleep(0.2)
        assert steps.stat().st_size == size


HOSTILE = {
    "power of powers": r"\boxed{9^{9^{9^{9}}}}",
    "factorial": r"\boxed{((99999!)!)!}",
    "python power": "#### 9**9**9**9",
    "megabyte of digits": r"\boxed{" + "7" * (1 << 20) + "}",
    "unbalanced braces": r"\boxed{" * 20_000,
    "closed braces": "}" * 200_000 + r"\boxed{1}}}}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2001,
    "nested brackets": r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 500 + "2" + "}" * 501,
    "long sum": r"\boxed{" + "+".join(["x"] * 20_000) + "}",
    "large matrix": r"\boxed{\begin{pmatrix}" + "&".join(["9^{99999999}"] * 500) + r"\end{pmatrix}}",
    "null characters": r"\boxed{" + "\x00" * 1000 + "}",
}

SLOW = (
    "megabyte of digits", "unbalanced braces", "nested fractions", "nested brackets", "nested roots", "long sum",
    "large matrix",
)  # fmt: skip


def test_no_answer_to_mathematics_costs_another_its_reward() -> None:
    """A worker of math_verify gives each of them 0 or none, and the right answer after it 1."""
    order = WorkerOrder("math_verify", 4 << 30)
    pool = RewardPool(order, num_workers=1, timeout_s=6.0)
    try:
        for name, text in without(HOSTILE, *SLOW).items():
            texts = [{"prompt": "6*7=", "answer": "42", "response": response} for response in (text, r"\boxed{42}")]
            futures = [pool.submit(arguments) for arguments in texts]
            hostile, right = (future.result(WAIT_S) for future in futures)
            assert hostile == 0.0 or isinstance(hostile, NoScore), name
            assert right == 1.0, name
    finally:
        pool.close()


def test_an_exception_and_what_is_no_score_are_errors() -> None:
    """And cost no worker: the same one goes on."""
    expected = {
        "raise": f"raised ValueError: no such answer: é (at {FILE}:",
        "exit": f"raised SystemExit: enough (at {FILE}:",
        "nan": "returned nan, which is not finite in float32",
    }
    with running("short") as pool:
        *failures, other = outcomes(pool, *expected, "2")
    for failure, what in zip(failures, expected.values(), strict=True):
        assert isinstance(failure, NoScore)
        assert failure.kind == "error"
        assert failure.what.startswith(f"the reward function {what}")
    assert other == 2.0


def test_a_function_that_workers_cannot_load_fails_all(tmp_path: Path) -> None:
    pool = RewardPool(WorkerOrder(f"{tmp_path / 'none.py'}:f", 0), num_workers=2, timeout_s=1.0)
    try:
        for failure in outcomes(pool, "1", "2"):
            assert isinstance(failure, UnusableFunctionError)
            assert "there is no file" in str(failure)
    finally:
        pool.close()


def test_what_is_open_when_the_pool_closes_fails() -> None:
    with running() as pool:
        future = pool.submit({"response": "hang"})
        time.sleep(0.3)
    with pytest.raises(UnusableFunctionError, match="have ended"):
        future.result(WAIT_S)
    pool.close()


OWNER = """
import pathlib, sys, time
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import WorkerOrder
pool = RewardPool(WorkerOrder(sys.argv[1] + ":naughty", 0), num_workers=1, timeout_s=60)
pids = pathlib.Path(sys.argv[2])
pool.submit({"response": f"linger_and_hang {pids}"})
while not pids.exists() or len(pids.read_text().split()) < 16:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(60)
"""


def test_killing_the_rank_leaves_no_process(tmp_path: Path) -> None:
    """Not even a worker that hangs, and what it has started in other sessions."""
    command = [sys.executable, "-c", OWNER, str(FILE), str(tmp_path / "pids")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        processes = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGKILL)
    assert len(processes) >= 3 + 16  # keeper, worker, the file's helper, and those of the response
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S / 3)
    try:
        assert not alive
    finally:
        for process in alive:
            process.kill()
