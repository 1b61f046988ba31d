"""Runs of the whole trainer, on each rank of a launch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mega_rl.config.schema import Config
from tests.helpers.engines import exported, replaced
from tests.helpers.loops import engines_of
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import recorded_tokens, run_config

STEPS, SAVED = 5 if FULL else 4, 2


class Run(NamedTuple):
    """A run of STEPS steps that saves after every second, or one that goes on from SAVED steps of another."""

    layout: str
    source: str = ""  # name of the run to resume from
    background: bool = False  # saves beside training
    dtype: str = "fp32"
    hf_final: bool = False


def config_of(folder: Path, name: str, run: Run) -> Config:
    """PPO with a critic, an adaptive KL coefficient, a reference that follows the policy, and one validation prompt:
    fewer than there are ranks.
    """
    config = run_config(folder, run.layout, "ppo")
    config = replaced(config, "algorithm.kl", reference_interval=1, reference_rate=0.3)
    config = replaced(config, "model", dtype=run.dtype)
    config = replaced(config, "data", val_size=1)
    config = replaced(config, "optim", schedule="linear", warmup_steps=1, min_lr_ratio=0.1, weight_decay=0.1)
    config = replaced(config, "rollout", n=2, max_new_tokens=6)
    saved = folder / run.source / "checkpoints" / f"step_{SAVED:06d}"
    config = replaced(
        config,
        "checkpoint",
        save_interval=0 if run.source else SAVED,
        save_final=False,
        async_save=run.background,
        hf_final=run.hf_final,
        on_error="stop",
        resume=str(saved) if run.source else "auto",
    )
    sizes = {"steps": STEPS, "prompts_per_step": 4, "minibatch_size": 2}
    return replaced(config, "trainer", run_dir=str(folder / name), val_interval=2, **sizes)


def run_all(rank: int, folder: str, runs: dict[str, Run]) -> dict[str, Any]:
    """By name: weights at the start and after each step, tokens of each step, Adam's counters."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    return {name: one_run(Path(folder), name, run, accelerator) for name, run in runs.items()}


def refused_all(rank: int, folder: str, runs: dict[str, Run]) -> dict[str, str]:
    """What is said to each run, which must not start."""
    from mega_rl.errors import UserError
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    said = {name: "" for name in runs}
    for name, run in runs.items():
        try:
            one_run(Path(folder), name, run, accelerator)
        except UserError as error:
            said[name] = str(error)
    return said


def one_run(folder: Path, name: str, run: Run, accelerator: Any) -> dict[str, Any]:
    from mega_rl.trainer.assemble import build_trainer, session

    config = config_of(folder, name, run)
    weights: list[dict[str, torch.Tensor]] = []
    with session(config, accelerator) as groups, ExitStack() as resources:

        def after_each_step() -> bool:
            weights.append(weights_of(trainer))
            return False

        trainer = build_trainer(config, accelerator, groups, stop_requested=after_each_step, resources=resources)
        tokens = recorded_tokens(trainer)
        first = weights_of(trainer)
        counters = step_counters(engines_of(trainer)["actor"])
        trainer.fit()
        return {
            "start": trainer.start,
            "first": first,
            "steps": weights,
            "tokens": tokens,  # of validations too
            "counters": counters,
            "last counters": step_counters(engines_of(trainer)["actor"]),
        }


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Exported weights of actor and critic."""
    return {
        f"{role} {name}": tensor
        for role in ("actor", "critic")
        for name, tensor in exported(engines_of(trainer)[role]).items()
    }


def step_counters(engine: Any) -> list[float]:
    """Adam's number of steps, of each parameter."""
    from mega_rl.ddp.optimizer import torch_optimizers
    from mega_rl.engines.fsdp import FSDPEngine

    optimizer = engine.optimizer
    inner = [optimizer] if isinstance(engine, FSDPEngine) else torch_optimizers(optimizer)
    states = [state for each in inner for state in each.state.values()]
    return [float(state["step"]) for state in states]
