"""Random numbers after a resume are those that would have come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_rl.checkpoint.run_state import seed_python
from mega_rl.errors import UserError
from tests.helpers.distributed import run_ranks


def draws() -> list[Any]:
    """A number of every source, and of every state of Megatron-Core."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    actual: list[Any] = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist()]
    actual.append(float(np.random.standard_normal()))
    tracker = get_cuda_rng_tracker()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            actual.append(torch.rand(3, device=device).tolist())
    actual.append(torch.rand(3, device=device).tolist())
    return actual


def round_trip(rank: int, folder: str) -> dict[str, Any]:
    """Drawn after the save, after the restore, and by a run that restored nothing; through a checkpoint."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.checkpoint.run_state import RandomState, RunState
    from mega_rl.checkpoint.store import RunCheckpoints
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.trainer.assemble import session
    from tests.helpers.engines import make_config
    from tests.unit_tests.checkpoint.stores import settings

    with session(make_config(Path(folder), layout="tp2"), accelerator) as groups:

        def store() -> RunCheckpoints:
            run = RunState({}, {"random": RandomState()}, GroupRanks(groups.world), {}, str(groups.layout), {})
            return RunCheckpoints(Path(folder), run, settings())

        draws()
        store().save(1, {})
        after_save = draws()
        further = draws()
        store().restore()
        after_restore = draws()
        names = sorted(RandomState().state())
        state = RandomState()
        refused = ""
        try:
            state.restore({name: tensor for name, tensor in state.state().items() if name != "numpy"})
        except UserError as error:
            refused = str(error)
        before = draws()
        state.restore(None)
        return {
            "saved": after_save,
            "further": further,
            "restored": after_restore,
            "names": names,
            "refused": refused,
            "none": draws() != before,
        }


@pytest.mark.timeout(300)
def test_random_numbers_continue_after_restore(tmp_path: Path) -> None:
    first, second = run_ranks(2, round_trip, str(tmp_path))
    for actual in (first, second):
        assert actual["restored"] == actual["saved"] != actual["further"]
        tracked = [name for name in actual["names"] if name.startswith("tracked/")]
        assert {"numpy", "python", "torch"} <= set(actual["names"])
        assert len(tracked) >= 2
        assert "numpy on one side only" in actual["refused"]
        assert actual["none"]
    # The tensor-parallel ranks draw differently, so each must have had its own back.
    assert first["saved"] != second["saved"]


def test_python_and_numpy_seeds_differ_by_rank() -> None:
    """What a user's reward draws is the same in the next run of this seed, and another one on another rank."""

    def drawn(seed: int, rank: int) -> tuple[float, float]:
        seed_python(seed, rank)
        return random.random(), float(np.random.random())

    before = random.getstate(), np.random.get_state()
    try:
        assert drawn(3, 1) == drawn(3, 1)
        assert len({number for pair in (drawn(3, 0), drawn(3, 1), drawn(4, 0)) for number in pair}) == 6
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
