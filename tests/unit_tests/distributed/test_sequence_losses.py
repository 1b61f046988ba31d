"""A loss that reads whole sequences does not depend on how they are packed, cut, or spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.kl import k2
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.policy_losses import LOSSES as OBJECTIVES
from mega_rl.algorithms.statistics import Sequences
from mega_rl.protocols import LossOutput
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, running_engine, worst_difference
from tests.helpers.fakes import FakeRanks
from tests.helpers.models import random_experience, write_tiny_checkpoint

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


WITHOUT_TEACHER = [loss for loss in OBJECTIVES if not OBJECTIVES[loss].needs_teacher]
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


pytestmark = pytest.mark.timeout(300)

# As in test_engine_parity: fp32 sums of a few hundred terms in another order.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, by name; one launch for each number of ranks."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)
    return run_ranks(1, run_cases, 1, str(checkpoint))[0] | run_ranks(2, run_cases, 2, str(checkpoint))[0]


COMPARED = [(case, loss) for case in CASES if case != "1" for loss in losses_of(case)]


@pytest.mark.parametrize(("case", "loss"), COMPARED)
def test_layouts_and_cuts_agree(results: dict[str, Any], case: str, loss: str) -> None:
    """Every metric of the loss, the gradient norm, and every gradient."""
    one, other = results["1"][loss], results[case][loss]
    assert other["metrics"].keys() == one["metrics"].keys()
    for name in one["metrics"].keys() - {"num_microbatches"}:
        expected = pytest.approx(one["metrics"][name], rel=RELATIVE_TOLERANCE, abs=1e-7)
        assert other["metrics"][name] == expected, name
    if "gradients" in other:
        distance, name = worst_difference(other["gradients"], one["gradients"])
        assert distance <= RELATIVE_TOLERANCE, name


def test_the_cases_are_different(results: dict[str, Any]) -> None:
    """Micro-batches are several where they should be, ratios are not 1, and losses cut some tokens off and not all."""
    counts = {name: result["ratio"]["metrics"]["num_microbatches"] for name, result in results.items()}
    assert min(counts["1"], counts["padded"], counts["cp2"]) >= 2.0
    assert counts["packed, one sequence"] >= 5.0
    one = {loss: result["metrics"] for loss, result in results["1"].items()}
    assert abs(one["ratio"]["actor/ratio"] - 1.0) > 0.1
    names = ("clip_fraction_low", "capped_fraction", "masked_fraction", "covariance_fraction")
    shares = {(loss, name): one[loss].get(f"actor/{name}") for loss in WITHOUT_TEACHER for name in names}
    shares |= {(loss, ""): one[loss]["actor/correction_masked_fraction"] for loss in CORRECTIONS if loss != "tis"}
    shares["tis", ""] = one["tis"]["actor/tis_truncated_fraction"]
    shares = {place: share for place, share in shares.items() if share is not None}
    assert len(shares) == 9 + len(CORRECTIONS)
    assert all(0.0 < share < 1.0 for share in shares.values()), shares
    norms = [metrics["grad_norm"] for metrics in one.values()]
    assert len({round(norm, 4) for norm in norms}) == len(norms)  # no two losses are the same


def test_a_copied_number_of_a_row_is_our_own_bug() -> None:
    """Rows that come from several ranks and keep their numbers would be one sequence."""
    from mega_rl.engines.microbatches import microbatch_loss

    batch = random_experience()
    batch.rows[3] = batch.rows[0]
    with pytest.raises(AssertionError, match="numbered on another rank"):
        microbatch_loss(SequenceRatioLoss(), batch)


def test_the_reference_is_the_loss_of_a_loop() -> None:
    """Row by row in float64, at a uniform model's log-probs."""
    plan = MinibatchPlan(4, 1, AGGREGATIONS["seq-mean-token-mean"], max_response_tokens=24, seed=0, ranks=FakeRanks())
    (batch,) = plan.cut(random_experience(), num_prompts=4, step=0)
    logprobs = torch.full(batch.tokens.shape, -3.0)
    fields = {name: value for name, value in batch.items() if value is not None and value.dim() == 2}
    actual = SequenceRatioLoss()(TokenOutputs(logprobs), fields, Sequences(batch.rows, len(batch.rows)))
    total = 0.0
    for row in range(len(batch.rows)):
        mask = batch.loss_mask[row]
        ratio = float((logprobs - batch.old_logprobs)[row, mask].double().mean().exp())
        total -= ratio * float(batch.advantages[row, mask].double().mean()) / len(batch.rows)
    assert float(actual.loss) == pytest.approx(total, rel=1e-6)
