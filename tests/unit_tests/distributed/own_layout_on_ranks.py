"""A student and a reference on another layout of the same ranks: log-probs, and updates on divergences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.engines import LAYOUTS, exported_gradients, make_config, own_rows, replaced
from tests.helpers.models import random_experience
from tests.helpers.selection import without
from tests.unit_tests.distributed.whole_vocabulary_on_ranks import LOSSES, PADDED, TEMPERATURE, minibatch_of


class Case(NamedTuple):
    """Layouts of student and reference."""

    ranks: int
    student: str  # of `LAYOUTS`
    reference: dict[str, Any]  # settings of engine.megatron.reference
    teacher: str = "dense"  # which checkpoint
    microbatch: dict[str, Any] = {}  # noqa: RUF012 - never changed


CASES = {
    "tp2 from dp2": Case(2, "tp2", {"tp": 1}),
    "tp2-sp from pp2": Case(2, "tp2-sp", {"tp": 1, "pp": 2}),
    "dp2 from tp2": Case(2, "dp2", {"tp": 2}),
    "dp2 from cp2": Case(2, "dp2", {"cp": 2}),
    "dp2 padded from cp2": Case(2, "dp2", {"cp": 2}, microbatch=PADDED),
    "cp2 from tp2": Case(2, "cp2", {"cp": 1, "tp": 2}),
    "cp2 padded from pp2": Case(2, "cp2", {"cp": 1, "pp": 2}, microbatch=PADDED),
    "pp2-vpp2 from tp2": Case(2, "pp2-vpp2", {"pp": 1, "tp": 2}),
    "pp2 from pp2, uneven": Case(2, "pp2", {"pp": 2, "pipeline": "Et|tttL"}),
    "dp2 from experts ep2": Case(2, "dp2", {"ep": 2}, "experts"),
    "cp2 from experts tp2-etp1-ep2": Case(2, "cp2", {"cp": 1, "tp": 2, "etp": 1, "ep": 2}, "experts"),
    "pp2-dp2 from tp2-dp2": Case(4, "pp2-dp2", {"pp": 1, "tp": 2}),
    "tp2-dp2 from cp2-pp2": Case(4, "tp2-dp2", {"tp": 1, "cp": 2, "pp": 2}),
}
# Others have their parts.
CASES = without(
    CASES,
    "tp2-sp from pp2",
    "dp2 from tp2",
    "dp2 from cp2",
    "cp2 from tp2",
    "cp2 padded from pp2",
    "pp2 from pp2, uneven",
    "dp2 from experts ep2",
    "pp2-dp2 from tp2-dp2",
    "tp2-dp2 from cp2-pp2",
)


class Watched:
    """A model whose passes find the groups of its layout in Megatron-Core's globals."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def forward(self, batch: Any) -> Any:
        self.check()
        return self.engine.forward(batch)

    def teach(self, minibatch: Any) -> Any:
        self.check()
        return self.engine.teach(minibatch)

    def check(self) -> None:
        from megatron.core import parallel_state

        assert parallel_state.get_tensor_model_parallel_group() is self.engine.groups.tp
        assert parallel_state.get_context_parallel_group() is self.engine.groups.cp


def run_case(student: str, teachers: dict[str, str], name: str) -> dict[str, Any]:
    """Differences of the reference's log-probs from a model on the student's layout; updates by loss."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.engines.own_layout import OwnLayout
    from mega_rl.parallel.groups import another
    from mega_rl.parallel.layout import ParallelLayout
    from mega_rl.trainer.assemble import build_actor, session

    case = CASES[name]
    sizes = {"pp": 2} if case.student == "pp2-dp2" else LAYOUTS[case.student][1]
    config = replaced(make_config(Path(student)), "engine.megatron", **sizes)
    config = replaced(config, "engine.megatron.reference", **case.reference)
    config = replaced(replaced(config, "trainer.microbatch", **case.microbatch), "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "rollout", temperature=TEMPERATURE)
    teacher = replaced(config, "model", path=teachers[case.teacher])
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator)
        same = build_actor(teacher, groups, accelerator, trainable=False)
        layout = ParallelLayout.of_engine(config.engine.of_reference, world_size=case.ranks)
        its_groups = another(layout, groups, timeout_s=60.0)
        with its_groups.current():
            frozen = build_actor(teacher, its_groups, accelerator, trainable=False)
        relaid = OwnLayout(Watched(frozen), frozen, engine, torch.float32)
        batch = own_rows(random_experience(), engine)
        few = batch[:1]  # fewer rows than there may be replicas of the reference
        results: dict[str, Any] = {"logprobs": []}
        for rows in (batch, few):
            expected, actual = same.forward(rows).logprobs, relaid.evaluate(rows).logprobs
            assert expected is not None
            assert actual is not None
            assert expected.abs().max() > 1.0
            results["logprobs"].append(float((actual - expected).abs().max()))
        minibatch = minibatch_of(engine)
        for loss_name, (beta, loss) in LOSSES.items():
            lesson = replace(relaid.teach(minibatch), beta=beta)
            metrics = engine.train_minibatch(minibatch, loss, lr=0.0, lesson=lesson)
            results[loss_name] = {"metrics": metrics, "gradients": exported_gradients(engine)}
    return results


def run_cases(rank: int, world_size: int, student: str, teachers: dict[str, str]) -> dict[str, Any]:
    """Every case of this many ranks, by name."""
    return {name: run_case(student, teachers, name) for name, case in CASES.items() if case.ranks == world_size}
