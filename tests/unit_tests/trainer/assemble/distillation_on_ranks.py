"""Runs of a student and its teacher, on each rank of a launch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema import Config
from tests.helpers.engines import exported, replaced
from tests.helpers.loops import engines_of, step_metrics
from tests.helpers.selection import without
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS = {"ppo": 12, "distillation": 15}
# layout -> loss
WITHOUT_REWARDS = {"tp2": "ppo", "pp2": "distillation", "dp2": "distillation", "fsdp 2": "ppo"}
WITHOUT_REWARDS = without(WITHOUT_REWARDS, "pp2", "dp2")


def distil(rank: int, folder: str, loss: str, teacher: str, lr: float, roles: str = "all") -> dict[str, Any]:
    """Metrics of each step, and the roles of the run; `roles` of engine.resident_roles."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    config = distillation(folder, loss, teacher, lr, roles)
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        records: list[dict[str, float]] = []
        for step in range(STEPS[loss]):
            trainer.stage.publish(trainer.sync)
            records.append(step_metrics(trainer, step))
        return {"records": records, "roles": sorted(engines_of(trainer))}


def distil_on_layouts(rank: int, folder: str) -> dict[str, list[dict[str, float]]]:
    """Metrics of two steps by form and layout of the teacher, on two ranks that share the student's rows."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    runs: dict[str, list[dict[str, float]]] = {}
    for loss, roles in (("ppo", "all"), ("distillation", "one")):
        for name, own in {"the same": {}, "its own": {"tp": 2}}.items():
            config = distillation(folder, loss, "llama", 1e-3, roles)
            config = replaced(config, "engine.megatron.reference", **own)
            with session(config, accelerator) as groups, ExitStack() as resources:
                trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
                trainer.stage.publish(trainer.sync)
                runs[f"{loss}, {name}"] = [step_metrics(trainer, step) for step in range(2)]
    return runs


def distil_without_rewards(rank: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of the actor after two steps, by "layout, source of rewards"."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    runs: dict[str, dict[str, torch.Tensor]] = {}
    for layout, loss in WITHOUT_REWARDS.items():
        for source in ("function", "none"):
            config = without_rewards(folder, layout, loss, source)
            with session(config, accelerator) as groups, ExitStack() as resources:
                trainer = build_trainer(
                    config, accelerator, groups, stop_requested=lambda: False, resources=resources,
                    reward_function=(lambda response: 0.0) if source == "function" else None,
                )  # fmt: skip
                trainer.fit()
                trainer.log.sink.close()
                runs[f"{layout}, {source}"] = exported(engines_of(trainer)["actor"])
    return runs


def without_rewards(folder: str, layout: str, loss: str, source: str) -> Config:
    """A run of distillation on a layout whose reward is a function or none; it validates and dumps."""
    config = distillation(folder, loss, "llama", 1e-2, "auto", layout=layout)
    config = replaced(config, "reward", source=source)
    config = replaced(config, "data", val_size=2)
    config = replaced(config, "metrics", rollout_interval=1)
    run_dir = str(Path(folder) / f"{layout}-{source}")
    return replaced(config, "trainer", run_dir=run_dir, steps=2, val_interval=1)


def distillation(folder: str, loss: str, teacher: str, lr: float, roles: str, *, layout: str = "1") -> Config:
    """A run of distillation; `roles` of engine.resident_roles."""
    config = run_config(Path(folder), layout, "grpo")
    config = replaced(config, "algorithm", advantage="distillation")
    config = replaced(config, "algorithm", loss=loss, loss_aggregation="token-mean")
    config = replaced(config, "algorithm", kl="none")
    config = replaced(config, "model", ref_path=str(Path(folder) / teacher))
    config = replaced(config, "optim", lr=lr)
    config = replaced(config, "rollout", n=8)
    config = replaced(config, "engine", resident_roles=roles)
    return replaced(config, "trainer", run_dir=str(Path(folder) / f"distilled-{loss}-{roles}"), steps=STEPS[loss])
