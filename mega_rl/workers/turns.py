"""Models that take turns on the device: which parts of whose state are there while a role works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mega_rl.accelerator import Accelerator
from mega_rl.config.attention import Role
from mega_rl.protocols import Engine, Inspect, RolloutSource, Scorer, TokenLoss, WeightSync
from mega_rl.types import Draws, EngineState, Experience, Lesson, Metrics, Prompt, Rewards, Rollout, TokenOutputs
from mega_rl.workers.rollout import WrappedRollouts

PARTS = ("parameters", "gradients", "optimizer")
EVERYTHING = frozenset(PARTS)
STATE = frozenset(("parameters", "optimizer"))  # that checkpoints keep
PARAMETERS = frozenset(("parameters",))
NOTHING: frozenset[str] = frozenset()

AnyEngine = TypeVar("AnyEngine", bound=Engine)


@dataclass
class ResidentModels:
    """The models of a run by role, and the parts of each that are on its device.

    one_at_a_time: a role that works has the device to itself; the state of all others is on the host, and all of it
    between the turns of two roles.
    """

    accelerator: Accelerator
    one_at_a_time: bool = False
    engines: dict[Role, Engine] = field(default_factory=dict)
    _largest: int = field(default=0, init=False)

    def add(self, role: Role, engine: AnyEngine) -> AnyEngine:
        """Add a model that has just been built, and return it; it leaves the device where models take turns."""
        self.engines[role] = engine
        if self.one_at_a_time:
            self.hold({})
        return engine

    def hold(self, wanted: Mapping[Role, frozenset[str]]) -> int:
        """Bring these parts to the device when all others have left it; returns the bytes that left; collective."""
        here = {role: frozenset(p for p in PARTS if not e.is_offloaded(p)) for role, e in self.engines.items()}
        leaving = {role: parts - wanted.get(role, NOTHING) for role, parts in here.items()}
        coming = {role: parts - here[role] for role, parts in wanted.items()}
        offloaded = sum(self.engines[role].offload(**_named(parts)) for role, parts in leaving.items() if parts)
        if any(leaving.values()):
            self.accelerator.synchronize()
            self.accelerator.empty_cache()
        for role, parts in coming.items():
            if parts:
                self.engines[role].onload(**_named(parts))
        self._largest = max(self._largest, self.accelerator.memory_allocated())
        return offloaded

    def take_turn(self, role: Role, parts: frozenset[str]) -> None:
        """Leave the device to these parts of one model, where models take turns; collective."""
        if self.one_at_a_time:
            self.hold({role: parts})

    def in_turn(self, role: Role) -> Engine | EngineInTurn:
        """Return the model of a role for those who compute with it or save it."""
        engine = self.engines[role]
        return EngineInTurn(engine, role, self) if self.one_at_a_time else engine

    def take_largest(self) -> int:
        """Return the most bytes that were on the device after a move since the last call."""
        largest, self._largest = self._largest, 0
        return largest


@dataclass(frozen=True)
class EngineInTurn:
    """A model that comes to the device for each of its passes, and whose state is saved and restored on the host.

    It stays where it is until another model's turn.
    """

    engine: Engine
    role: Role
    models: ResidentModels

    def forward(self, batch: Rollout | Experience, *, with_entropy: bool = False) -> TokenOutputs:
        self.models.take_turn(self.role, PARAMETERS)
        return self.engine.forward(batch, with_entropy=True) if with_entropy else self.engine.forward(batch)

    def teach(self, minibatch: Experience) -> Lesson:
        """Return the lesson with a copy of the vocabulary projection, which is on the device in the student's turn."""
        self.models.take_turn(self.role, PARAMETERS)
        lesson = self.engine.teach(minibatch)
        return lesson if lesson.weight is None else replace(lesson, weight=lesson.weight.clone())

    def train_minibatch(
        self,
        minibatch: Experience,
        loss: TokenLoss,
        *,
        lr: float,
        inspect: Inspect | None = None,
        lesson: Lesson | None = None,
    ) -> Metrics:
        self.models.take_turn(self.role, EVERYTHING)
        return self.engine.train_minibatch(minibatch, loss, lr=lr, inspect=inspect, lesson=lesson)

    def state(self) -> EngineState:
        """Return the pieces as views of the host's copies, so that those of several models can be there at once."""
        self.models.take_turn(self.role, STATE)
        state = self.engine.state()
        self.models.take_turn(self.role, NOTHING)
        return self.engine.on_host(state)

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.models.take_turn(self.role, STATE)
        self.engine.resume_from(numbers)


@dataclass(frozen=True)
class RolloutsInTurn(WrappedRollouts):
    """Rollout source and weight sync of a run whose models take turns, without servers on the same devices.

    Weights are sent with the policy's parameters alone on the device. While responses are generated it holds
    `policy`: nothing beside the embedded engine's own copy and cache; for servers elsewhere the parameters, which a
    server that is started anew is sent.
    """

    source: RolloutSource
    sync: WeightSync
    models: ResidentModels
    policy: frozenset[str]

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        self.models.take_turn("actor", self.policy)
        return self.source.generate(prompts, step=step, greedy=greedy, draws=draws)

    def publish(self) -> Metrics:
        self.models.take_turn("actor", PARAMETERS)
        return self.sync.publish()


@dataclass(frozen=True)
class ScorerOnDevice:
    """Reward role of a model that needs the device, which servers may have after a validation."""

    scorer: Scorer
    on_device: Callable[[], AbstractContextManager[None]]

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        with self.on_device():
            return self.scorer.score(rollout, prompts)

    def metrics(self) -> Metrics:
        return self.scorer.metrics()


def _named(chosen: frozenset[str]) -> dict[str, bool]:
    return {part: part in chosen for part in PARTS}
