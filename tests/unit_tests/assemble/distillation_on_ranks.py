"""A run whose student has a teacher of another family, on each rank of a launch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.helpers.engines import replaced
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS = 12


def distil(rank: int, folder: str) -> dict[str, Any]:
    """KL of the student to the teacher at each step, and what the models are."""
    from mega_rl.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.assemble import build_trainer, session
    from mega_rl.workers.models import AbsentWorker

    config = run_config(Path(folder), "1", "grpo")
    config = replaced(
        config, "algorithm", advantage="distillation", advantage_settings={}, loss_aggregation="token-mean"
    )
    config = replaced(config, "algorithm.kl", placement="none", coef=0.001)
    config = replaced(config, "model", ref_path=str(Path(folder) / "teacher"))
    config = replaced(config, "optim", lr=1e-2)
    config = replaced(config, "rollout", n=8)
    config = replaced(config, "trainer", run_dir=str(Path(folder) / "distilled"), steps=STEPS)
    records: list[dict[str, float]] = []
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        for step in range(STEPS):
            trainer.sync.publish()
            records.append(trainer.step(step))
        return {"kl": [record["kl/ref_k1"] for record in records], "critic": isinstance(trainer.critic, AbsentWorker)}
