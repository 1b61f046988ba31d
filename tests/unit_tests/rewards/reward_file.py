"""Reward functions that do what they should not. Workers load this file; it imports nothing of the package."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

STARTED = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # a helper of the file itself


def many_kinds(
    response: str, prompt: str, answer: Any, row: Any, prompt_index: int, finish: str, num_tokens: int
) -> float | dict[str, float]:
    """A number that depends on every bit of what it gets, or two where the prompt's index is odd."""
    text = json.dumps([response, prompt, answer, row, prompt_index, finish, num_tokens], sort_keys=True)
    numbers = random.Random(text)
    number = numbers.gauss(0.0, 1e3)
    return {"z": number, "a": numbers.gauss(0.0, 1.0)} if prompt_index % 2 else number


def short(response: str) -> float:
    """The response as a number; some words have none."""
    if response == "raise":
        raise ValueError("no such answer: é")
    if response == "exit":
        sys.exit("enough")
    if response == "hang":
        Naughty.hang("")
    if response == "none":
        return None  # type: ignore[return-value]
    return float(response)


def naughty(response: str) -> float:
    """Does what the response's first word says; the rest is its score."""
    what, _, rest = response.partition(" ")
    return float(getattr(Naughty, what)(rest) or rest or 0.0)


class Naughty:
    """What `naughty` does by name; returns the score, or None for the number in the response."""

    @staticmethod
    def score(rest: str) -> None:
        """Nothing else."""

    @staticmethod
    def interrupt(rest: str) -> None:
        """Ends the worker by an exception that ends programs, whose message has several lines."""
        raise KeyboardInterrupt("of the\nfunction", rest)

    @staticmethod
    def pid(rest: str) -> float:
        """Scores the process id."""
        return float(os.getpid())

    @staticmethod
    def environment(rest: str) -> float:
        """Scores 1 in a main thread, without a GPU, torch and the trainer's terminal."""
        main = threading.current_thread() is threading.main_thread()
        no_device = os.environ["CUDA_VISIBLE_DEVICES"] == "" and "torch" not in sys.modules
        own_session = os.getsid(0) != os.getsid(os.getppid()) or os.getsid(0) == os.getppid()
        return float(main and no_device and own_session and sys.stdin.fileno() == 0 and os.read(0, 1) == b"")

    @staticmethod
    def hang(rest: str) -> None:
        """Ignores what can be ignored."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)

    @staticmethod
    def segfault(rest: str) -> None:
        ctypes.string_at(0)

    @staticmethod
    def leave(rest: str) -> None:
        os._exit(int(rest or 3))

    @staticmethod
    def crash_once(rest: str) -> float:
        """Crashes unless the file is there, which it makes first."""
        if Path(rest).exists():
            return 5.0
        Path(rest).touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    @staticmethod
    def linger_and_hang(rest: str) -> None:
        Naughty.linger(rest)
        Naughty.hang(rest)

    @staticmethod
    def bomb(rest: str) -> None:
        """Doubles seven times, to 128 processes that stay; their ids go to a file."""
        for _ in range(7):
            os.fork()
        with Path(rest).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)

    @staticmethod
    def embers(rest: str) -> None:
        """Leaves sixteen processes that move on to children all the time and light those again that have gone out.

        They end by themselves after ten seconds.
        """
        memory = memoryview(mmap.mmap(-1, 16 * 16))
        lit, owner = memory[:128].cast("d"), memory[128:].cast("q")  # time and process of each
        begin = time.monotonic()
        own = 0
        if os.fork():
            Naughty.hang(rest)
        file = os.open(rest, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        while time.monotonic() < begin + 10.0:
            owner[own], lit[own] = os.getpid(), time.monotonic()
            os.write(file, b".")
            for other in range(16):
                if lit[own] - lit[other] > 0.01:
                    lit[other] = lit[own]
                    if os.fork() == 0:
                        own = other
                        owner[own] = os.getpid()
                        break
            if owner[own] != os.getpid() or os.fork():  # another has lit it as well
                os._exit(0)
        os._exit(0)

    @staticmethod
    def twice(rest: str) -> float:
        """Comes back in two processes, in the first when the other has ended."""
        if child := os.fork():
            os.waitpid(child, 0)
            return 7.0
        return 77.0

    @staticmethod
    def linger(rest: str) -> float:
        """Leaves children and grandchildren; their ids go to a file."""
        for _ in range(4):
            if os.fork() == 0:
                for _ in range(2):
                    os.fork()
                with open(rest, "a", encoding="utf-8") as file:
                    file.write(f"{os.getpid()}\n")
                while True:
                    time.sleep(60)
        while len(Path(rest).read_text().split() if Path(rest).exists() else ()) < 16:
            time.sleep(0.01)
        return 4.0

    @staticmethod
    def alarm(rest: str) -> None:
        """Leaves an alarm, whose default is to kill."""
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    @staticmethod
    def sleep(rest: str) -> None:
        time.sleep(0.1)

    @staticmethod
    def meet(rest: str) -> float:
        """Makes the first file and waits for the second."""
        own, other = map(Path, rest.split())
        own.touch()
        while not other.exists():
            time.sleep(0.005)
        return 1.0

    @staticmethod
    def memory(rest: str) -> float:
        """Takes a gigabyte."""
        return float(len(bytearray(1 << 30)))


def several(responses: list[str], prompt_indices: list[int]) -> list[float | None]:
    """What `short` gives each of several, whose number is logged to the file that RESPONSES names."""
    log_size(responses)
    for response in responses:
        if response == "die":
            os._exit(3)
        if response == "hang":
            Naughty.hang("")
    if "fewer" in responses:
        return [1.0]
    return [float("nan") if response == "nan" else short(response) for response in responses]


def log_size(responses: list[str]) -> None:
    if "RESPONSES" in os.environ:
        with open(os.environ["RESPONSES"], "a", encoding="utf-8") as file:
            file.write(f"{len(responses)}\n")


async def several_later(responses: list[str], prompt_indices: list[int]) -> list[float | None]:
    """The same, where a coroutine can be cancelled, too."""
    await asyncio.sleep(0.001)
    if "wait" in responses:
        await asyncio.sleep(60)
    return several(responses, prompt_indices)


async def awaited(response: str, prompt_index: int) -> float | None:
    """What `short` gives after other calls have begun, or trouble of a coroutine's own."""
    await asyncio.sleep(0.001 * (prompt_index % 3))
    if response == "wait":
        await asyncio.sleep(60)
    if response == "block":
        time.sleep(60)
    if response == "die":
        os._exit(3)
    return short(response)
