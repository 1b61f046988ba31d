"""The filter of system calls, each of its refusals on this machine, and its form on the other."""

from __future__ import annotations

import errno
import json
import platform
import struct

import pytest

from mega_rl.rewards.sandbox.seccomp import ABSENT, ARCHITECTURES, REFUSED, build_filter
from tests.helpers.sandboxes import local_sandbox

# Calls with arguments of 0, but for those that ask for something harmless where they are allowed.
ASKS = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = {}
for name, arguments in json.load(sys.stdin).items():
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(argument) for argument in arguments))
    answers[name] = ctypes.get_errno() if result == -1 else 0
print(json.dumps(answers))
"""


def ask(calls: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the error number of each system call in a sandbox, 0 of one that succeeds."""
    ran = local_sandbox().run(ASKS, json.dumps(calls).encode(), timeout_s=5)
    assert ran.succeeded, ran
    answers = json.loads(ran.stdout)
    assert answers.keys() == calls.keys()
    return dict(answers)


@pytest.fixture
def column() -> int:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        pytest.skip(f"no table for {machine}")
    return [*ARCHITECTURES].index(machine)


def test_every_call_of_the_table_is_refused(column: int) -> None:
    numbers = {name: both[column] for name, both in REFUSED.items()}
    answers = ask({name: (number, 0, 0, 0, 0, 0, 0) for name, number in numbers.items() if number is not None})
    assert {name for name, answer in answers.items() if answer != errno.EPERM} == set()


def test_calls_that_have_no_number_here_are_absent(column: int) -> None:
    calls = {name: (both[column],) for name, both in ABSENT.items()} | {"newest": (1000,), "x32": (0x40000000 + 39,)}
    assert set(ask(calls).values()) == {errno.ENOSYS}


def test_flags_decide_about_processes_sockets_and_terminals(column: int) -> None:
    clone, pair, ioctl = ((56, 53, 16), (220, 199, 29))[column]
    refused = {
        "user namespace": (clone, 0x10000000 | 17, 0, 0, 0, 0),
        "mount namespace": (clone, 0x00020000 | 17, 0, 0, 0, 0),
        "socketpair inet": (pair, 2, 1, 0, 0),
        "socketpair of datagrams": (pair, 1, 2 | 0x80000, 0, 0),
        "socketpair of packets": (pair, 1, 5, 0, 0),
        "TIOCSTI": (ioctl, 0, 0x5412, 0),
        "TIOCLINUX, with a high half": (ioctl, 0, 0x5412 | 1 << 32, 0),
    }
    assert ask(refused) == dict.fromkeys(refused, errno.EPERM)


def test_what_programs_need_is_allowed() -> None:
    program = """
import asyncio, concurrent.futures, multiprocessing, subprocess, tempfile, threading
async def one(): return 1
assert asyncio.run(one()) == 1
with concurrent.futures.ThreadPoolExecutor(2) as threads: assert list(threads.map(abs, [-1, 2])) == [1, 2]
assert subprocess.run(["/bin/echo", "a"], capture_output=True).stdout == b"a\\n"
with tempfile.NamedTemporaryFile() as file: file.write(b"x")
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
print(open("/dev/stdin").read(), end="")
"""
    ran = local_sandbox().run(program, b"all of it", timeout_s=5)
    assert (ran.stdout, ran.stderr[-300:], ran.return_code) == (b"all of it", b"", 0)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_jump_of_the_filter_lands_on_an_instruction(machine: str) -> None:
    instructions = list(struct.iter_unpack("<HBBI", build_filter(machine)))
    assert len(instructions) < 4096
    for place, (code, if_true, if_false, _) in enumerate(instructions):
        if code & 7 == 5:
            assert place + 1 + max(if_true, if_false) < len(instructions)
    assert instructions[-1][0] == 0x06
