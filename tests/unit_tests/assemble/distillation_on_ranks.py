"""Runs of a student and its teacher, on each rank of a launch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.helpers.engines import replaced
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS = {"ppo": 12, "distillation": 15}


def distil(rank: int, folder: str, loss: str, teacher: str, lr: float, roles: str = "all") -> dict[str, Any]:
    """Metrics of each step, and whether the run lacks a critic; `roles` of engine.resident_roles."""
    from mega_rl.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.assemble import build_trainer, session
    from mega_rl.workers.models import AbsentWorker

    config = run_config(Path(folder), "1", "grpo")
    config = replaced(config, "algorithm", advantage="distillation", advantage_settings={})
    config = replaced(config, "algorithm", loss=loss, loss_settings={}, loss_aggregation="token-mean")
    config = replaced(config, "algorithm.kl", placement="none", coef=0.001)
    config = replaced(config, "model", ref_path=str(Path(folder) / teacher))
    config = replaced(config, "optim", lr=lr)
    config = replaced(config, "rollout", n=8)
    config = replaced(config, "engine", resident_roles=roles)
    config = replaced(config, "trainer", run_dir=str(Path(folder) / f"distilled-{loss}-{roles}"), steps=STEPS[loss])
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        records: list[dict[str, float]] = []
        for step in range(STEPS[loss]):
            trainer.sync.publish()
            records.append(trainer.step(step))
        return {"records": records, "critic": isinstance(trainer.critic, AbsentWorker)}
