"""What each rank does in the parity tests: one launch goes through many layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.engines import LAYOUTS, exported, exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience

STEPS = 2


def losses(head: str) -> Any:
    """The loss under test: the clipped policy loss with KL and entropy, or the clipped value loss."""
    from mega_rl.algorithms.kl import KLController, k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.workers.models import PolicyLoss, ValueLoss

    if head == "value":
        return ValueLoss(value_clip=0.5)
    objective = PPO(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    return PolicyLoss(objective, kl=KLController(0.3), kl_estimator=k3, entropy_coef=0.01)


def whole(rows: torch.Tensor, engine: Any) -> torch.Tensor:
    """All data-parallel ranks' rows [B, S] of `own_rows`, in order."""
    ranks = engine.data_parallel
    count = int(ranks.sum(torch.tensor(rows.size(0))))
    full = torch.zeros(count, rows.size(1))
    full[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size] = rows
    return ranks.sum(full)


def run_case(
    checkpoint: str, layout: str, *, head: str = "lm", dtype: str = "fp32", moves: bool = True, **cut: Any
) -> dict[str, Any]:
    """Log-probs or values, loss metrics and gradients on one layout; and, `moves`, the weights after some steps."""
    torch.manual_seed(0)
    batch = random_experience()
    config = make_config(Path(checkpoint), layout=layout, dtype=dtype)
    config = replaced(config, "trainer.microbatch", **cut)
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    loss = losses(head)
    # Whole gradients on every rank (no sharding), no clipping, and a step of length zero.
    result: dict[str, Any] = {}
    with running_engine(replaced(config, "optim", clip_grad=0.0), head=head) as engine:
        _fill_value_head(engine)
        rows = own_rows(batch, engine)
        outputs = engine.forward(rows, with_entropy=True)
        name = "values" if head == "value" else "logprobs"
        result["outputs"] = whole(getattr(outputs, name), engine)
        if head == "lm":
            result["entropy"] = whole(outputs.entropy, engine)
        result["metrics"] = engine.train_minibatch(rows, loss, lr=0.0)
        result["gradients"] = exported_gradients(engine)
    if not moves:
        return result
    with running_engine(config, head=head) as engine:
        _fill_value_head(engine)
        rows = own_rows(batch, engine)
        result["start"] = exported(engine)
        steps = [engine.train_minibatch(rows, loss, lr=1e-4) for _ in range(STEPS)]
        result["steps"] = steps
        result["weights"] = exported(engine)
    return result


def _fill_value_head(engine: Any) -> None:
    """A fresh value head is zero and passes no gradient to the backbone: give it numbers, the same on every layout."""
    from mega_rl.engines.models.heads import ValueHead

    heads = [m for model in engine.models for m in model.modules() if isinstance(m, ValueHead)]
    for head in heads:
        with torch.no_grad():
            values = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(7))
            head.weight.copy_(values)
    if heads and engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def run_cases(rank: int, world_size: int, cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Every case of this world size; what rank 0 found, by case name."""
    results = {}
    for case in cases:
        case = dict(case)
        name = case.pop("name")
        assert LAYOUTS[case["layout"]][0] == world_size
        results[name] = run_case(**case)
    return results if rank == 0 else None
