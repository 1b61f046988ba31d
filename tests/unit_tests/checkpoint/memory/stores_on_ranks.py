"""Stores of four ranks on several hosts, played by folders: each case saves, loses something, and starts again."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.memory import store as writing
from mega_rl.checkpoint.memory.hosts import Host
from mega_rl.checkpoint.memory.store import MemoryCheckpoints
from tests.unit_tests.checkpoint.stores import Kept, SmallEngine, settings

RANKS = 4
keep_only = writing.keep_only


class Lines(logging.Handler):
    """The warnings of a start."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def on_host(number: int, root: Path) -> Callable[[], Host]:
    """A host that has a folder for its memory."""
    return lambda: Host(f"key {number}", f"host{number}", root / f"host{number}")


def folder_in(host: Path) -> Path:
    """The one folder of a run in the memory of a host."""
    [folder] = host.glob("mega_rl-*/*")
    return folder


def flip(file: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def copies(root: Path) -> list[Path]:
    """Shard 1 of step 2 on every host that has it, that of its rank first."""
    return sorted(root.glob("host*/mega_rl-*/*/step_000002/shard_00001.safetensors"))


def lose_host(root: Path) -> None:
    shutil.rmtree(root / "host0" / folder_in(root / "host0").parent.name)


def lose_both_copies(root: Path) -> None:
    for shard in copies(root):
        shard.unlink()


def damage_one(root: Path) -> None:
    flip(copies(root)[0])


def damage_both(root: Path) -> None:
    for shard in copies(root):
        flip(shard)


def tear(root: Path) -> None:
    """As a kill between the publication of one host and that of the other leaves it: step 3 is on one of them only."""
    folder = folder_in(root / "host0")
    shutil.copytree(folder / "step_000002", folder / ".step_000003.tmp")
    (folder / ".step_000003.tmp" / "COMMIT").unlink()


def forget_history(root: Path) -> None:
    """As a user does who removes the run folder."""
    (root / "run" / "checkpoints" / ".memory").unlink()


LOSSES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda root: None,
    "a host": lose_host,
    "both copies of a shard": lose_both_copies,
    "one damaged": damage_one,
    "both damaged": damage_both,
    "a torn save": tear,
    "the run folder": forget_history,
}


def all_cases(rank: int, root: str) -> dict[tuple[int, str], Any]:
    """By (number of hosts, name of what is lost): what the next start restores, and what it says."""
    import torch.distributed as dist

    from mega_rl.parallel.comm import GroupRanks

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    assert group is not None
    ranks = GroupRanks(group)
    actual = {}
    for hosts in (2, 4):
        for number, name in enumerate(LOSSES):
            folder = Path(root) / f"{hosts} {number}"
            for host in range(hosts):
                (folder / f"host{host}").mkdir(parents=True, exist_ok=True)
            actual[hosts, name] = one_case(ranks, folder, LOSSES[name], hosts)
    dist.destroy_process_group()
    return actual


def one_case(ranks: Any, root: Path, lose: Callable[[Path], None], hosts: int) -> dict[str, Any]:
    from mega_rl.checkpoint.run_state import RunState
    from mega_rl.checkpoint.store import RunCheckpoints

    MemoryCheckpoints.host = staticmethod(on_host(ranks.rank * hosts // RANKS, root))  # type: ignore[method-assign]

    def opened(value: float) -> tuple[RunCheckpoints, SmallEngine, Kept]:
        engine, kept = SmallEngine(value, rank=ranks.rank, size=RANKS), Kept(10 * ranks.rank)
        run = RunState({"actor": engine}, {"random": kept}, ranks, {"seed": 1}, "dp4", {})
        return RunCheckpoints(root / "run" / "checkpoints", run, settings(memory_interval=1)), engine, kept

    first, engine, _ = opened(1)
    first.lock()
    assert first.restore() is None
    first.move_earlier_run(root / "run")
    first.save(1, {"of": "disk"})
    retiring = watch_retirement(ranks.rank, root, late_s=0.2 if lose is LOSSES["nothing"] else 0.0)
    for step in (1, 2):
        engine.matrix += 1
        engine.vector += 1
        engine.scalar += 1
        engine.steps += 1
        first.save_in_memory(step, {"of": "memory"})
    saved = first.poll()
    held = [listed(root / f"host{host}") for host in range(hosts)]
    writing.keep_only, writing.folders = keep_only, folders  # type: ignore[assignment]
    first.close()  # as a crash leaves it
    ranks.gather_json(None)
    if ranks.rank == 0:
        lose(root)
    ranks.gather_json(None)
    lines = Lines()
    logging.getLogger("mega_rl").addHandler(lines)
    second, engine, kept = opened(0)
    with second:
        manifest = second.restore()
        logging.getLogger("mega_rl").removeHandler(lines)
        second.move_earlier_run(root / "run")
        ranks.gather_json(None)
        after_start = [name for host in range(hosts) for name in listed(root / f"host{host}")]
        ranks.gather_json(None)
    ranks.gather_json(None)
    return {
        "held": held,
        "when retiring": retiring,
        "saved": saved,
        "restored": None if manifest is None else (manifest.step, manifest.state["of"]),
        "values": engine.values,
        "kept": kept.restored,
        "lines": lines.lines,
        "after start": after_start,
        "after end": [path.name for path in root.glob("host*/*")],
    }


def watch_retirement(rank: int, root: Path, *, late_s: float) -> list[list[str]]:
    """Checkpoints of both hosts whenever rank 0 removes older ones; other hosts publish late."""
    seen: list[list[str]] = []
    publish = folders.publish

    def watched(folder: Path, step: int | None) -> None:
        seen.append(sorted(f"{path.parents[2].name} {path.name}" for path in root.glob("host*/mega_rl-*/*/step_*")))
        keep_only(folder, step)

    def late(*args: Any) -> Path:
        time.sleep(late_s if rank else 0.0)
        return publish(*args)

    writing.keep_only = watched if rank == 0 else keep_only
    writing.folders = SimpleNamespace(**vars(folders) | {"publish": late})  # type: ignore[assignment]
    return seen


def listed(host: Path) -> list[str]:
    """The checkpoints in the memory of a host, and their shards."""
    steps = sorted(path for folder in host.glob("mega_rl-*/*") for path in folder.glob("step_*"))
    return [f"{step.name}/{shard.name}" for step in steps for shard in sorted(step.glob("shard_*"))]
