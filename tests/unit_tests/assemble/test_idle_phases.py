"""Phases of a step in which a run has nothing to do: their seconds are not reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mega_rl.assemble.roles import Roles, idle_phases
from mega_rl.config.loader import load
from mega_rl.workers.models import AbsentWorker

PRESENT: Any = object()
TWO_UPDATES = ("trainer.prompts_per_step=8", "trainer.minibatch_size=4")


@pytest.mark.parametrize(
    ("settings", "reference", "critic", "idle"),
    [
        (TWO_UPDATES, PRESENT, PRESENT, []),
        (TWO_UPDATES, AbsentWorker(), PRESENT, ["ref_logprobs"]),
        (TWO_UPDATES, PRESENT, AbsentWorker(), ["values", "update_critic"]),
        ((*TWO_UPDATES, "algorithm.old_logprobs=rollout"), PRESENT, PRESENT, ["old_logprobs"]),
        (
            ("trainer.prompts_per_step=8", "trainer.minibatch_size=8", "algorithm.advantage=grpo", "rollout.n=2"),
            *(AbsentWorker(), AbsentWorker(), ["old_logprobs", "ref_logprobs", "values", "update_critic"]),
        ),
    ],
    ids=["all", "no reference", "no critic", "the sampler's log-probs", "one update of a group"],
)
def test_phases_of_roles_that_a_run_lacks_are_idle(
    settings: tuple[str, ...], reference: Any, critic: Any, idle: list[str]
) -> None:
    roles = SimpleNamespace(reference=reference, critic=critic)
    assert idle_phases(load(None, settings), cast(Roles, roles)) == idle
