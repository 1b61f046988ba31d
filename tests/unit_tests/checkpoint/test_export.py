"""Hugging Face checkpoints on the way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mega_rl.checkpoint.store import HfExports
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.comm import SingleRank


class FakeEngine:
    """Writes its source's name, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def save_hf(self, directory: Path, *, source: Path) -> list[float]:
        if self.failure is not None:
            raise self.failure
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(str(source))
        return [0.5, 0.25]


def exports(tmp_path: Path, failure: Exception | None = None, *, on_error: str = "continue") -> HfExports:
    return HfExports(
        engine=FakeEngine(failure), root=tmp_path / "hf", source=Path("/model"), ranks=SingleRank(), on_error=on_error
    )


def test_a_folder_per_step(tmp_path: Path) -> None:
    assert list(exports(tmp_path)(10).values()) == [0.5, 0.375]
    assert (tmp_path / "hf" / "step_000010" / "config.json").read_text() == "/model"


@pytest.mark.parametrize("failure", [UserError("disk is full"), RunError("disk is full"), OSError("disk is full")])
def test_one_that_fails(tmp_path: Path, failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    exports(tmp_path, failure)(10)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "the Hugging Face checkpoint of step 10 failed: disk is full; training continues" in caplog.text
    with pytest.raises(RunError, match="step 10 failed: disk is full"):
        exports(tmp_path, failure, on_error="stop")(10)
