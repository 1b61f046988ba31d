"""Trainer and rollout servers on the same devices: stages of a step, and the device memory that each stage has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mega_rl.config.attention import Role
from mega_rl.protocols import CheckpointStore, Ranks, RolloutSource, WeightSync
from mega_rl.types import Draws, JsonObject, Metrics, Prompt, Rollout
from mega_rl.workers.rollout import WrappedRollouts
from mega_rl.workers.turns import EVERYTHING, NOTHING, PARAMETERS, ResidentModels

TAGS = ("weights", "kv_cache")  # of the servers' memory, in the order in which it is taken


class ServerMemory(Protocol):
    """The device memory of the servers that share the trainer's devices, in tags: "weights" and "kv_cache".

    Collective over all ranks: when a call returns on any rank, every server has done it. Servers are idle when it is
    called. A restarted server holds all of its memory; the implementation settles such differences.
    """

    def release(self, tags: Sequence[str]) -> None:
        """Release this memory; the weights in it are lost."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Resume this memory; its content is undefined."""
        ...


@dataclass(frozen=True)
class Stage:
    """Memory on the devices in one part of a step."""

    name: str
    servers: tuple[str, ...]  # tags, as in TAGS
    policy: frozenset[str]  # parts of the model whose weights the servers have
    others: frozenset[str]  # parts of each other model


TRAINING = Stage("training", (), EVERYTHING, EVERYTHING)
SENDING = Stage("sending", ("weights",), PARAMETERS, NOTHING)
PROVING = Stage("proving", TAGS, PARAMETERS, NOTHING)
GENERATING = Stage("generating", TAGS, NOTHING, NOTHING)
SAVING = Stage("saving", ("weights",), EVERYTHING, EVERYTHING)


@dataclass
class SharedDevices:
    """The stage that the devices of trainer and servers are in.

    From one stage to the next the side that releases memory goes first, and all ranks have done so before a server
    resumes any. When the body of `restoring_the_trainer` raises, the trainer's state is onloaded before the error goes
    further. Where models take turns no stage has all of them: in training, and while a checkpoint is saved, each comes
    for its own work.
    """

    models: ResidentModels
    servers: ServerMemory
    everyone: Ranks
    # Servers start before the trainer's models are built, and have released everything then.
    stage: Stage = field(default=Stage("start", (), EVERYTHING, EVERYTHING), init=False)
    _bytes: Metrics = field(default_factory=dict, init=False)

    def go_to(self, stage: Stage) -> int:
        """Release and resume until the devices are as in `stage`; returns the offloaded bytes; collective."""
        now = self.stage
        if now is TRAINING and self.models.one_at_a_time:
            self._bytes["memory/training_bytes"] = float(self.models.take_largest())
        self._ask(self.servers.release, [tag for tag in reversed(TAGS) if tag in set(now.servers) - set(stage.servers)])
        offloaded = self.models.hold(self._residents(stage))
        self.models.accelerator.empty_cache()  # frees buckets of weights that were sent
        self.models.take_largest()
        self._bytes[f"memory/{stage.name}_bytes"] = float(self.models.accelerator.memory_allocated())
        self._ask(self.servers.resume, [tag for tag in TAGS if tag in set(stage.servers) - set(now.servers)])
        self.stage = stage
        return offloaded

    @contextmanager
    def restoring_the_trainer(self) -> Iterator[None]:
        """Onload the trainer's whole state when the body raises; models that take turns stay on the host."""
        try:
            yield
        except BaseException:
            if not self.models.one_at_a_time:
                self.models.hold(self._residents(TRAINING))
            self.stage = Stage("failed", self.stage.servers, EVERYTHING, EVERYTHING)
            raise

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the trainer's state on the device inside, or room for one model in turn; collective."""
        if self.stage is not GENERATING:
            yield
            return
        with self.restoring_the_trainer():
            self.go_to(SAVING)
            yield
            self.go_to(GENERATING)

    def after_send(self, servers: Sequence[int]) -> None:
        """Resume the KV cache when a publish has sent the weights and before a server generates to prove them.

        The policy's parameters are still on the device. An update at another time, as of a server that was lost while
        it generated, finds the cache resumed. Collective.
        """
        if self.stage is SENDING:
            self.go_to(PROVING)

    def take_bytes(self, *, held_before: int, offloaded: int) -> Metrics:
        """Return the `memory/` metrics since the last call, largest over the ranks; collective.

        held_before: bytes on the device before the last stages; offloaded: bytes that these moved to the host.
        """
        self._bytes["memory/offloaded_bytes"] = float(offloaded)
        self._bytes["memory/given_back_bytes"] = float(held_before - self._bytes["memory/generating_bytes"])
        names, values = list(self._bytes), list(self._bytes.values())
        self._bytes = {}
        return dict(zip(names, self.everyone.max(torch.tensor(values, dtype=torch.float64)).tolist(), strict=True))

    def _residents(self, stage: Stage) -> dict[Role, frozenset[str]]:
        """Return the parts of each model that a stage begins with."""
        if self.models.one_at_a_time and stage.others:
            return {}
        return {role: stage.policy if role == "actor" else stage.others for role in self.models.engines}

    def _ask(self, servers: Callable[[Sequence[str]], None], tags: list[str]) -> None:
        """Let the servers release or resume, once every rank has come this far."""
        if tags:
            self.everyone.sum(torch.zeros(1))
            servers(tags)


@dataclass(frozen=True)
class ColocatedRollouts(WrappedRollouts):
    """Rollout source and weight sync of a run that shares its devices with the rollout servers.

    The order of a step, with the memory that each stage has:

        training    the trainer's everything, or the models' in turn; the servers hold none of their memory
        sending     the policy's parameters, and memory for the servers' weights
        (proving)   the KV cache as well, where the sync compares log-probs of trainer and servers
        generating  weights and KV cache of the servers; the trainer's engines are on the host

    A publish leads from training to generating. The servers lose their weights when they release the memory, so each
    time they resume it an update must come first, and an update needs both copies of the policy at once. There and only
    there they coexist, and at the least: gradients, optimizer state and all other models have gone, the KV cache has
    not come. A publish at the start of a rollout instead would do the same but leave validation, which follows a
    publish, without weights. A rollout for training leads back to training; a greedy one does not, for the training
    rollout follows.
    """

    source: RolloutSource
    sync: WeightSync
    devices: SharedDevices

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the source's rows; then, unless they are not trained on, go back to training.

        Raises:
            RuntimeError: nothing was published since the last rollout, so the servers have no weights.
        """
        stage = self.devices.stage
        if stage is not GENERATING:
            raise RuntimeError(f"generate() while {stage.name}: the servers have no weights before a publish()")
        with self.devices.restoring_the_trainer():
            rollout = self.source.generate(prompts, step=step, greedy=greedy, draws=draws)
            if not greedy and draws is None:
                self.devices.go_to(TRAINING)
        return rollout

    def publish(self) -> Metrics:
        """Send the weights and leave the devices to the servers.

        Adds to the sync's metrics, largest over the ranks: `memory/<stage>_bytes`, the trainer's bytes on the device
        in each stage since the last publish (the resident set on a CPU); `memory/offloaded_bytes`, the size of what
        was moved to the host; `memory/given_back_bytes`, how much less the trainer held after than before.
        """
        before = self.devices.models.accelerator.memory_allocated()
        with self.devices.restoring_the_trainer():
            offloaded = self.devices.go_to(SENDING)
            metrics = self.sync.publish()
            offloaded += self.devices.go_to(GENERATING)
        return metrics | self.devices.take_bytes(held_before=before, offloaded=offloaded)


@dataclass(frozen=True)
class ColocatedCheckpoints:
    """Checkpoint store of such a run: it saves with the trainer's state on the device.

    A checkpoint falls between publish and rollout: the servers release the KV cache for it and keep their weights, as
    no publish would send them again.
    """

    store: CheckpointStore
    devices: SharedDevices

    def save(self, step: int, state: JsonObject, *, metrics: Metrics | None = None) -> None:
        with self.devices.on_device():
            self.store.save(step, state, metrics=metrics)

    def save_in_memory(self, step: int, state: JsonObject) -> None:
        with self.devices.on_device():
            self.store.save_in_memory(step, state)

    def poll(self) -> Metrics:
        return self.store.poll()

    def finish(self) -> None:
        self.store.finish()
