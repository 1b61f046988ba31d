"""Ranks that step through collectives until one of them stops, dies, skips a collective or never returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from mega_rl.errors import PeerError, RunError
from mega_rl.operations.diagnosis import investigate
from mega_rl.parallel import groups as process_groups
from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.agreement import run_beside_meetings
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.tracking import progress
from mega_rl.tracking.health.flight_recorder import FlightRecorder
from mega_rl.tracking.health.guard import guarded
from mega_rl.tracking.health.heartbeat import Heartbeat, RankFacts
from mega_rl.tracking.health.records import read_records
from tests.helpers.distributed import device_for

WORLD_SIZE = 4
TIMEOUT_S = 3.0
FAULTY = 2  # the rank
STEPS_BEFORE = 2
BEAT_S = 0.2


def spin() -> None:
    while True:
        time.sleep(0.01)


def fail(fault: str) -> None:
    """Do on the faulty rank what the fault is called."""
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def step(rank: int, fault: str, groups: Groups) -> None:
    """One step: a reward on every rank, a sum over dp, one over tp, one over all."""
    began = time.monotonic()

    def stalled() -> str | None:
        return "rank 2 has scored no response" if fault and time.monotonic() - began > TIMEOUT_S else None

    with progress.phase("reward"):
        run_beside_meetings(
            spin if (rank, fault) == (FAULTY, "loop") else time.perf_counter,
            ranks_of(groups.host_world),
            stalled=stalled,
            beat_s=BEAT_S,
        )
    with progress.phase("update actor"):
        if rank == FAULTY and fault:
            time.sleep(2 * BEAT_S + TIMEOUT_S / 10)  # so that the record is of this phase
            fail(fault)
        if (rank, fault) != (FAULTY, "skip"):
            ranks_of(groups.dp).sum(torch.ones(2))
        ranks_of(groups.tp).sum(torch.ones(2))
        ranks_of(groups.world).sum(torch.ones(2))


def hang(rank: int, run_dir: str, fault: str) -> None:
    """Run until the fault, write what this rank would say, and let rank 0 kill a rank that does not end."""
    accelerator = prepare(device_for(WORLD_SIZE))
    folder = Path(run_dir)
    facts = RankFacts(folder, rank, WORLD_SIZE, 0, TIMEOUT_S, launched=False)
    try:
        with Heartbeat(facts, FlightRecorder()) as heartbeat, guarded(heartbeat, investigate):
            layout = ParallelLayout(tp=2, world_size=WORLD_SIZE)
            groups = process_groups.initialize(layout, accelerator=accelerator, timeout_s=TIMEOUT_S)
            with progress.rounds("step", 100) as steps:
                for number in range(STEPS_BEFORE + 1):
                    step(rank, fault if number == STEPS_BEFORE else "", groups)
                    steps.advance()
    except RunError as error:
        name = f"line_{rank}.txt" if isinstance(error, PeerError) else "hung.txt"
        (folder / name).write_text(str(error))
    if rank == 0 and fault != "loop":
        os.kill(read_records(folder)[FAULTY].pid, signal.SIGKILL)
