"""State on the devices in each stage of a step: models by role, and colocated servers.

    stage                            servers on these devices   models (all at once; one of those that take turns)
    generate, baseline, validate     weights, KV cache          none; the policy's parameters for servers elsewhere
    reward, by a model               weights                    parameters of the reward model
    old_logprobs, ref_logprobs,      none                       everything; parameters of the model at work
    values
    update_critic, update_actor      none                       everything; everything of the model at work
    publish                          weights, then KV cache     parameters of the policy
    save, export                     the weights they have      everything; each model while it is written

Other stages move nothing, and without shared devices and turns no stage does. From one stage to the next only the
difference moves: the side that releases memory goes first, and all ranks have released before a server resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from mega_rl.config.needs import Role
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.boxes import EngineState
from mega_rl.protocols import PARTS, Engine, Ranks, WeightSync
from mega_rl.rollout.sglang.server.memory import TAGS, ServersMemory
from mega_rl.types import Metrics

EVERYTHING = frozenset(PARTS)
STATE = frozenset(("parameters", "optimizer"))  # parts that checkpoints keep
PARAMETERS = frozenset(("parameters",))
NOTHING: frozenset[str] = frozenset()

AnyEngine = TypeVar("AnyEngine", bound=Engine)


@dataclass
class ResidentModels:
    """The models of a run by role, and their parts on the device.

    one_at_a_time: the model at work has the device to itself; the state of all others is on the host.
    """

    accelerator: Accelerator
    one_at_a_time: bool = False
    engines: dict[Role, Engine] = field(default_factory=dict)
    _largest: int = field(default=0, init=False)

    def add(self, role: Role, engine: AnyEngine) -> AnyEngine:
        """Add a new model and return it; where models take turns, it leaves the device."""
        self.engines[role] = engine
        if self.one_at_a_time:
            self.hold({})
        return engine

    def hold(self, wanted: Mapping[Role, frozenset[str]]) -> int:
        """Move other parts off the device, then bring these; return the bytes that left; collective."""
        here = {role: frozenset(p for p in PARTS if not e.is_offloaded(p)) for role, e in self.engines.items()}
        leaving = {role: parts - wanted.get(role, NOTHING) for role, parts in here.items()}
        coming = {role: parts - here[role] for role, parts in wanted.items()}
        offloaded = sum(self.engines[role].offload(parts) for role, parts in leaving.items() if parts)
        if any(leaving.values()):
            self.accelerator.synchronize()
            self.accelerator.empty_cache()
        for role, parts in coming.items():
            if parts:
                self.engines[role].onload(parts)
        self._largest = max(self._largest, self.accelerator.memory_allocated())
        return offloaded

    def take_turn(self, role: Role, parts: frozenset[str]) -> None:
        """Leave the device to these parts of one model, where models take turns; collective."""
        if self.one_at_a_time:
            self.hold({role: parts})

    def stored(self, role: Role) -> Engine | StateInTurn:
        """Return the model of a role for those who save and restore it."""
        engine = self.engines[role]
        return StateInTurn(engine, role, self) if self.one_at_a_time else engine

    def take_largest(self) -> int:
        """Return the most bytes that were on the device after a move since the last call."""
        largest, self._largest = self._largest, 0
        return largest


@dataclass(frozen=True)
class StateInTurn:
    """`protocols.StatefulModel` of a model that takes turns: it is on the device only for its state."""

    engine: Engine
    role: Role
    models: ResidentModels

    def state(self) -> EngineState:
        """Return pieces as views of host copies, so several models' pieces can exist at once."""
        self.models.take_turn(self.role, STATE)
        state = self.engine.state()
        self.models.take_turn(self.role, NOTHING)
        return self.engine.on_host(state)

    def resume_from(self, numbers: Mapping[str, int | float]) -> None:
        self.models.take_turn(self.role, STATE)
        self.engine.resume_from(numbers)


class MemoryLayout(NamedTuple):
    """Memory on devices that servers share."""

    name: str  # in metrics: memory/<name>_bytes
    servers: tuple[str, ...]  # tags, as in TAGS
    models: Mapping[Role, frozenset[str]]  # parts on the device; roles that are not named have `others`
    others: frozenset[str] = NOTHING


START = MemoryLayout("start", (), {}, EVERYTHING)  # servers have released everything before the models are built
TRAINING = MemoryLayout("training", (), {}, EVERYTHING)
SENDING = MemoryLayout("sending", ("weights",), {"actor": PARAMETERS})
PROVING = MemoryLayout("proving", TAGS, {"actor": PARAMETERS})
GENERATING = MemoryLayout("generating", TAGS, {})
SCORING = MemoryLayout("scoring", ("weights",), {"reward": PARAMETERS})
SAVING = MemoryLayout("saving", ("weights",), {}, EVERYTHING)
SHARED: Mapping[str, MemoryLayout] = {
    **dict.fromkeys(("generate", "baseline", "validate"), GENERATING),
    "reward": SCORING,
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "update_critic", "update_actor"), TRAINING),
    **dict.fromkeys(("save", "export"), SAVING),
}
TURNS: Mapping[str, tuple[Role, frozenset[str]]] = {
    "reward": ("reward", PARAMETERS),
    "old_logprobs": ("actor", PARAMETERS),
    "ref_logprobs": ("reference", PARAMETERS),
    "values": ("critic", PARAMETERS),
    "update_critic": ("critic", EVERYTHING),
    "update_actor": ("actor", EVERYTHING),
    "export": ("actor", PARAMETERS),
}


@dataclass
class Residency:
    """Devices of a run with models that take turns, servers that share the devices, or both."""

    models: ResidentModels
    everyone: Ranks
    servers: ServersMemory | None = None  # those that share the devices
    # Parts of a policy that takes turns which stay: servers elsewhere are sent parameters when they start anew.
    while_generating: frozenset[str] = NOTHING
    end_round: Callable[[], None] = lambda: None  # ends a generation between two stages; collective
    layout: MemoryLayout = field(default=START, init=False)
    _bytes: Metrics = field(default_factory=dict, init=False)

    def enter(self, stage: str) -> None:
        """Bring what a stage needs, after the state that it does not need has left; collective."""
        if stage == "reward" and "reward" not in self.models.engines:
            return
        if self.servers is not None and stage in SHARED:
            self._share(SHARED[stage])
        if SHARED.get(stage) is GENERATING:
            self.models.take_turn("actor", self.while_generating)
        elif stage in TURNS and TURNS[stage][0] in self.models.engines:
            self.models.take_turn(*TURNS[stage])

    def publish(self, sync: WeightSync) -> Metrics:
        """Send the weights and leave shared devices to the servers; returns the metrics of both; collective.

        Servers lose their weights with the memory, and an update needs both copies of the policy at once: only then do
        they coexist, without gradients, optimizer state, other models and KV cache.
        """
        if self.servers is None:
            self.models.take_turn("actor", PARAMETERS)
            return sync.publish()
        before = self.models.accelerator.memory_allocated()
        offloaded = self._share(SENDING)
        metrics = sync.publish()
        offloaded += self._share(GENERATING)
        self._bytes["memory/offloaded_bytes"] = float(offloaded)
        self._bytes["memory/given_back_bytes"] = float(before - self._bytes["memory/generating_bytes"])
        names, values = list(self._bytes), list(self._bytes.values())
        self._bytes = {}
        largest = self.everyone.max(torch.tensor(values, dtype=torch.float64)).tolist()
        return metrics | dict(zip(names, largest, strict=True))

    def after_send(self, servers: Sequence[int]) -> None:
        """Resume the KV cache after sending weights, before a server proves them; collective."""
        if self.layout is SENDING:
            self._share(PROVING)

    def restore(self) -> None:
        """Bring the trainer's state back from shared devices; models that take turns stay on the host."""
        if self.servers is None:
            return
        if not self.models.one_at_a_time:
            self.models.hold(self._residents(TRAINING))
        self.layout = MemoryLayout("failed", self.layout.servers, {}, EVERYTHING)

    def _share(self, layout: MemoryLayout) -> int:
        """Release and resume until shared devices are as `layout` says; returns the offloaded bytes; collective."""
        now, models = self.layout, self.models
        if layout in (SAVING, SCORING):  # weights that the servers have lost come with the next publish
            layout = layout._replace(servers=tuple(tag for tag in layout.servers if tag in now.servers))
        if layout == now or (layout is SENDING and now is PROVING):
            return 0
        if layout is GENERATING and "weights" not in now.servers:
            raise RuntimeError(f"generation while {now.name}: the servers have no weights before a publish()")
        if now is TRAINING and models.one_at_a_time:
            self._bytes["memory/training_bytes"] = float(models.take_largest())
        assert self.servers is not None
        if released := [tag for tag in reversed(TAGS) if tag in set(now.servers) - set(layout.servers)]:
            self.end_round()
            self.everyone.sum(torch.zeros(1))  # once every rank has come this far
            self.servers.release(released)
        offloaded = models.hold(self._residents(layout))
        models.accelerator.empty_cache()  # frees buckets of weights that were sent
        models.take_largest()
        self._bytes[f"memory/{layout.name}_bytes"] = float(models.accelerator.memory_allocated())
        if resumed := [tag for tag in TAGS if tag in set(layout.servers) - set(now.servers)]:
            self.everyone.sum(torch.zeros(1))  # once every rank has released
            self.servers.resume(resumed)
        self.layout = layout
        return offloaded

    def _residents(self, layout: MemoryLayout) -> dict[Role, frozenset[str]]:
        if self.models.one_at_a_time and layout.others:
            return {}
        return {role: layout.models.get(role, layout.others) for role in self.models.engines}
