"""What the models of a run's roles compute attention with, on either engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mega_rl.workers.models import ReferenceWorker
from tests.helpers.attention_probe import AttentionProbe
from tests.helpers.models import random_experience


def case(
    rank: int, engine: str, runs: dict[str, tuple[str | None, Sequence[str]]]
) -> dict[str, dict[str, tuple[str, dict[str, int]]] | str]:
    """For each of `runs`, (recipe, overrides): role -> (attention it says it has, kernels that ran, with how often).

    Or the message of its UserError.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.loader import load
    from mega_rl.errors import UserError
    from mega_rl.trainer.assemble import session
    from mega_rl.trainer.assemble.plan import build_roles, plan_run

    actual: dict[str, Any] = {}
    for name, (recipe, overrides) in runs.items():
        config = load(None if recipe is None else Path(recipe), [f"engine.backend={engine}", *overrides])
        with session(config, accelerator) as groups:
            try:
                roles = build_roles(plan_run(config, accelerator), accelerator, groups, steps=2, colocated=False)
                actual[name] = kernels(roles)
            except UserError as error:
                actual[name] = str(error)
    return actual


def kernels(roles: Any) -> dict[str, tuple[str, dict[str, int]]]:
    """role -> (attention of its engine, kernels of one evaluation and, where it learns, of one update)."""
    batch = random_experience()
    workers = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference}
    actual = {}
    for engine in roles.engines.values():
        with AttentionProbe() as probe:
            # Of the reward model the worker makes rows of its own, which go the same way.
            worker = workers.get(engine.name) or ReferenceWorker(engine.forward)
            worker.evaluate(batch)
            if engine.name in ("actor", "critic"):
                worker.update(batch, step=1)
        actual[engine.name] = (engine.attention, dict(probe.ran))
    return actual
