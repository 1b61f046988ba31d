"""Models in turn on a device that holds one of them: a run of the real loop, and the sums of every part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mega_rl.algorithms.advantages.returns import GAE
from mega_rl.algorithms.kl import FixedKL, RewardKL, k1
from mega_rl.config.attention import Role
from mega_rl.trainer import RunSettings
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits
from mega_rl.trainer.old_logprobs import RecomputedLogprobs
from mega_rl.types import Draws, Experience, Metrics, Prompt, Rewards, Rollout, TokenOutputs
from mega_rl.workers.models import LearningWorker, ReferenceWorker
from mega_rl.workers.turns import NOTHING, PARAMETERS, EngineInTurn, ResidentModels, RolloutsInTurn
from tests.helpers.device_budget import BudgetAccelerator, BudgetEngine, DeviceMemory, OvercommitError
from tests.helpers.fakes import FakeCritic, FakePolicy, FakeRanks
from tests.unit_tests.trainer.test_loop import make_trainer

TRAINED = {"parameters": 2, "gradients": 4, "optimizer": 12}
FROZEN = {"parameters": 3}
ROLES: dict[Role, dict[str, int]] = {"actor": TRAINED, "critic": TRAINED, "reference": FROZEN, "reward": FROZEN}
ONE_MODEL = sum(TRAINED.values())

LOSS = cast(Any, SimpleNamespace(needs_entropy=False))


class WorkingEngine(BudgetEngine):
    """A model with a budget that computes what a fake role does."""

    role: Any = None

    def forward(self, batch: Rollout | Experience) -> TokenOutputs:
        super().forward(batch)
        return self.role.evaluate(batch) if self.role else TokenOutputs(logprobs=torch.zeros(batch.tokens.shape))

    def train_minibatch(
        self, minibatch: Experience, loss: Any, *, lr: float, inspect: Any = None, lesson: Any = None
    ) -> Metrics:
        super().train_minibatch(minibatch, loss, lr=lr, inspect=inspect)
        return self.role.update(minibatch, step=0, inspect=inspect)


class Run:
    """Three steps of PPO with every role, on one device of `memory` units."""

    def __init__(self, memory: int, *, one_at_a_time: bool, while_generating: frozenset[str] = NOTHING) -> None:
        self.device = DeviceMemory(memory)
        self.seen: list[tuple[str, dict[str, int]]] = []
        self.policy = FakePolicy([])
        self.models = ResidentModels(BudgetAccelerator([self.device]), one_at_a_time=one_at_a_time)
        for role, sizes in ROLES.items():
            engine = WorkingEngine(role, [self.device], **sizes)
            engine.seen = self.seen
            engine.role = {"actor": self.policy, "critic": FakeCritic([])}.get(role)
            self.models.add(role, cast(Any, engine))
        actor, critic = (
            LearningWorker(name, cast(Any, self.models.in_turn(name)), LOSS, learning_rate=lambda _: 1.0)
            for name in cast(Sequence[Role], ("actor", "critic"))
        )
        rollouts: Any = RolloutsInTurn(cast(Any, self), cast(Any, self), self.models, while_generating)
        guard = MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks())
        self.trainer = make_trainer(
            settings=RunSettings(steps=3, save_interval=2), rollout=rollouts, sync=rollouts, reward=self, actor=actor,
            critic=critic, reference=ReferenceWorker(cast(Any, self.models.in_turn("reference"))), checkpoints=self,
            old_logprobs=RecomputedLogprobs(actor, guard), kl=FixedKL(0.1),
            estimator=GAE(), reward_kl=RewardKL(FixedKL(0.1), k1),
        )  # fmt: skip

    def note(self, event: str) -> None:
        self.seen.append((event, {owner: size for owner, size in self.device.held.items() if size}))

    # Rollouts, weight sync, rewards and checkpoints of the run

    @property
    def weight_version(self) -> int:
        return self.policy.weight_version

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        self.note("generates")
        return self.policy.generate(prompts, step=step, greedy=greedy, draws=draws)

    def metrics(self) -> Metrics:
        return {}

    def publish(self) -> Metrics:
        self.note("publishes")
        return self.policy.publish()

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        self.models.in_turn("reward").forward(rollout)
        return Rewards((rollout.tokens[:, 2:] == 5).float().mean(dim=1))

    def save(self, step: int, state: Any, *, metrics: Any = None) -> None:
        for name in cast(Sequence[Role], ("actor", "critic")):
            self.models.in_turn(name).state()

    def poll(self) -> Metrics:
        return {}

    def finish(self) -> None: ...


@pytest.mark.parametrize("policy", [NOTHING, PARAMETERS])
def test_a_device_for_one_model_holds_a_run_of_four(policy: frozenset[str]) -> None:
    """No two models at once, and of the one at work what its work needs."""
    run = Run(ONE_MODEL, one_at_a_time=True, while_generating=policy)
    assert run.device.held == {}
    run.trainer.fit()
    parts = {"evaluates": ["parameters"], "trains": list(TRAINED), "lists": ["parameters", "optimizer"]}
    for event, held in run.seen:
        role, does = event.split()[0], event.split()[1] if " " in event else ""
        if event == "generates":
            assert set(held) == {f"actor {part}" for part in policy}
        elif event == "publishes":
            assert held == {"actor parameters": 2}
        else:
            assert held == {f"{role} {part}": ROLES[cast(Role, role)][part] for part in parts[does]}, event
    events = [event for event, _ in run.seen]
    step = ["generates", "reward evaluates", "actor evaluates", "reference evaluates", "critic evaluates"]
    step += [*["critic trains"] * 2, *["actor trains"] * 2, "publishes"]
    saved = ["actor lists its state", "critic lists its state"]
    assert events == ["publishes", *step, *step, *saved, *step]
    assert run.device.largest == ONE_MODEL


def test_without_turns_the_same_run_needs_the_sum() -> None:
    total = sum(sum(sizes.values()) for sizes in ROLES.values())
    run = Run(total, one_at_a_time=False)
    run.trainer.fit()
    assert run.device.used == total
    with pytest.raises(OvercommitError):
        Run(total - 1, one_at_a_time=False)


def test_turns_change_no_number() -> None:
    weights = []
    for one_at_a_time in (False, True):
        run = Run(100, one_at_a_time=one_at_a_time)
        run.trainer.fit()
        weights.append(run.policy.logits)
    assert torch.equal(*weights)
    assert weights[0].abs().sum() > 0


def test_a_state_is_listed_on_the_device_and_saved_from_the_host() -> None:
    run = Run(ONE_MODEL, one_at_a_time=True)
    model = run.models.in_turn("critic")
    assert isinstance(model, EngineInTurn)
    model.state()
    assert run.device.held == {}
    assert run.models.in_turn("critic").engine is run.models.engines["critic"]  # type: ignore[union-attr]
    assert Run(100, one_at_a_time=False).models.in_turn("critic").__class__ is WorkingEngine


def test_a_turn_that_lasts_moves_nothing() -> None:
    """Mini-batches of one role follow each other: only the first finds the model away."""
    run = Run(ONE_MODEL, one_at_a_time=True)
    assert run.models.hold({"critic": frozenset(TRAINED)}) == 0
    assert run.models.hold({"critic": frozenset(TRAINED)}) == 0
    assert run.models.hold({"critic": PARAMETERS}) == TRAINED["gradients"] + TRAINED["optimizer"]
    assert run.models.hold({"actor": PARAMETERS}) == TRAINED["parameters"]
    assert run.models.take_largest() == ONE_MODEL
    assert run.models.take_largest() == 0
