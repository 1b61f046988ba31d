"""The program that kills the ranks of a killed launcher when they do not end by themselves."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import psutil

from tests.unit_tests.operations.launcher.programs import ROOT, is_gone, wait_until

LAUNCHER = """
    import subprocess, sys, time
    from mega_rl.operations.launcher.reaper import Reaper
    reaper = Reaper(save_s=0.3)
    rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", rank], stdout=subprocess.PIPE, start_new_session=True)]
    ranks.append(subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True))
    for process in ranks: reaper.watch(process.pid)
    ranks[0].stdout.readline()
    ranks[1].wait()
    print(ranks[0].pid, reaper._child.pid, flush=True)
    END
"""


def start(end: str) -> tuple[subprocess.Popen[str], int, int]:
    """Return a launcher with one rank that ignores SIGTERM, and the processes of that rank and of the reaper."""
    program = textwrap.dedent(LAUNCHER).replace("END", end)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    rank, reaper = map(int, process.stdout.readline().split())
    return process, rank, reaper


def test_rank_that_outlives_its_launcher_is_killed() -> None:
    process, rank, reaper = start("time.sleep(600)")
    assert not is_gone(rank)
    process.kill()
    wait_until(lambda: is_gone(rank))
    wait_until(lambda: is_gone(reaper))
    _, errors = process.communicate()
    assert errors == f"error: process {rank} did not end within 0.3 s after its launcher: killed\n"


def test_reaper_ends_with_a_launcher_that_ends_well() -> None:
    process, _, reaper = start("ranks[0].kill(); ranks[0].wait(); reaper.close()")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert is_gone(reaper)


def test_reaper_gets_no_other_signals() -> None:
    process, rank, reaper = start("time.sleep(600)")
    for number in (1, 2, 3, 15, 10):
        psutil.Process(reaper).send_signal(number)
    process.kill()
    wait_until(lambda: is_gone(rank))
    process.communicate()
