"""Host memory of checkpoints that are kept in it."""

from __future__ import annotations

import pytest

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.plan.generation import weight_bytes
from mega_rl.plan.phases import host_bytes, memory_of_stages
from mega_rl.plan.setup import Machine, RunSetup
from tests.unit_tests.plan.models import QWEN3_8B

NAME = "checkpoints in memory"


def entries(*, ranks: int, nodes: int, interval: int = 1) -> dict[str, int]:
    config = with_settings(
        Config(),
        {
            "algorithm.advantage": "gae",
            "checkpoint.memory.interval": interval,
            "engine.megatron.tp": 2,
            "model.path": "actor",
        },
    )
    setup = RunSetup(config, {"model.path": QWEN3_8B}, Machine(ranks, ranks // nodes))
    return host_bytes(setup, memory_of_stages(setup))


def test_two_of_them_are_there_at_a_time() -> None:
    """Of 14 bytes per parameter of actor and critic, which has a small head; all on one host."""
    state = 2 * 14 * weight_bytes(QWEN3_8B, 1)
    assert entries(ranks=8, nodes=1)[NAME] == pytest.approx(2 * state, rel=0.05)
    assert NAME not in entries(ranks=8, nodes=1, interval=0)


def test_a_host_of_several_keeps_a_copy_of_anothers() -> None:
    assert entries(ranks=8, nodes=2)[NAME] == entries(ranks=8, nodes=1)[NAME]
