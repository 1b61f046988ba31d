"""What the models of a run's roles say before and after a step, on either engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.engines import own_rows
from tests.helpers.models import random_experience


def case(rank: int, engine: str, runs: dict[str, tuple[str, Sequence[str]]], vocab_size: int) -> dict[str, Any]:
    """For each of `runs`, (recipe, overrides), on two ranks: what `say` finds."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.plan.preflight import preflight
    from mega_rl.trainer.assemble import session
    from mega_rl.trainer.assemble.plan import build_roles, plan_run
    from mega_rl.trainer.assemble.records import role_facts

    actual = {}
    for name, (recipe, overrides) in runs.items():
        layout = ["engine.megatron.tp=2"] if engine == "megatron" else []
        (config,) = preflight([Path(recipe)], [f"engine.backend={engine}", *layout, *overrides])
        with session(config, accelerator) as groups:
            roles = build_roles(plan_run(config, accelerator), accelerator, groups, steps=2, colocated=False)
            facts = {fact.role: (fact.model, fact.family, fact.parameters) for fact in role_facts(config, roles)}
            actual[name] = {"facts": facts, **say(roles, vocab_size=vocab_size)}
    return actual


def say(roles: Any, *, vocab_size: int) -> dict[str, torch.Tensor | list[str]]:
    """Of this rank's rows: "actor", "critic" and "reference" at first, and "... later" once actor and critic learnt."""
    batch = own_rows(random_experience(vocab_size=vocab_size), roles.actor_engine)
    said: dict[str, torch.Tensor | list[str]] = {"engines": [engine.name for engine in roles.engines.values()]}
    for when in ("", " later"):
        for name in ("actor", "critic", "reference"):
            outputs = getattr(roles, name).evaluate(batch)
            if outputs.logprobs is not None or outputs.values is not None:
                said[name + when] = outputs.values if name == "critic" else outputs.logprobs
        for learner in (roles.actor, roles.critic):
            learner.update(batch, step=1)
    return said
