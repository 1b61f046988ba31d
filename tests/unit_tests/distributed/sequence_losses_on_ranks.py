"""What each rank does in test_sequence_losses.py: a mini-batch cut as a step cuts it, and a loss of whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.kl import k2
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.algorithms.policy_losses import LOSSES
from mega_rl.algorithms.policy_losses import LOSSES as OBJECTIVES
from mega_rl.algorithms.sequences import Sequences
from mega_rl.protocols import LossOutput
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience

PADDED = {"packing": False, "size": 3}
# name -> (ranks, layout of `LAYOUTS`, engine, settings of trainer.microbatch)
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "1": (1, "1", "megatron", {}),
    "packed, one sequence": (1, "1", "megatron", {"max_tokens": 24}),
    "padded": (1, "1", "megatron", PADDED),
    "tp2": (2, "tp2", "megatron", {}),
    "pp2": (2, "pp2", "megatron", {}),
    "dp2": (2, "dp2", "megatron", {}),
    "cp2": (2, "cp2", "megatron", {}),
    "cp2 padded": (2, "cp2", "megatron", PADDED),
    "fsdp 2": (2, "dp2", "fsdp", {}),
}


@dataclass(frozen=True)
class SequenceRatioLoss:
    """The ratio of whole responses, exp(mean log ratio), times each token's advantage: no sum over single tokens."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        assert outputs.logprobs is not None
        active = fields["loss_mask"]
        log_ratio = torch.where(active, outputs.logprobs - fields["old_logprobs"], 0.0)
        lengths = sequences.sum(active.float())
        ratio = sequences.spread((sequences.sum(log_ratio) / lengths.clamp(min=1.0)).exp())
        sums = {
            "actor/ratio": (fields["token_weights"] * ratio).sum().detach(),
            "actor/length": (fields["token_weights"] * sequences.spread(lengths)).sum().detach(),
        }
        loss = (-fields["loss_weights"] * fields["advantages"] * ratio).sum()
        return LossOutput(
            loss, sums | {"actor/loss": loss.detach()}, {"actor/longest": sequences.spread(lengths).max()}
        )


WITHOUT_TEACHER = [loss for loss in OBJECTIVES if not LOSSES[loss].needs_teacher]
# In which every policy loss is tried, too: what else is cut, a loss does not see.
EVERY_LOSS = ("1", "packed, one sequence", "dp2", "cp2")
# Where the defaults would cut off every response or none: the model has nothing in common with the old log-probs.
SETTINGS: dict[str, dict[str, float]] = {
    "cispo": {"cap": 1.0},
    "gspo": {"clip_low": 0.6, "clip_high": 0.6},
    "dppo_tv": {"threshold": 0.03},
    "dppo_kl": {"threshold": 0.03},
    "clip_cov": {"threshold": 0.5},
    "kl_cov": {"threshold": 0.5},
}
CORRECTION_SETTINGS: dict[str, dict[str, Any]] = {
    "tis": {"level": "sequence"},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
}


def losses_of(name: str) -> dict[str, Any]:
    """The losses of a case: that of this file, every policy loss, and PPO's with every correction."""
    losses: dict[str, Any] = {"ratio": SequenceRatioLoss()}
    if name in EVERY_LOSS:
        made = {loss: OBJECTIVES[loss](**SETTINGS.get(loss, {})) for loss in WITHOUT_TEACHER}
        losses |= {loss: PolicyLoss(objective, kl=None, kl_estimator=k2) for loss, objective in made.items()}
        for correction, build in CORRECTIONS.items():
            weights = build(**CORRECTION_SETTINGS.get(correction, {}))
            losses[correction] = PolicyLoss(OBJECTIVES["ppo"](), kl=None, kl_estimator=k2, correction=weights)
    return losses


def run_case(checkpoint: str, name: str) -> dict[str, dict[str, Any]]:
    """Metrics of an update of length zero and, of the engine that shows them, every gradient; by loss."""
    _, layout, backend, cut = CASES[name]
    config = make_config(Path(checkpoint), layout=layout, engine=backend)
    config = replaced(replaced(config, "trainer.microbatch", **cut), "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron.optimizer", distributed=backend != "megatron")
    results = {}
    with running_engine(config) as engine:
        own = own_rows(random_experience(), engine)
        own.rows = row_numbers(own.loss_mask)  # as `build_experience` numbers the rows that this rank has sampled
        plan = MinibatchPlan(
            4, 1, AGGREGATIONS["seq-mean-token-mean"], max_response_tokens=24, seed=0, ranks=engine.data_parallel
        )
        (minibatch,) = plan.cut(own, num_prompts=4, step=0)
        for loss_name, loss in losses_of(name).items():
            result = {"metrics": engine.train_minibatch(minibatch, loss, lr=0.0)}
            if backend == "megatron":
                result["gradients"] = exported_gradients(engine)
            results[loss_name] = result
    return results


def run_cases(rank: int, world_size: int, checkpoint: str) -> dict[str, Any]:
    """Every case of this many ranks, by name."""
    return {name: run_case(checkpoint, name) for name in CASES if CASES[name][0] == world_size}
