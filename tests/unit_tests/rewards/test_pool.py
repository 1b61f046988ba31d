"""Workers of reward functions: whatever a response does to one, the others get their scores, and nothing stays."""

from __future__ import annotations

import logging
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
from mega_rl.rewards.call import load_call
from mega_rl.rewards.pool import RewardPool
from mega_rl.rewards.role import CalledRewards
from mega_rl.rewards.score import Outcome, Response, RewardError, RewardFailure
from mega_rl.types import Prompt
from tests.helpers.selection import without
from tests.unit_tests.rewards.reward_cases import FILE, kinds, pooled, some

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
GOOD = tuple(str(number / 7) for number in range(20))


def outcomes(pool: RewardPool, *responses: str) -> list[Outcome]:
    return pool.score(some(*responses))


def score(pool: RewardPool, response: str) -> Outcome:
    (outcome,) = outcomes(pool, response)
    return outcome


def own(function: str, *responses: str, **settings: int) -> list[Outcome]:
    """Return the outcomes of a function of the file in this process."""
    return CalledRewards(load_call(f"{FILE}:{function}", **settings)).score(some(*responses))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """One worker for all cases, so that each follows on the harm that others did."""
    with pooled("naughty", alone=False) as pool:
        yield pool


def test_worker_is_a_main_thread_without_device_and_input(pool: RewardPool) -> None:
    assert score(pool, "environment") == 1.0


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
    expected = CalledRewards(load_call(f"{FILE}:many_kinds")).score(items)
    assert len(set(map(str, expected))) == len(items)
    with pooled("many_kinds", num_workers=2) as pool:
        assert pool.score(items) == expected
        assert pool.score(items[::-1]) == expected[::-1]


@pytest.mark.parametrize("function", ["short", "awaited", "several", "several_later"])
def test_every_kind_of_function_gives_the_same_outcomes(function: str) -> None:
    """Of one response or several, synchronous or not, in the rank and in workers."""
    responses = ("1.5", "raise", "exit", "none", "nan", *GOOD)
    expected = [1.5, "error", "error", None, "error", *map(float, GOOD)]
    here = own(function, *responses, concurrency=3, batch_size=4)
    assert kinds(here) == expected
    texts = [one.what for one in here if isinstance(one, RewardFailure)]
    assert texts[0].startswith(f"the reward function raised ValueError: no such answer: é (at {FILE}:")
    assert texts[1].startswith(f"the reward function raised SystemExit: enough (at {FILE}:")
    assert texts[2] == "the reward function returned nan, which is not finite in float32"
    with pooled(function, num_workers=2, concurrency=4, batch_size=4) as pool:
        assert pool.score(some(*responses)) == here
        assert pool.score(some(*responses[::-1])) == here[::-1]


def test_two_workers_work_at_a_time(tmp_path: Path) -> None:
    """Neither response has its score before the other is being scored."""
    here, there = tmp_path / "here", tmp_path / "there"
    with pooled("naughty", num_workers=2) as pool:
        assert outcomes(pool, f"meet {here} {there}", f"meet {there} {here}") == [1.0] * 2


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
    """A coroutine that waits is cancelled; what blocks or ends the process costs one more worker."""
    monkeypatch.setattr(pool_module, "GRACE_S", 0.2)
    with pooled(function, timeout_s=0.5, concurrency=8, batch_size=8) as pool:
        scored = pool.score(some("1", "2", trouble, "3"))
        assert kinds(scored) == [1.0, 2.0, kind, 3.0]
        assert isinstance(failure := scored[2], RewardFailure)
        ending = {"timeout": "took longer than reward.source.timeout_s=0.5"}.get(
            kind, "crashed its process, which ended"
        )
        assert failure.what.startswith(f"the reward function {ending}")
        assert score(pool, "4") == 4.0


@pytest.mark.parametrize("trouble", ["hang", "leave"])
def test_responses_sent_ahead_of_a_failure_are_scored_once(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick ones are sent several at a time; a lost worker takes those with it that it has not begun."""
    monkeypatch.setattr(pool_module, "QUICK_S", 60.0)
    logged = [f"log {tmp_path / 'calls'} {number}" for number in range(1, 7)]
    with pooled("naughty", timeout_s=0.5) as pool:
        scored = outcomes(pool, *logged[:3], trouble, *logged[3:])
    assert kinds(scored) == [1.0, 2.0, 3.0, "timeout" if trouble == "hang" else "crash", 4.0, 5.0, 6.0]
    assert (tmp_path / "calls").read_text().split() == list("123456")


@pytest.mark.parametrize(
    ("response", "what"),
    [
        ("segfault", "died of SIGSEGV, saying: Fatal Python error: Segmentation fault"),
        ("leave", "ended with exit code 3"),
        ("leave 167", "died of signal 39"),  # a signal without a name
        ("interrupt", "died of SIGINT, saying: KeyboardInterrupt: ('of the\\nfunction', '')"),
    ],
)
def test_crash_is_described_and_costs_one_worker(pool: RewardPool, response: str, what: str) -> None:
    before = score(pool, "pid")
    crashed, after = outcomes(pool, response, "score 2")
    assert isinstance(crashed, RewardFailure)
    assert crashed.kind == "crash"
    assert crashed.what.startswith(f"the reward function crashed its process, which {what}")
    assert after == 2.0
    assert score(pool, "pid") != before


def test_crash_that_does_not_happen_again_costs_nothing(pool: RewardPool, tmp_path: Path) -> None:
    assert score(pool, f"crash_once {tmp_path / 'crashed'}") == 5.0


def test_output_is_logged_in_lines_and_limited(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pooled("naughty") as pool:
        assert outcomes(pool, "colours 1", "interrupt", "score 3")[::2] == [1.0, 3.0]
        shown = [line for record in caplog.records if "reward worker" in (line := record.getMessage())]
        assert score(pool, "flood 3") == 3.0
    assert "reward worker 0: half a line" in shown
    assert "reward worker 0: \x1b[2J\r12:00:00 saved" in shown
    assert not [line for line in shown if line.endswith(": ^")], "a line is not cut at a write"
    shown = [line for record in caplog.records if "reward worker" in (line := record.getMessage())]
    assert sum(map(len, shown)) < 200_000
    assert shown[-1] == "reward worker 0: the rest of its output is dropped for a minute"


def test_fork_that_comes_back_gives_no_score(pool: RewardPool) -> None:
    """Two processes would answer and read messages in turn."""
    assert outcomes(pool, "twice", "score 2", "score 3") == [7.0, 2.0, 3.0]


@pytest.mark.parametrize(("what", "kind"), [("linger", 4.0), ("crash_and_linger", "crash")])
def test_processes_that_a_response_leaves_are_killed(pool: RewardPool, tmp_path: Path, what: str, kind: object) -> None:
    """Also those of other sessions and those whose parents have ended; those that the file starts stay."""
    assert kinds(outcomes(pool, f"{what} {tmp_path / 'pids'}")) == [kind]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 16
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert score(pool, "helper") == 1.0


def test_alarm_does_not_reach_the_next_response(pool: RewardPool) -> None:
    before = score(pool, "pid")
    assert [score(pool, each) for each in ("alarm 1", "sleep 2", "pid")] == [1.0, 2.0, before]


def test_memory_has_its_limit() -> None:
    with pooled("naughty", memory_bytes=1 << 29) as pool:
        greedy, other = outcomes(pool, "memory", "score 1")
    assert greedy == RewardFailure("crash", "the reward function crashed its process, which ran out of memory")
    assert other == 1.0


@pytest.mark.parametrize(("what", "least", "timeout_s"), [("bomb", 128, 5.0), ("comet", 20, 2.0)])
def test_fork_bomb_ends_at_the_deadline(tmp_path: Path, what: str, least: int, timeout_s: float) -> None:
    """One that grows, and one that is never at the same id for long; a busy machine starts the first one in seconds."""
    pids = tmp_path / "pids"
    with pooled("naughty", timeout_s=timeout_s) as pool:
        assert kinds(outcomes(pool, f"{what} {pids}", "score 2")) == ["timeout", 2.0]
        size = pids.stat().st_size
        time.sleep(0.1)
        assert pids.stat().st_size == size
    ids = [int(pid) for pid in pids.read_text().split()]
    assert len(ids) >= least
    assert not [pid for pid in ids if psutil.pid_exists(pid)]


def test_processes_that_never_stay_are_killed_as_a_group(tmp_path: Path) -> None:
    """One by one they are not: the others light them again. A signal to the group is outrun by no fork."""
    steps = tmp_path / "steps"
    with pooled("naughty", timeout_s=2.0) as pool:
        assert kinds(outcomes(pool, f"embers {steps}", "score 2")) == ["timeout", 2.0]
        size = steps.stat().st_size
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
    prompt = Prompt(index=1, token_ids=(1,), text="6*7=", answer="42")
    with pooled("math_verify", timeout_s=6.0, memory_bytes=4 << 30) as pool:
        for name, text in without(HOSTILE, *SLOW).items():
            hostile, right = pool.score([(prompt, Response(one, 1, "stop")) for one in (text, r"\boxed{42}")])
            assert hostile == 0.0 or isinstance(hostile, RewardFailure), name
            assert right == 1.0, name


@pytest.mark.parametrize("function", ["several", "several_later"])
def test_failed_batch_is_scored_one_by_one(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rank and in a worker, which goes on."""
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    for trouble, kind in (("raise", "error"), ("exit", "error"), ("fewer", 1.0)):  # alone that gets one score
        here = own(function, "1", "2", trouble, "3")
        assert kinds(here) == [1.0, 2.0, kind, 3.0]
        with pooled(function) as pool:
            assert outcomes(pool, "1", "2", trouble, "3") == here
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == 6 * [4, 1, 1, 1, 1]


@pytest.mark.parametrize(("num_workers", "batch_size", "sizes"), [(1, 8, [8, 8, 4]), (2, 64, [10, 10])])
def test_workers_share_what_waits(
    num_workers: int, batch_size: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    with pooled("several", num_workers=num_workers, batch_size=batch_size) as pool:
        outcomes(pool, *GOOD)
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == sizes


FUNCTIONS = """
import os, time

def each(response):
    if response == "slow":
        time.sleep(60)
    if response == "ends":
        os._exit(3)
    if response == "left out":
        return None
    time.sleep(0.1 if response == "tired" else 0.0)
    return len(response)

def together(responses):
    assert "left out" not in responses, "called for a response that is left out"
    for response in responses:
        if response == "late":
            time.sleep(60)
        if response == "bad":
            raise ValueError("no")
    return [{"length": len(response)} for response in responses]

async def later(response):
    time.sleep(60 if response == "blocks" else 0)
    await __import__("asyncio").sleep(60 if response == "waits" else 0)
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return {name: f"{file}:{name}" for name in ("each", "together", "later")}


def test_functions_are_called_one_after_the_other(functions: dict[str, str]) -> None:
    """Of one, of several and asynchronous; a response that the first leaves out does not reach the second."""
    items = some("a", "left out", "abc", "bad")
    for names in (("each", "together"), ("each", "together", "later")):
        chosen = {name: functions[name] for name in names}
        here = CalledRewards(load_call(chosen)).score(items)
        more = {"later": 1.0} if "later" in names else {}
        assert here[:3] == [
            {"each": 1.0, **more, "together_length": 1.0},
            None,
            {"each": 3.0, **more, "together_length": 3.0},
        ]
        assert isinstance(failure := here[3], RewardFailure)
        assert failure.what.startswith("the reward function 'together' raised ValueError: no (at ")
        with pooled(chosen) as pool:
            assert pool.score(items) == here


@pytest.mark.parametrize(
    ("names", "responses", "failures"),
    [
        (("each", "together"), ("slow", "late", "ends"), ("each", "together", "each")),
        (("each",), ("slow",), ("each",)),
        (("each", "later"), ("waits", "blocks"), ("later", "later")),
    ],
)
def test_failures_name_the_function_that_was_running(
    functions: dict[str, str], names: tuple[str, ...], responses: tuple[str, ...], failures: tuple[str, ...]
) -> None:
    with pooled({name: functions[name] for name in names}, timeout_s=0.5) as pool:
        scored = outcomes(pool, *responses, "good")
    for response, name, failure in zip(responses, failures, scored, strict=False):
        timeout = RewardFailure("timeout", f"the reward function {name!r} took longer than reward.source.timeout_s=0.5")
        crash = RewardFailure(
            "crash", f"the reward function {name!r} crashed its process, which ended with exit code 3"
        )
        assert failure == (crash if response == "ends" else timeout)
    assert isinstance(good := scored[-1], dict)
    assert good["each"] == 4.0


def test_each_call_of_a_batch_has_the_deadline(functions: dict[str, str]) -> None:
    """Eight calls of 0.1 s are no call of 0.5 s: none is repeated, and none fails."""
    with pooled({name: functions[name] for name in ("each", "together")}, timeout_s=0.5) as pool:
        assert outcomes(pool, *["tired"] * 8) == [{"each": 5.0, "together_length": 5.0}] * 8


def test_row_that_does_not_travel_is_an_error() -> None:
    prompt = Prompt(index=17, token_ids=(1,), text="1+1=", answer="2", row={"image": b"\x89PNG"})
    with pooled("many_kinds") as pool, pytest.raises(RewardError, match="bytes is not JSON serializable") as error:
        pool.score([(prompt, response) for _, response in some("1")])
    assert "set reward.source.workers=0" in str(error.value)


def test_function_that_workers_cannot_load_ends_the_run(tmp_path: Path) -> None:
    """The rank has loaded it before; the file is gone since."""
    file = tmp_path / "rewards.py"
    file.write_text("def f(response):\n    return 1.0\n")
    call = load_call(f"{file}:f")
    file.unlink()
    pool = RewardPool(call, f"{file}:f", num_workers=2, timeout_s=1.0)
    with pytest.raises(RewardError, match="no such file"):
        outcomes(pool, "1", "2")
    pool.close()
    pool.close()


OWNER = """
import pathlib, sys, threading, time
from mega_rl.rewards.call import RewardCall
from mega_rl.rewards.call import plan
from mega_rl.rewards.pool import RewardPool
from tests.unit_tests.rewards.reward_cases import FILE, some
pids = pathlib.Path(sys.argv[1])
def tell():
    while not pids.exists() or len(pids.read_text().split()) < 16:
        time.sleep(0.01)
    print("ready", flush=True)
threading.Thread(target=tell, daemon=True).start()
pool = RewardPool(RewardCall((plan(lambda response: 0.0),)), f"{FILE}:naughty", num_workers=1, timeout_s=60.0)
pool.score(some(f"linger_and_hang {pids}"))
"""


def test_killing_the_rank_leaves_no_process(tmp_path: Path) -> None:
    """Not even a worker that hangs, and what it has started in other sessions."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "pids")]
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
