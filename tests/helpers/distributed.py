"""Run a function on several ranks, each a process of its own; never hangs and leaves no rank behind.

On a CPU they are forked from one process that has imported what they need; CUDA wants fresh ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from mega_rl.errors import name_of_signal
from mega_rl.parallel.accelerator.base import HIDDEN, gpu_for_each
from tests.helpers import strict_nccl

GRACE_S = 2.0  # after a first failure, the time in which the others may report theirs
LAST_WORDS = 4000  # characters of a rank's standard error that a failure shows


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds every traceback there is."""


def device_for(world_size: int) -> str:
    """Returns "cuda" where every rank can have a GPU of its own, else "cpu"."""
    return "cuda" if gpu_for_each(world_size) else "cpu"


def initialized(timeout_s: float = 60.0, **layout: int) -> tuple[Any, Any]:
    """Return the process groups of a layout of all ranks, and the accelerator of this one."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    sizes = ParallelLayout(world_size=int(os.environ["WORLD_SIZE"]), **layout)
    return groups.initialize(sizes, accelerator=accelerator, timeout_s=timeout_s), accelerator


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    device: str | None = None,
    preload: str = "tests.helpers.preloaded",
    strict: bool | None = None,
) -> list[Any]:
    """Results of function(rank, *args) in rank order.

    `function` is a module-level function; its environment is what torchrun would set, so
    `mega_rl.parallel.groups.initialize` finds its world. Results are what pickle takes. On a machine with
    a GPU for each rank they are visible; else none is. `preload` names the module that ranks on a CPU are forked from;
    a process has one for all its launches. `strict` puts ranks on a CPU on the stand-in for NCCL of
    `tests.helpers.strict_nccl`; None asks MEGA_RL_TESTS_NCCL.

    Raises:
        RanksFailed: as soon as one rank fails, or at the timeout; all ranks are killed before.
    """
    device = device or device_for(world_size)
    strict = device == "cpu" and (os.environ.get(strict_nccl.VARIABLE) == "strict" if strict is None else strict)
    # The parent keeps the store, as torchrun's agent does: no port is guessed and none is left behind.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    if device == "cpu":
        context.set_forkserver_preload([preload])
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        directory = Path(folder)
        processes = [
            context.Process(
                target=_child,
                args=(directory, _environment(rank, world_size, store.port, device), function, args, strict),
                name=f"rank{rank}",
            )
            for rank in range(world_size)
        ]
        inherited = _set_environment(_environment(0, world_size, store.port, device))
        try:
            for process in processes:
                process.start()
            _set_environment(inherited)
            _wait(processes, timeout_s=timeout_s)
            failure = _failure(processes, directory, timeout_s=timeout_s)
        finally:
            _set_environment(inherited)
            _kill(processes)
        if failure:
            raise RanksFailed(failure)
        return [torch.load(_result(directory, rank), weights_only=False) for rank in range(world_size)]


def run_megatron_fsdp(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Return what `run_ranks` does; ranks that Megatron FSDP has crashed on a CPU are started once more.

    The C library ends a rank whose heap it finds corrupted, in some launches of a hundred, on gloo alone; the cause is
    not known (docs/parallelism.md). The warning has the rank's last words. Wrong numbers and exceptions are no crash.
    """
    try:
        return run_ranks(world_size, function, *args, timeout_s=timeout_s)
    except RanksFailed as failure:
        if "died of SIGABRT" not in str(failure) and "died of SIGSEGV" not in str(failure):
            raise
        warnings.warn(f"Megatron FSDP crashed one of {world_size} ranks, once more: {failure}", stacklevel=1)
        return run_ranks(world_size, function, *args, timeout_s=timeout_s)


def _result(directory: Path, rank: int) -> Path:
    return directory / f"result{rank}.pt"


def _traceback(directory: Path, rank: int) -> Path:
    return directory / f"traceback{rank}.txt"


def _stderr(directory: Path, rank: int) -> Path:
    return directory / f"stderr{rank}.txt"


def _environment(rank: int, world_size: int, port: int, device: str) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(HIDDEN if device == "cpu" else {}),
    }


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set (None: unset) variables; returns what they were."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _child(
    directory: Path,
    environment: Mapping[str, str | None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    strict: bool,
) -> None:
    os.setsid()  # so that the parent's kill reaches processes started here
    _set_environment(environment)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with _stderr(directory, rank).open("wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)  # a rank that aborts leaves the reason of the library that did, and its own stack
    try:
        births = strict_nccl.install() if strict else None
        result = function(rank, *args)
        if births is not None:
            births.end()
        torch.save(result, _result(directory, rank))
    except BaseException:  # recorded for the parent, then raised
        _traceback(directory, rank).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _wait(processes: list[BaseProcess], *, timeout_s: float) -> None:
    """Return when all have ended, a moment after one has failed, or at the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        multiprocessing.connection.wait([process.sentinel for process in processes if process.is_alive()], timeout=0.1)


def _failure(processes: list[BaseProcess], directory: Path, *, timeout_s: float) -> str:
    """Return why the ranks failed, empty if none did."""
    lines: list[str] = []
    for rank, process in enumerate(processes):
        path = _traceback(directory, rank)
        if path.exists():
            lines.append(f"rank {rank} raised:\n{path.read_text(encoding='utf-8')}")
        elif process.exitcode is not None and process.exitcode < 0:
            said = _stderr(directory, rank).read_text("utf-8", errors="replace")[-LAST_WORDS:]
            lines.append(f"rank {rank} died of {name_of_signal(-process.exitcode)}:\n{said}")
        elif process.exitcode not in (None, 0):
            lines.append(f"rank {rank} exited with {process.exitcode}")
    waiting = [str(rank) for rank, process in enumerate(processes) if process.is_alive()]
    if waiting:
        why = "killed after the failure above" if lines else f"did not end within {timeout_s} s"
        lines.append(f"rank(s) {', '.join(waiting)}: {why}")
    return "\n".join(lines)


def _kill(processes: list[BaseProcess]) -> None:
    """End the ranks and whatever they started."""
    for process in processes:
        if process.pid is None:
            continue
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # ended, or has not made its group yet
            process.kill()
        process.join()
