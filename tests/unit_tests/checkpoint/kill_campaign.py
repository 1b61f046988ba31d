"""What a killed run is compared with, and where it can be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_rl.checkpoint.folders import complete, step_of
from mega_rl.checkpoint.format.reader import Checkpoint
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.unit_tests.checkpoint.kill_cases import BEFORE, RANKS, STEP, STEPS, Kill, copy_run, equal, prepare_run, train
from tests.unit_tests.distributed.test_layout_invariance import write_inputs

WRITES = 12  # of the many writes of a shard, those that are points


class Campaign:
    """Runs in a folder: one that is never killed, and killed ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_inputs(folder)
        self._number = 0
        run_ranks(RANKS, prepare_run, str(folder), "before", timeout_s=120, device="cpu")
        self._operations: dict[bool, list[list[str]]] = {}
        self._whole = self._run(Kill())

    def points(self, *, background: bool, rank: int) -> list[tuple[str, Kill]]:
        """(name of the operation, point) before and after every operation on files of a save, but few of the writes."""
        if background not in self._operations:
            self._run(Kill(background=background))
        names = self._operations[background][rank]
        writes = [number for number, name in enumerate(names) if name == "pwritev"]
        chosen = {writes[i * len(writes) // WRITES] for i in range(WRITES)}
        return [
            (name, Kill(rank=rank, background=background, operation=2 * number + after))
            for number, name in enumerate(names)
            if name != "pwritev" or number in chosen
            for after in (0, 1)
        ]

    def check(self, kill: Kill) -> int:
        """Kill a run there, look at what it left, let it go on; returns the step that it went on from."""
        name = self._copy()
        with pytest.raises(RanksFailed, match=f"rank {kill.rank} died of SIGKILL"):
            run_ranks(RANKS, train, str(self._folder), name, kill, timeout_s=120, device="cpu")
        folders = complete(self._folder / name / "checkpoints")
        for folder in folders:
            checkpoint = Checkpoint.open(folder)
            checkpoint.verify(piece for pieces in checkpoint.pieces.values() for piece in pieces)
        newest = step_of(folders[-1])
        # Killed in the save of a step it may have lost that one; what was complete before is there.
        least = BEFORE if kill.operation >= 0 else kill.step
        assert newest in (least, STEP if kill.operation >= 0 else least), (kill, newest)
        went_on = self._train(name, Kill(background=kill.background))
        assert went_on["start"] == newest
        assert equal(went_on["weights"], self._whole["weights"]), f"{kill}: other weights at the end"
        assert [step_of(folder) for folder in complete(self._folder / name / "checkpoints")] == [STEPS - 1, STEPS]
        return newest

    def _run(self, kill: Kill) -> dict[str, Any]:
        return self._train(self._copy(), kill)

    def _train(self, name: str, kill: Kill) -> dict[str, Any]:
        actual = run_ranks(RANKS, train, str(self._folder), name, kill, timeout_s=120, device="cpu")
        if actual[0]["start"] == BEFORE:
            self._operations[kill.background] = [rank["operations"] for rank in actual]
        first: dict[str, Any] = actual[0]
        return first

    def _copy(self) -> str:
        self._number += 1
        copy_run(self._folder, "before", f"run{self._number}")
        return f"run{self._number}"
