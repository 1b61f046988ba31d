"""PPO runs on each rank of a launch, with what every pass and rollout found on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any


def run_all(rank: int, runs: dict[str, Sequence[str]]) -> dict[str, list[tuple[str, dict[str, list[str]]]]]:
    """Train with each of these settings in turn; of each run (event, role -> parts that were there) in order."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.plan.preflight import preflight
    from mega_rl.trainer.assemble import build_trainer, session

    seen = {}
    for name, settings in runs.items():
        (config,) = preflight([None], settings)
        with session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            seen[name] = watch(trainer)
            trainer.fit()
    return seen


def watch(trainer: Any) -> list[tuple[str, dict[str, list[str]]]]:
    """Write down what is on the device at every pass of every model, and at every rollout and publish."""
    from mega_rl.protocols import PARTS

    models = trainer.stage.devices.models
    seen: list[tuple[str, dict[str, list[str]]]] = []

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            here = {role: [p for p in PARTS if not e.is_offloaded(p)] for role, e in models.engines.items()}
            seen.append((event, {role: parts for role, parts in here.items() if parts}))
            return call(*args, **kwargs)

        return noted

    for role, engine in models.engines.items():
        for method in ("forward", "train_minibatch", "state", "save_hf"):
            setattr(engine, method, noting(f"{role} {method}", getattr(engine, method)))
    source, sync = trainer.batches.source, trainer.sync
    source.generate = noting("generate", source.generate)
    sync.publish = noting("publish", sync.publish)
    return seen
