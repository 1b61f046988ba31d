"""A student's update on the divergence from a teacher of another family and width: any layout, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.kl import k2
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.policy_losses import TeacherDivergence
from mega_rl.algorithms.statistics import Sequences
from mega_rl.protocols import LossOutput
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import Experience, TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, worst_difference
from tests.helpers.fakes import FakeRanks
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.parallel.test_divergence import jensen_shannon

PADDED = {"packing": False, "size": 3}
TEMPERATURE = 0.8


class Case(NamedTuple):
    """A student, and a teacher on the student's layout or on its own."""

    ranks: int
    student: str  # layout of `LAYOUTS`
    microbatch: dict[str, Any] = {}  # noqa: RUF012 - never changed
    engine: str = "megatron"
    reference: dict[str, Any] | None = None  # settings of engine.megatron.reference: the teacher's own layout
    teacher: str = "dense"  # which checkpoint


CASES = {
    "1": Case(1, "1"),
    "packed, one sequence": Case(1, "1", {"max_tokens": 24}),
    "padded": Case(1, "1", PADDED),
    "tp2": Case(2, "tp2"),
    "tp2-sp": Case(2, "tp2-sp"),
    "pp2-vpp2": Case(2, "pp2-vpp2"),
    "dp2": Case(2, "dp2"),
    "cp2": Case(2, "cp2"),
    "cp2 padded": Case(2, "cp2", PADDED),
    "fsdp 2": Case(2, "dp2", engine="fsdp"),
    "fsdp 2 padded": Case(2, "dp2", PADDED, "fsdp"),
    "tp2 from dp2": Case(2, "tp2", reference={"tp": 1}),
    "tp2-sp from pp2": Case(2, "tp2-sp", reference={"tp": 1, "pp": 2}),
    "dp2 from tp2": Case(2, "dp2", reference={"tp": 2}),
    "dp2 padded from cp2": Case(2, "dp2", PADDED, reference={"cp": 2}),
    "pp2-vpp2 from tp2": Case(2, "pp2-vpp2", reference={"pp": 1, "tp": 2}),
    "pp2 from pp2, uneven": Case(2, "pp2", reference={"pp": 2, "pipeline": "Et|tttL"}),
    "cp2 from experts tp2-etp1-ep2": Case(2, "cp2", reference={"cp": 1, "tp": 2, "etp": 1, "ep": 2}, teacher="experts"),
    "tp2-dp2 from cp2-pp2": Case(4, "tp2-dp2", reference={"tp": 1, "cp": 2, "pp": 2}),
}
# Others have their parts.
CASES = without(
    CASES,
    *("packed, one sequence", "tp2", "dp2", "cp2 padded", "fsdp 2 padded", "tp2-sp from pp2", "dp2 from tp2"),
    *("pp2 from pp2, uneven", "tp2-dp2 from cp2-pp2"),
)
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


def run_case(student: str, teachers: dict[str, str], name: str) -> dict[str, Any]:
    """Metrics of an update of length zero and, of the engine that shows them, every gradient; by loss.

    A teacher on its own layout gives the log-probs of one on the student's: under "logprobs" the differences, of all
    rows and of one row for each of the student's replicas.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_actor, session

    case = CASES[name]
    config = make_config(Path(student), layout=case.student, engine=case.engine)
    config = replaced(config, "engine.megatron.reference", **(case.reference or {}))
    config = replaced(replaced(config, "trainer.microbatch", **case.microbatch), "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron.optimizer", distributed=case.engine != "megatron")
    config = replaced(config, "rollout", temperature=TEMPERATURE)
    teacher = replaced(config, "model", path=teachers[case.teacher])
    results: dict[str, Any] = {}
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator)
        frozen = same = build_actor(teacher, groups, accelerator, trainable=False)
        minibatch = minibatch_of(engine)
        before = same.forward(minibatch).logprobs
        if case.reference is not None:
            frozen = on_own_layout(teacher, groups, accelerator, engine)
            batch = own_rows(random_experience(), engine)
            pairs = [(same.forward(rows).logprobs, frozen.evaluate(rows).logprobs) for rows in (batch, batch[:1])]
            assert all(expected.abs().max() > 1.0 for expected, _ in pairs)
            results["logprobs"] = [float((actual - expected).abs().max()) for expected, actual in pairs]
        for loss_name, (beta, loss) in LOSSES.items():
            lesson = replace(frozen.teach(minibatch), beta=beta)
            result: dict[str, Any] = {"metrics": engine.train_minibatch(minibatch, loss, lr=0.0, lesson=lesson)}
            if case.engine == "megatron":
                result["gradients"] = exported_gradients(engine)
            results[loss_name] = result
        assert before.equal(same.forward(minibatch).logprobs), "a model that teaches computes log-probs as before"
    return results


def on_own_layout(config: Any, groups: Any, accelerator: Any, student: Any) -> Any:
    """A model on the layout of `engine.megatron.reference`, whose passes find its groups in Megatron-Core's globals."""
    from megatron.core import parallel_state

    from mega_rl.engines.own_layout import OwnLayout
    from mega_rl.parallel.groups import another, current
    from mega_rl.parallel.layout import ParallelLayout
    from mega_rl.trainer.assemble import build_actor

    layout = ParallelLayout.of_engine(config.engine.of_reference, world_size=groups.world.size())
    its_groups = another(layout, groups, timeout_s=60.0)
    with current(its_groups):
        frozen = build_actor(config, its_groups, accelerator, trainable=False)

    def watched(run: Any) -> Any:
        def call(batch: Any) -> Any:
            assert parallel_state.get_tensor_model_parallel_group() is its_groups.tp
            assert parallel_state.get_context_parallel_group() is its_groups.cp
            return run(batch)

        return call

    model = SimpleNamespace(forward=watched(frozen.forward), teach=watched(frozen.teach))
    return OwnLayout(model, frozen, student, torch.float32)  # type: ignore[arg-type]


def run_cases(rank: int, world_size: int, student: str, teachers: dict[str, str]) -> dict[str, Any]:
    """Every case of this many ranks, by name."""
    return {name: run_case(student, teachers, name) for name, case in CASES.items() if case.ranks == world_size}


pytestmark = pytest.mark.timeout(300)

# As in test_engine_parity: fp32 sums of a few hundred terms, here against float64.
RELATIVE_TOLERANCE = 1e-5

Expected = dict[str, tuple[float, dict[str, Tensor]]]  # loss and gradients by name


VOCABULARY = 51  # is padded for two ranks, and not for one


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "student"
    return write_tiny_checkpoint(folder, family="qwen3", tied=True, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another family and width with a projection of its own, and a tied mixture of experts."""
    folder, common = tmp_path_factory.mktemp("teachers"), {"vocab_size": VOCABULARY, "seed": 5}
    dense = write_tiny_checkpoint(folder / "dense", family="llama", tied=False, hidden_size=48, **common)
    return {"dense": dense, "experts": write_tiny_checkpoint(folder / "experts", family="qwen3_moe", **common)}


@pytest.fixture(scope="module")
def results(student: Path, teachers: dict[str, Path]) -> dict[str, Any]:
    """Every case, by name: rank 0's, and differences of log-probs on all ranks; one launch for each number of ranks."""
    paths = {name: str(path) for name, path in teachers.items()}
    results: dict[str, Any] = {}
    for size in sorted({case.ranks for case in CASES.values()}):
        ranks = run_ranks(size, run_cases, size, str(student), paths)
        for name, result in ranks[0].items():
            results[name] = {**result, "logprobs": [d for rank in ranks for d in rank[name].get("logprobs", [])]}
    return results


@pytest.fixture(scope="module")
def expected(student: Path, teachers: dict[str, Path]) -> dict[str, Expected]:
    return {name: in_float64(student, path) for name, path in teachers.items()}


def in_float64(student_path: Path, teacher_path: Path) -> Expected:
    """Loss and every gradient of transformers' models in float64, row by row, without packing."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
        for path in (student_path, teacher_path)
    )
    plan = MinibatchPlan(4, 1, AGGREGATIONS["seq-mean-token-mean"], max_response_tokens=24, seed=0, ranks=FakeRanks())
    (batch,) = plan.cut(random_experience(), num_prompts=4, step=0)
    reference: Expected = {}
    for name, (beta, _) in LOSSES.items():
        student.zero_grad()
        rows = range(len(batch.tokens))
        losses = [_row_loss(student, teacher, batch, row, beta=beta, mixed=name == "mixed") for row in rows]
        loss = torch.stack(losses).sum()
        loss.backward()
        gradients = {key: parameter.grad.clone() for key, parameter in student.named_parameters()}
        reference[name] = (float(loss.detach()), gradients)
    return reference


def _row_loss(student: Any, teacher: Any, batch: Experience, row: int, *, beta: float, mixed: bool) -> Tensor:
    length = int(batch.lengths[row])
    tokens = batch.tokens[row : row + 1, :length]
    logp = (student(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
    with torch.no_grad():
        logq = (teacher(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
    each = jensen_shannon(logp, logq, beta)
    if mixed:
        sampled = logp.gather(1, tokens[0, 1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(dim=1)
        each = each - batch.advantages[row, 1:length].double() * sampled - ENTROPY_COEF * entropy
    return (batch.loss_weights[row, 1:length].double() * each).sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_float64(
    results: dict[str, Any], expected: dict[str, Expected], case: str, loss: str
) -> None:
    """The loss, the gradient norm, and where an engine shows them all gradients."""
    actual, (value, gradients) = results[case][loss], expected[CASES[case].teacher][loss]
    assert actual["metrics"]["actor/loss"] == pytest.approx(value, rel=RELATIVE_TOLERANCE)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert actual["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=RELATIVE_TOLERANCE)
    if "gradients" in actual:
        distance, name = worst_difference(actual["gradients"], gradients)
        assert distance <= RELATIVE_TOLERANCE, name


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.reference is not None])
def test_log_probs_are_those_of_the_students_layout(results: dict[str, Any], case: str) -> None:
    """Sums in fp32 over other parts: log-probs of some nats differ by some 1e-6."""
    assert max(results[case]["logprobs"]) <= 1e-5


def test_the_cases_are_different(results: dict[str, Any]) -> None:
    """Micro-batches are several, the divergence is far from 0, and no two losses are the same."""
    assert min(results[case]["reverse"]["metrics"]["num_microbatches"] for case in ("1", "padded")) >= 2.0
    metrics = {loss: results["1"][loss]["metrics"] for loss in LOSSES}
    assert metrics["reverse"]["actor/teacher_divergence"] > 0.5
    assert len({round(of_loss["grad_norm"], 3) for of_loss in metrics.values()}) == len(LOSSES)
