"""Updates of a student on every token's divergence from its teacher, on each rank of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from mega_rl.algorithms.kl import k2
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.algorithms.policy_losses.weighted import TeacherDivergence
from mega_rl.algorithms.sequences import Sequences
from mega_rl.protocols import LossOutput
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced
from tests.helpers.models import random_experience
from tests.helpers.selection import without

PADDED = {"packing": False, "size": 3}
TEMPERATURE = 0.8
# name -> (ranks, layout of `LAYOUTS`, engine, settings of trainer.microbatch)
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "1": (1, "1", "megatron", {}),
    "packed, one sequence": (1, "1", "megatron", {"max_tokens": 24}),
    "padded": (1, "1", "megatron", PADDED),
    "tp2": (2, "tp2", "megatron", {}),
    "tp2-sp": (2, "tp2-sp", "megatron", {}),
    "pp2-vpp2": (2, "pp2-vpp2", "megatron", {}),
    "dp2": (2, "dp2", "megatron", {}),
    "cp2": (2, "cp2", "megatron", {}),
    "cp2 padded": (2, "cp2", "megatron", PADDED),
    "fsdp 2": (2, "dp2", "fsdp", {}),
    "fsdp 2 padded": (2, "dp2", "fsdp", PADDED),
}
# Others have their parts.
CASES = without(CASES, "packed, one sequence", "tp2", "dp2", "cp2 padded", "fsdp 2 padded")
ENTROPY_COEF = 0.3


@dataclass(frozen=True)
class MixedLoss:
    """Divergence, log-prob and entropy of each token in one loss, as a loss of a user's own may have them."""

    needs_entropy: ClassVar[bool] = True

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        assert outputs.divergence is not None
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        each = outputs.divergence - fields["advantages"] * outputs.logprobs - ENTROPY_COEF * outputs.entropy
        loss = (fields["loss_weights"] * each).sum()
        return LossOutput(loss, {"actor/loss": loss.detach()})


# name -> (beta, loss)
LOSSES: dict[str, tuple[float, Any]] = {
    "reverse": (1.0, PolicyLoss(TeacherDivergence(), kl=None, kl_estimator=k2)),
    "half": (0.5, PolicyLoss(TeacherDivergence(beta=0.5), kl=None, kl_estimator=k2)),
    "mixed": (0.0, MixedLoss()),
}


def minibatch_of(engine: Any) -> Any:
    """This rank's rows of the mini-batch, with loss weights that differ from row to row."""
    own = own_rows(random_experience(), engine)
    own.rows = row_numbers(own.loss_mask)
    plan = MinibatchPlan(
        4, 1, AGGREGATIONS["seq-mean-token-mean"], max_response_tokens=24, seed=0, ranks=engine.data_parallel
    )
    (minibatch,) = plan.cut(own, num_prompts=4, step=0)
    return minibatch


def run_case(student: str, teacher: str, name: str) -> dict[str, dict[str, Any]]:
    """Metrics of an update of length zero and, of the engine that shows them, every gradient; by loss."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_actor, session

    _, layout, backend, cut = CASES[name]
    config = make_config(Path(student), layout=layout, engine=backend)
    config = replaced(replaced(config, "trainer.microbatch", **cut), "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron.optimizer", distributed=backend != "megatron")
    config = replaced(config, "rollout", temperature=TEMPERATURE)
    results = {}
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator)
        frozen = build_actor(replaced(config, "model", path=teacher), groups, accelerator, trainable=False)
        minibatch = minibatch_of(engine)
        before = frozen.forward(minibatch).logprobs
        for loss_name, (beta, loss) in LOSSES.items():
            lesson = replace(frozen.teach(minibatch), beta=beta)
            result: dict[str, Any] = {"metrics": engine.train_minibatch(minibatch, loss, lr=0.0, lesson=lesson)}
            if backend == "megatron":
                result["gradients"] = exported_gradients(engine)
            results[loss_name] = result
        after = frozen.forward(minibatch).logprobs
        assert before is not None
        assert before.equal(after), "a model that teaches computes log-probs as before"
    return results


def run_cases(rank: int, world_size: int, student: str, teacher: str) -> dict[str, Any]:
    """Every case of this many ranks, by name."""
    return {name: run_case(student, teacher, name) for name in CASES if CASES[name][0] == world_size}
