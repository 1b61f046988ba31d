"""Phases and who hears of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from mega_rl.tracking import progress
from mega_rl.tracking.progress import Phase


class Heard:
    """A listener that keeps the names of what it is told."""

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []
        self.closed = False

    def changed(self, phases: tuple[Phase, ...]) -> None:
        """Keep the names."""
        self.names.append(tuple(phase.name for phase in phases))

    def close(self) -> None:
        """Remember it."""
        self.closed = True


@pytest.fixture
def heard() -> Iterator[Heard]:
    """A listener, taken away at the end."""
    listener = Heard()
    progress.listen(listener)
    yield listener
    progress.close()
    assert listener.closed


def test_a_listener_hears_of_every_phase_even_when_it_fails(heard: Heard) -> None:
    with pytest.raises(ValueError, match="broken"), progress.phase("outer"), progress.phase("inner"):
        raise ValueError("broken")
    assert heard.names == [(), ("outer",), ("outer", "inner"), ("outer",), ()]


def test_reports_go_to_the_innermost_phase_of_their_thread_and_never_count_rounds(heard: Heard) -> None:
    progress.report(1, 2)  # outside of phases: nothing
    with progress.rounds("step", 10, done=3) as steps:
        progress.report(1, 2)
        with progress.phase("generate") as generate:
            progress.report(5, 8, unit="rows")
            progress.note("token 3/9")
            thread = threading.Thread(target=progress.report, args=(7, 8))
            thread.start()
            thread.join()
        steps.advance()
        assert (steps.done, steps.total, steps.first) == (4, 10, 3)
        assert (generate.done, generate.total, generate.unit, generate.note) == (5, 8, "rows", "token 3/9")


@pytest.mark.parametrize("fails", [False, True])
def test_imports_are_a_phase_without_collections(heard: Heard, fails: bool) -> None:
    """Afterwards, also after an import that fails, garbage is collected again, and what is there is passed over."""
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError) if fails else nullcontext(), progress.importing("a package"):
            assert not gc.isenabled()
            kept: list[list[int]] = [[] for _ in range(1000)]
            if fails:
                raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(kept)
        assert ("importing a package",) in heard.names
    finally:
        gc.unfreeze()
