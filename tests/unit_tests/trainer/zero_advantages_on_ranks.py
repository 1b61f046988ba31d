"""What each rank does in test_zero_advantages.py: the same mini-batch with and without the rows of advantage 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.kl import k2
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.policy_losses import LOSSES
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.trainer.rows import rows_with_advantages
from mega_rl.types import Experience, row_numbers
from mega_rl.workers.models import PolicyLoss
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience

# name -> (ranks, layout of `LAYOUTS`, engine)
CASES = {"1": (1, "1", "megatron"), "dp2": (2, "dp2", "megatron"), "fsdp 2": (2, "dp2", "fsdp")}
SCALED = [name for name in LOSSES if LOSSES[name].scales_with_advantage]
# Where defaults would reject every response: the model has nothing in common with the old log-probs.
SETTINGS = {"geometric_rejection": {"low": 0.7, "high": 1.4}, "sequence_rejection": {"low": 0.01, "high": 100.0}}
LEFT = 4  # rows that have advantages, of 8
ALL_ZERO = "no advantage"


def experience(zero: tuple[int, ...]) -> Experience:
    """Rows of four prompts with two samples each; those of some prompts have no advantage."""
    batch = random_experience()
    batch.advantages = torch.where(torch.isin(batch.prompt_index, torch.tensor(zero))[:, None], 0.0, batch.advantages)
    return batch


def losses() -> dict[str, PolicyLoss]:
    """Return PPO's loss with each correction, and the other losses that are multiples of the advantage."""
    objectives = {name: PolicyLoss(LOSSES[name](), kl=None, kl_estimator=k2) for name in SCALED}
    corrected = {
        name: PolicyLoss(LOSSES["ppo"](), kl=None, kl_estimator=k2, correction=build(**SETTINGS.get(name, {})))
        for name, build in CORRECTIONS.items()
    }
    return objectives | corrected | {ALL_ZERO: objectives["ppo"]}


def run_case(checkpoint: str, name: str) -> dict[str, list[dict[str, Any]]]:
    """Return metrics, rows and gradients of an update with all rows, and of one with those that are left; by loss."""
    _, layout, backend = CASES[name]
    config = replaced(make_config(Path(checkpoint), layout=layout, engine=backend), "optim", clip_grad=0.0)
    config = replaced(
        replaced(config, "trainer.microbatch", max_tokens=24), "engine.megatron.optimizer", distributed=False
    )
    results: dict[str, list[dict[str, Any]]] = {}
    with running_engine(config) as engine:
        ranks = engine.data_parallel
        plan = MinibatchPlan(
            4, epochs=1, aggregation=AGGREGATIONS["token-mean"], max_response_tokens=24, seed=0, ranks=ranks
        )
        for loss_name, loss in losses().items():
            own = own_rows(experience((0, 1, 2, 3) if loss_name == ALL_ZERO else (0, 1)), engine)
            own.rows = row_numbers(own.loss_mask)
            (minibatch,) = plan.cut(own, num_prompts=4, step=0)
            results[loss_name] = []
            for rows in (minibatch, rows_with_advantages(minibatch, ranks)[0]):
                result: dict[str, Any] = {"metrics": engine.train_minibatch(rows, loss, lr=0.0)}
                result["rows"] = int(ranks.sum(torch.tensor(len(rows.lengths))))
                result["own_rows"] = len(rows.lengths)
                if backend == "megatron":
                    result["gradients"] = exported_gradients(engine)
                results[loss_name].append(result)
    return results


def run_cases(rank: int, world_size: int, checkpoint: str) -> dict[str, Any]:
    """Every case of this many ranks, by name."""
    return {name: run_case(checkpoint, name) for name in CASES if CASES[name][0] == world_size}
