"""Generation ahead on each rank of a launch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mega_rl.agents.environment import Environment
from mega_rl.parallel.comm import GroupRanks
from tests.helpers.fleet import StreamRun

STEPS, SAVED = 6, 3


def run_of(ranks: Any, *, waves: int, together: bool, environment: Environment | None = None) -> StreamRun:
    """Three steps ahead; prompts of a step do not divide by the ranks. With waves each step publishes twice."""
    given: Any = {"waves": waves, "publishes": 2 if waves else 1, "environment": environment}
    return StreamRun(3, ranks, together=together, steps=STEPS, per_step=5, **given)


def facts(run: StreamRun) -> dict[str, Any]:
    """Weights, and what each step trained and dropped; this replica's tokens by ticket and sample."""
    steps = []
    for batch in run.taken:
        rows, tickets = batch.samples.rollout, batch.samples.tickets
        branches = [0] * len(rows.tokens) if rows.branch is None else rows.branch.tolist()
        keys = zip(tickets[rows.prompt_index].tolist(), rows.sample_index.tolist(), branches, strict=True)
        ids = [own[:length] for own, length in zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True)]
        dropped = [(one.ticket, one.reason) for one in batch.dropped]
        steps.append({"tickets": tickets.tolist(), "dropped": dropped, "rows": dict(zip(keys, ids, strict=True))})
    return {"weights": run.policy.weights, "steps": steps}


def on_ranks(rank: int, environment: Environment | None = None) -> dict[str, Any]:
    """Return the facts of runs with and without dynamic sampling, as two replicas and as one, and of resumed ones.

    With an environment without dynamic sampling only.
    """
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    dist.init_process_group("gloo")
    ranks = GroupRanks(dist.group.WORLD)  # type: ignore[arg-type]
    runs = {}
    for waves in (0, 3) if environment is None else (0,):
        for together in (False, True):
            given: Any = {"waves": waves, "together": together, "environment": environment}
            run = run_of(ranks, **given).run(SAVED)
            saved = run.saved()
            runs[f"{waves} {together}"] = facts(run.run())
            runs[f"{waves} {together} resumed"] = facts(run_of(ranks, **given).resume(saved).run())
    dist.destroy_process_group()
    return runs
