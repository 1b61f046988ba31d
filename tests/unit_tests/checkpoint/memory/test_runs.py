"""A run that is killed between two checkpoints on disk goes on from memory, bit for bit the run that was never killed.

Here one run of each engine; `make test-full` has every way to end on every layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mega_rl.checkpoint.folders import complete, step_of
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.checkpoint.kill_cases import equal
from tests.unit_tests.checkpoint.memory.runs_on_ranks import KILLED, NEVER, ON_DISK, RANKS, MemoryRun, train, train_all
from tests.unit_tests.checkpoint.memory.stores_on_ranks import flip, folder_in
from tests.unit_tests.checkpoint.test_resume import metrics
from tests.unit_tests.distributed.test_layout_invariance import write_inputs

pytestmark = pytest.mark.timeout(900)  # the first test pays for the runs that are never killed

LAYOUTS = ["dp2", "tp2", "fsdp 2"] if FULL else ["dp2"]
# Points of a save in memory, as shares of its operations on files: writes first, renames and removals at the end.
POINTS = [0.0, 0.1, 0.5, 0.8, 0.85, 0.9, 0.95, 0.999] if FULL else [0.9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    """By layout: runs without a checkpoint in memory. And the operations on files of one."""
    runs = [MemoryRun(f"whole {layout}", layout, memory_interval=0) for layout in LAYOUTS]
    runs.append(MemoryRun("counted", "dp2", operation=NEVER, rank=0))
    first: dict[str, Any] = run_ranks(RANKS, train_all, str(folder), runs, timeout_s=300, device="cpu")[0]
    assert equal(first["counted"]["weights"], first["whole dp2"]["weights"])
    return {layout: first[f"whole {layout}"] for layout in LAYOUTS} | {"operations": len(first["counted"]["seen"])}


class Killed:
    """A run that is killed, what it leaves in memory, and how it goes on."""

    def __init__(self, folder: Path, run: MemoryRun) -> None:
        self.folder, self.run = folder, run
        with pytest.raises(RanksFailed, match=f"rank {run.rank} died of SIGKILL"):
            run_ranks(RANKS, train, str(folder), run, timeout_s=120, device="cpu")

    def host(self, number: int) -> Path:
        """The tmpfs of a host."""
        return self.folder / f"{self.run.name} on host {number}"

    def held(self, number: int = 0) -> Path:
        """The newest complete checkpoint in a host's memory."""
        return complete(folder_in(self.host(number)))[-1]

    def go_on(self, undisturbed: dict[str, Any], *, start: int) -> list[str]:
        """Start it again and compare everything with the run that was never killed; returns rank 0's warnings."""
        run = self.run._replace(phase="", operation=-1 if self.run.operation < 0 else NEVER)
        results = run_ranks(RANKS, train, str(self.folder), run, timeout_s=120, device="cpu")
        assert [result["start"] for result in results] == [start] * RANKS
        assert equal(results[0]["weights"], undisturbed[run.layout]["weights"])
        assert metrics(self.folder, run.name) == metrics(self.folder, f"whole {run.layout}")
        assert [path.name for host in range(run.hosts) for path in self.host(host).iterdir()] == []
        lines: list[str] = results[0]["lines"]
        return [line for line in lines if "memory" in line or "ignored" in line]


@pytest.mark.skipif(not FULL, reason="make test-full: the next test goes on from memory, too")
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_goes_on_from_memory(folder: Path, undisturbed: dict[str, Any], layout: str) -> None:
    killed = Killed(folder, MemoryRun(f"killed {layout}", layout, phase="generate"))
    assert step_of(killed.held()) == KILLED
    assert killed.go_on(undisturbed, start=KILLED) == []


@pytest.mark.skipif(not FULL, reason="make test-full: test_store.py loses hosts of small engines")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaced_host_gets_shards_from_neighbour(folder: Path, undisturbed: dict[str, Any], layout: str) -> None:
    killed = Killed(folder, MemoryRun(f"replaced {layout}", layout, hosts=2, phase="update_actor"))
    shutil.rmtree(killed.host(0))
    assert step_of(killed.held(1)) == KILLED
    assert killed.go_on(undisturbed, start=KILLED) == []


@pytest.mark.skipif(not FULL, reason="make test-full: test_store.py damages checkpoints of small engines")
def test_a_damaged_shard_is_not_loaded(folder: Path, undisturbed: dict[str, Any]) -> None:
    killed = Killed(folder, MemoryRun("damaged", "dp2", phase="generate"))
    flip(killed.held() / "shard_00001.safetensors")
    [line] = killed.go_on(undisturbed, start=ON_DISK)
    assert "shard_00001.safetensors" in line


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_a_save_in_memory(folder: Path, undisturbed: dict[str, Any], point: float) -> None:
    """Without any checkpoint on disk: at most the step that was being saved is lost."""
    number = int(point * 2 * undisturbed["operations"])
    killed = Killed(folder, MemoryRun(f"in save {point}", "dp2", operation=number, rank=0))
    step = step_of(killed.held())
    assert step in (KILLED - 1, KILLED)
    lines = killed.go_on(undisturbed, start=step)
    assert len(lines) == (step < KILLED and number > 0), lines  # of the folder that the save has begun
