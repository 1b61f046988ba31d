"""The whole loop on fakes: order, intervals, learning, stopping. No Megatron-Core, well under a second."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.algorithms.advantages.distillation import Distillation
from mega_rl.algorithms.advantages.gae import GAE
from mega_rl.algorithms.advantages.grpo import GRPO
from mega_rl.algorithms.advantages.registry import ESTIMATORS
from mega_rl.algorithms.kl import AdaptiveKL, FixedKL
from mega_rl.algorithms.losses.aggregation import token_mean
from mega_rl.config.schema.algorithms import ADVANTAGES
from mega_rl.rewards.role import AbsentScorer
from mega_rl.trainer import PPOTrainer, RunSettings
from mega_rl.trainer.experience import MinibatchPlan
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits, RolloutMismatchError
from mega_rl.trainer.old_logprobs import RecomputedLogprobs, RolloutLogprobs
from mega_rl.trainer.recording import _weights
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import Rewards, Rollout
from mega_rl.workers.models import AbsentWorker, ReferenceUpdates
from tests.helpers.fakes import (
    FakeCritic,
    FakePolicy,
    FakePrompts,
    FakeRanks,
    FakeReward,
    FakeSink,
    FakeStore,
    FakeTimer,
    held_out,
)


def read_ids(rollout: Rollout, row: int) -> tuple[str, str]:
    """Return the ids of a response without its last one, twice."""
    first, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
    text = " ".join(map(str, rollout.tokens[row, first : end - 1].tolist()))
    return text, text


def make_trainer(*, grpo: bool = False, **changes: Any) -> PPOTrainer:
    """A trainer of fakes; keyword arguments replace its parts."""
    events: list[str] = []
    policy = FakePolicy(events)
    kl = FixedKL(0.0)
    parts: dict[str, Any] = {
        "settings": RunSettings(steps=3),
        "prompts": FakePrompts(),
        "validation": Evaluation(),
        "rollout": policy,
        "reward": FakeReward(events),
        "actor": policy,
        "critic": AbsentWorker() if grpo else FakeCritic(events),
        "reference": AbsentWorker(),
        "estimator": GRPO() if grpo else GAE(),
        "reward_kl": None,
        "minibatches": MinibatchPlan(minibatch_size=2, epochs=1, aggregation=token_mean, max_response_tokens=4, seed=0),
        "kl": kl,
        "update_reference": ReferenceUpdates(),
        "staleness": lambda rollout: {},
        "old_logprobs": RecomputedLogprobs(
            policy, MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks())
        ),
        "sync": policy,
        "ranks": FakeRanks(),
        "timer": FakeTimer(),
        "metrics": FakeSink(),
        "checkpoints": FakeStore(events),
        "export": lambda done: events.append(f"export {done}"),
        "read": read_ids,
        "render": lambda ids: "+".join(map(str, ids)),
        "stop_requested": lambda: False,
    }
    trainer = PPOTrainer(**(parts | changes))
    trainer.events = events  # type: ignore[attr-defined]
    return trainer


def test_a_step_is_generate_score_evaluate_learn_publish() -> None:
    trainer = make_trainer(settings=RunSettings(steps=1))
    assert trainer.fit() == 1
    assert trainer.events == [  # type: ignore[attr-defined]
        "publish", "generate", "reward", "old_logprobs", "values",
        "update_critic", "update_critic", "update_actor", "update_actor", "publish",
    ]  # fmt: skip


@pytest.mark.parametrize("grpo", [False, True])
def test_the_policy_learns_what_is_rewarded(grpo: bool) -> None:
    trainer = make_trainer(grpo=grpo, settings=RunSettings(steps=80))
    trainer.fit()
    records = trainer.metrics.records
    assert records[1]["reward/mean"] < 0.3
    assert records[80]["reward/mean"] > 0.8


@pytest.mark.parametrize(
    "name",
    [name for name, area in ADVANTAGES.items() if not (area.needs_critic or area.needs_reference)],
)
def test_every_estimator_without_a_critic_teaches_it(name: str) -> None:
    """Two samples of each prompt; a reward is the share of right tokens, of which pass_at_k asks for one in four."""
    settings = {"pass_at_k": {"k": 1, "right_above": 0.2}}.get(name, {})
    trainer = make_trainer(
        grpo=True,
        settings=RunSettings(steps=80),
        estimator=ESTIMATORS[name](**settings),
        greedy_baseline=ADVANTAGES[name].needs_greedy,
        reward=FakeReward([], parts=ADVANTAGES[name].needs_parts),
    )
    trainer.fit()
    records = trainer.metrics.records
    assert records[1]["reward/mean"] < 0.3
    assert records[80]["reward/mean"] > 0.5


def test_parts_of_rewards_are_metrics_and_dumped() -> None:
    """Of a step and of a validation: means over all samples, whatever their weights."""
    trainer = make_trainer(
        grpo=True,
        reward=FakeReward([], parts=True),
        settings=RunSettings(steps=1, val_interval=1, rollout_interval=1, rollout_samples=8),
        validation=held_out(FakePrompts().batch(0)),
    )
    trainer.fit()
    record, rows = trainer.metrics.records[1], trainer.metrics.dumps[1]
    for name in ("early", "late", "token"):
        assert f"val/reward_{name}" in record
        assert all(f"reward_{name}" in row for row in rows)
    assert record["reward/mean"] == pytest.approx((record["reward/early"] + record["reward/late"]) / 2)
    assert record["val/reward_mean"] == pytest.approx((record["val/reward_early"] + record["val/reward_late"]) / 2)
    assert record["reward/token"] > 1.0


def test_a_student_comes_to_its_teacher_without_a_reward() -> None:
    """The teacher prefers token 3 and the reward token 5; the KL between the two policies themselves, exactly."""
    trainer = make_trainer(grpo=True, reference=FakeFrozen(), estimator=Distillation(), settings=RunSettings(steps=60))
    teacher = torch.zeros(8)
    teacher[3] = 1.0
    far = float(torch.nn.functional.kl_div(teacher.log_softmax(0), torch.full((8,), 0.125), reduction="sum"))
    trainer.fit()
    student = trainer.actor.logits.log_softmax(0)
    near = float((student.exp() * (student - teacher.log_softmax(0))).sum())
    assert near < 0.02 * far
    assert trainer.metrics.records[60]["kl/ref"] < 0.1 * trainer.metrics.records[1]["kl/ref"]


def test_a_student_without_a_reward_learns_as_with_one_of_zeros() -> None:
    """Weights to the bit; of rewards there is no number, no column and no call, in validations neither."""
    runs = {}
    for name, reward in {"zeros": ZeroReward(), "none": AbsentScorer()}.items():
        trainer = make_trainer(
            grpo=True,
            reference=FakeFrozen(),
            estimator=Distillation(),
            reward=reward,
            validation=held_out(FakePrompts().batch(0)),
            settings=RunSettings(steps=8, val_interval=1, rollout_interval=1, rollout_samples=2),
        )
        trainer.fit()
        runs[name] = trainer
    assert torch.equal(runs["zeros"].actor.logits, runs["none"].actor.logits)
    assert runs["none"].actor.logits.any()
    for step, record in runs["none"].metrics.records.items():
        beside = runs["zeros"].metrics.records[step]
        kept = {name: value for name, value in beside.items() if not name.startswith(("reward/", "val/reward_"))}
        assert len(kept) < len(beside)
        assert record == kept
    sink = runs["none"].metrics
    rows = [row for dump in (sink.dumps, sink.val_dumps) for step in dump.values() for row in step]
    assert len(rows) == 2 * (8 + 9)
    assert not {name for row in rows for name in row if name.startswith("reward")}
    assert {name for name in sink.records[0] if name.startswith("val/")} == {"val/response_tokens_mean"}


@pytest.mark.parametrize("interval", [1, 2])
def test_the_reference_is_updated_after_the_policy(interval: int) -> None:
    trainer = make_trainer(settings=RunSettings(steps=4, save_interval=1))
    events = trainer.events  # type: ignore[attr-defined]

    def mix() -> float:
        events.append("mix")
        return 0.25

    trainer.update_reference = ReferenceUpdates(interval, mix)
    trainer.fit()
    records = trainer.metrics.records
    assert [record["kl/reference_step"] for record in records.values()] == [n - n % interval for n in range(1, 5)]
    assert [n for n, record in records.items() if record.get("kl/reference_distance")] == [
        n for n in range(1, 5) if n % interval == 0
    ]
    first = events.index("mix")
    assert events[first - 1 : first + 2] == ["update_actor", "mix", "publish"]  # and so before the step is saved


def test_a_greedy_baseline_is_sampled_and_scored_before_the_step() -> None:
    trainer = make_trainer(
        grpo=True, settings=RunSettings(steps=1), estimator=ESTIMATORS["remax"](), greedy_baseline=True
    )
    trainer.fit()
    assert trainer.events[:5] == ["publish", "validate", "reward", "generate", "reward"]  # type: ignore[attr-defined]
    assert trainer.metrics.records[1]["reward/greedy_mean"] == 0.0  # the first word of equal ones, not the right one
    assert "baseline" in trainer.timer.phases


def test_validation_saving_and_dumps_keep_their_intervals() -> None:
    settings = RunSettings(steps=5, val_interval=2, save_interval=3, rollout_interval=4, rollout_samples=3)
    trainer = make_trainer(settings=settings, validation=held_out(FakePrompts().batch(0)))
    trainer.fit()
    records = trainer.metrics.records
    assert [step for step, record in records.items() if "val/reward_mean" in record] == [0, 2, 4, 5]
    assert list(trainer.checkpoints.saved) == [3]
    assert {step: len(rows) for step, rows in trainer.metrics.dumps.items()} == {1: 2, 4: 2, 5: 2}
    assert {step: len(rows) for step, rows in trainer.metrics.val_dumps.items()} == {0: 3, 2: 3, 4: 3, 5: 3}
    assert len({row["prompt"] for row in trainer.metrics.val_dumps[2]}) == 3
    assert all("advantage_mean" not in row for row in trainer.metrics.val_dumps[2])
    assert trainer.metrics.dumps[4][0]["prompt"] == "p0"
    assert trainer.metrics.dumps[4][0]["weight_version"] == 4
    rows = trainer.metrics.dumps[4]
    places = [(row["step"], row["prompt_index"], row["sample_index"]) for row in rows]
    assert places == [(4, 0, 0), (4, 0, 1)]
    assert any(row["advantage_mean"] for row in rows)
    for row in rows:
        assert len(row["rendered_prompt"].split("+")) == row["prompt_tokens"] > 0
        assert len(row["response"].split()) == row["response_tokens"] - row["finished"] > 0


def test_steps_are_saved_in_memory_when_the_next_begins() -> None:
    """After their record is written, and not after the last, which the end of the run removes."""
    trainer = make_trainer(settings=RunSettings(steps=7, memory_interval=2), start=2)
    trainer.fit()
    events = [event for event in trainer.events if event in ("generate", "publish") or "memory" in event]  # type: ignore[attr-defined]
    steps = ["generate", "publish"]
    assert events == ["publish", *steps, *steps, "save 4 in memory", *steps, *steps, "save 6 in memory", *steps]


def test_a_stop_request_ends_after_the_step_and_saves() -> None:
    answers = iter([False, True])
    trainer = make_trainer(settings=RunSettings(steps=9), stop_requested=lambda: next(answers))
    assert trainer.fit() == 2
    assert list(trainer.checkpoints.saved) == [2]
    assert trainer.checkpoints.saved[2]["weight_version"] == 3
    assert list(trainer.metrics.records) == [1, 2]


def test_a_resumed_run_starts_at_its_step_and_validates_no_start() -> None:
    trainer = make_trainer(
        settings=RunSettings(steps=5, val_interval=5), start=3, validation=held_out(FakePrompts().batch(0))
    )
    assert trainer.fit() == 5
    assert list(trainer.metrics.records) == [4, 5]


def test_save_final() -> None:
    """Whatever a save reports is in the record of its step, and the run waits for it."""
    trainer = make_trainer(settings=RunSettings(steps=2, save_final=True))
    trainer.fit()
    assert list(trainer.checkpoints.saved) == [2]
    assert trainer.metrics.records[2]["checkpoint/step"] == 2
    assert "checkpoint/step" not in trainer.metrics.records[1]
    assert trainer.checkpoints.saved[2]["metrics"]["reward/mean"] == trainer.metrics.records[2]["reward/mean"]
    assert trainer.checkpoints.finished


def test_hugging_face_checkpoints_keep_their_interval() -> None:
    trainer = make_trainer(settings=RunSettings(steps=5, hf_interval=2, hf_final=True))
    trainer.fit()
    assert [event for event in trainer.events if event.startswith("export")] == ["export 2", "export 4", "export 5"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", [5, 7])
def test_a_finished_run_is_exported_when_it_is_started_again(start: int) -> None:
    """Whatever `checkpoint.hf_final` was before; and nothing is trained or saved."""
    trainer = make_trainer(settings=RunSettings(steps=5, hf_final=True, save_final=True), start=start)
    assert trainer.fit() == start
    assert trainer.events == ["publish", f"export {start}"]  # type: ignore[attr-defined]
    assert not trainer.checkpoints.saved


@pytest.mark.parametrize("grpo", [False, True])
@pytest.mark.parametrize("has_reference", [False, True])
def test_roles_that_a_run_lacks_have_no_metrics(grpo: bool, has_reference: bool) -> None:
    trainer = make_trainer(
        grpo=grpo, reference=FakeFrozen() if has_reference else AbsentWorker(), settings=RunSettings(steps=1)
    )
    trainer.fit()
    logged = trainer.metrics.records[1].keys()
    assert {"kl/ref", "kl/ref_k1"} & logged == ({"kl/ref", "kl/ref_k1"} if has_reference else set())
    of_critic = {"returns/mean", "values/mean", "values/explained_variance"}
    assert of_critic & logged == (set() if grpo else of_critic)


def test_the_adaptive_kl_coefficient_follows_the_reference_kl() -> None:
    kl = AdaptiveKL(0.1, target=1e-6, horizon=16)
    reference = FakeFrozen()
    trainer = make_trainer(kl=kl, reference=reference, settings=RunSettings(steps=1))
    trainer.fit()
    assert trainer.metrics.records[1]["kl/ref"] > 1e-3
    assert kl.value == pytest.approx(0.1 * 1.1)  # four prompts of two samples: half the horizon, half the largest step
    assert trainer.metrics.records[1]["kl/coef"] == pytest.approx(0.1)


def test_steps_of_the_critic_alone_leave_the_kl_coefficient() -> None:
    """A policy that stands still has a KL of 0 to its start, whatever the coefficient."""
    kl = AdaptiveKL(0.1, target=0.05, horizon=16)
    trainer = make_trainer(kl=kl, settings=RunSettings(steps=5), reference=FakeFrozen())
    policy = trainer.actor
    trainer.actor = LateActor(policy, first_step=3)
    trainer.fit()
    coefficients = [trainer.metrics.records[step]["kl/coef"] for step in range(1, 6)]
    assert coefficients[:4] == [0.1] * 4  # the fourth step is the first that updates, with the coefficient before
    assert coefficients[4] == pytest.approx(0.1 * 0.9)  # half the horizon, half the largest step


@pytest.mark.parametrize(("skipped", "factor"), [((1.0, 1.0), 1.0), ((1.0, 0.0), 0.9)])
def test_a_step_that_skips_every_update_leaves_the_kl_coefficient(skipped: tuple[float, ...], factor: float) -> None:
    kl = AdaptiveKL(0.1, target=0.05, horizon=16)
    trainer = make_trainer(kl=kl, settings=RunSettings(steps=1), reference=FakeFrozen())
    counts, update = iter(skipped), trainer.actor.update
    trainer.actor.update = lambda *args, **kwargs: (  # type: ignore[method-assign]
        update(*args, **kwargs) | {"kl/ref": 0.0, "actor/skipped_steps": next(counts)}
    )
    trainer.fit()
    assert kl.value == pytest.approx(0.1 * factor)


def test_the_kl_of_an_update_goes_before_that_of_stand_ins() -> None:
    """With one update a step the loop has the rollout engine's log-probs, and the update the policy's."""
    kl = AdaptiveKL(0.1, target=0.05, horizon=16)
    trainer = single_update(make_trainer(kl=kl, grpo=True, reference=FakeFrozen()))
    trainer.sync.publish()
    update = trainer.actor.update
    trainer.actor.update = lambda *args, **kwargs: update(*args, **kwargs) | {"kl/ref": 0.0}  # type: ignore[method-assign]
    assert trainer.step(0)["kl/ref"] == 0.0
    assert kl.value == pytest.approx(0.1 * 0.9)


@dataclasses.dataclass
class LateActor:
    """An actor whose first steps change nothing, as those of `algorithm.critic_warmup_steps`."""

    actor: Any
    first_step: int

    def evaluate(self, batch: Any) -> Any:
        return self.actor.evaluate(batch)

    def update(self, minibatch: Any, *, step: int, inspect: Any = None) -> Any:
        if step < self.first_step:
            return {}
        return self.actor.update(minibatch, step=step, inspect=inspect) | {"kl/ref": 0.0}


class ZeroReward(FakeReward):
    """A reward that is always 0."""

    def __init__(self) -> None:
        super().__init__([])

    def score(self, rollout: Any, prompts: Any) -> Rewards:
        return Rewards(torch.zeros(len(rollout.lengths)))


class FakeFrozen:
    """A reference policy that prefers token 3."""

    def evaluate(self, batch: Any) -> Any:
        from mega_rl.types import TokenOutputs

        logits = torch.zeros(8)
        logits[3] = 1.0
        return TokenOutputs(logprobs=logits.log_softmax(0)[batch.tokens] * batch.loss_mask)


def test_a_rollout_engine_with_other_weights_stops_the_run() -> None:
    trainer = make_trainer()
    trainer.sync.publish()
    trainer.rollout.published = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 3.0])
    with pytest.raises(RolloutMismatchError, match=r"mismatch.max_limit=0.5; the worst is token id 7 at position \d"):
        trainer.step(0)
    assert "update_actor" not in trainer.events  # type: ignore[attr-defined]


def single_update(trainer: PPOTrainer) -> PPOTrainer:
    """The trainer with one update a step, whose forward gives the old log-probs."""
    trainer.minibatches = dataclasses.replace(trainer.minibatches, minibatch_size=4)
    trainer.old_logprobs = RolloutLogprobs(
        MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks())
    )
    return trainer


def test_a_single_update_spares_the_forward_and_still_compares() -> None:
    trainer = single_update(make_trainer(grpo=True))
    trainer.sync.publish()
    metrics = trainer.step(0)
    events = trainer.events  # type: ignore[attr-defined]
    assert events[events.index("reward") :] == ["reward", "update_actor", "old_logprobs", "publish"]
    assert metrics["rollout/logprob_diff_max"] < 1e-6


def test_a_single_update_is_stopped_before_it_changes_a_weight() -> None:
    trainer = single_update(make_trainer(grpo=True))
    trainer.sync.publish()
    trainer.rollout.published = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 3.0])
    with pytest.raises(RolloutMismatchError, match="token id 7"):
        trainer.step(0)
    assert not trainer.actor.logits.any()


def test_the_samplers_logprobs_are_compared_by_the_first_update_alone() -> None:
    """Of several updates on the sampler's log-probs: the later ones are of weights that have moved by right."""
    reference, trainer = make_trainer(grpo=True), make_trainer(grpo=True)
    trainer.old_logprobs = RolloutLogprobs(
        MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks())
    )
    for one in (reference, trainer):
        one.sync.publish()
        one.step(0)
    events = trainer.events  # type: ignore[attr-defined]
    updates = ["update_actor", "old_logprobs", "update_actor"]
    assert events[events.index("reward") :] == ["reward", *updates, "publish"]
    # The sampler has the trainer's weights and arithmetic here, so the updates are the same.
    torch.testing.assert_close(trainer.actor.logits, reference.actor.logits, rtol=1e-5, atol=1e-7)
    assert reference.actor.logits.any()


def test_minibatches_cover_the_batch_once_per_epoch() -> None:
    trainer = make_trainer()
    rollout = trainer.rollout.generate(FakePrompts().batch(0), step=0)
    from mega_rl.trainer.experience import build_experience

    experience = build_experience(
        rollout,
        trainer.reward.score(rollout, []),
        old=trainer.actor.evaluate(rollout),
        ref=AbsentWorker().evaluate(rollout),
        critic=trainer.critic.evaluate(rollout),
        estimator=trainer.estimator,
        sum_over_ranks=FakeRanks().sum,
    )
    plan = MinibatchPlan(minibatch_size=2, epochs=3, aggregation=token_mean, max_response_tokens=4, seed=1)
    cut = list(plan.cut(experience, num_prompts=4, step=0, ranks=FakeRanks()))
    assert len(cut) == 6
    for epoch in range(3):
        pair = cut[2 * epoch : 2 * epoch + 2]
        assert sorted(torch.cat([m.prompt_index for m in pair]).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all(float(m.loss_weights.sum()) == pytest.approx(1.0) for m in pair)
    orders = {tuple(m.prompt_index.tolist()) for m in cut}
    assert len(orders) > 2  # epochs differ
    columns = _weights(SimpleNamespace(rollout=rollout, minibatches=cut), FakeRanks())  # type: ignore[arg-type]
    recorded = columns["epoch_minibatches"]
    assert torch.equal(columns["minibatch"], recorded[:, 0])
    for number, minibatch in enumerate(cut):
        rows = recorded[:, number // 2] == number
        assert sorted(rollout.prompt_index[rows].tolist()) == sorted(minibatch.prompt_index.tolist())


def test_fit_needs_neither_megatron_nor_a_second() -> None:
    """Runs this file's loop in a fresh interpreter: what it imported and how long `fit` took."""
    code = (
        "import sys, time\n"
        "from tests.unit_tests.trainer.test_loop import make_trainer\n"
        "trainer = make_trainer()\n"
        "start = time.perf_counter(); trainer.fit(); seconds = time.perf_counter() - start\n"
        "loaded = [m for m in ('megatron', 'sglang', 'transformers') if m in sys.modules]\n"
        "print(seconds < 1.0, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[0] == "True []", done.stdout + done.stderr
