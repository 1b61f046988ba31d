"""Trainer and rollout servers on the same devices: each has the memory when it is its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mega_rl.accelerator import Accelerator
from mega_rl.protocols import CheckpointStore, Engine, Ranks, RolloutSource, ServerMemory, WeightSync
from mega_rl.types import Metrics, Prompt, Rollout

EVERYTHING = frozenset(("parameters", "gradients", "optimizer"))
PARAMETERS = frozenset(("parameters",))
NOTHING: frozenset[str] = frozenset()
TAGS = ("weights", "kv_cache")  # of the servers' memory, in the order in which it is taken


@dataclass(frozen=True)
class Stage:
    """Who has what on the devices."""

    name: str
    servers: tuple[str, ...]  # tags, as in TAGS
    policy: frozenset[str]  # parts of the engine whose weights the servers have
    others: frozenset[str]  # parts of each other engine


TRAINING = Stage("training", (), EVERYTHING, EVERYTHING)
SENDING = Stage("sending", ("weights",), PARAMETERS, NOTHING)
PROVING = Stage("proving", TAGS, PARAMETERS, NOTHING)
GENERATING = Stage("generating", TAGS, NOTHING, NOTHING)
SAVING = Stage("saving", ("weights",), EVERYTHING, EVERYTHING)


@dataclass
class ColocatedRollouts:
    """Rollout source, weight sync and checkpoint store of a run that shares its devices with the rollout servers.

    The order of a step, with the memory that each stage has:

        training    the trainer's everything; the servers hold none of their memory
        sending     the policy's parameters, and memory for the servers' weights
        (proving)   the KV cache as well, where the sync compares what both say of a prompt
        generating  weights and KV cache of the servers; the trainer's engines are on the host

    Publishing is the turn from training to generating. The servers' weights are lost when they give the memory back,
    so every turn of theirs must begin with an update, and an update needs both copies of the policy at once. There and
    only there they coexist, and at the least: gradients, optimizer state and all other models have gone, the KV cache
    has not come. A publish at the start of a rollout instead would do the same but leave validation, which follows a
    publish, without weights. A rollout for training ends the servers' turn; a greedy one does not, for the training
    rollout follows. A checkpoint falls between publish and rollout: the KV cache makes room for it, while the servers'
    weights stay, as nobody would send them again.

    Whoever gives memory back goes first, and all ranks have done so before a server takes any. Whatever is raised, the
    trainer's state comes back before it goes further.
    """

    source: RolloutSource
    sync: WeightSync
    checkpoints: CheckpointStore
    policy: Engine
    others: Sequence[Engine]  # critic, reference and reward model
    servers: ServerMemory
    accelerator: Accelerator
    everyone: Ranks
    # Servers have all their memory when they have started.
    _stage: Stage = field(default=Stage("start", TAGS, EVERYTHING, EVERYTHING), init=False)
    _metrics: Metrics = field(default_factory=dict, init=False)

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False) -> Rollout:
        """The source's; after it, unless greedy, the trainer has its memory back.

        Raises:
            RuntimeError: nothing was published since the last rollout, so the servers have no weights.
        """
        if self._stage is not GENERATING:
            raise RuntimeError(f"generate() while {self._stage.name}: the servers have no weights before a publish()")
        with self._trainer_comes_back():
            rollout = self.source.generate(prompts, step=step, greedy=greedy)
            if not greedy:
                self._go_to(TRAINING)
        return rollout

    def metrics(self) -> Metrics:
        return self.source.metrics()

    @property
    def weight_version(self) -> int:
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights and leave the devices to the servers.

        Adds to the sync's metrics, largest over the ranks: `memory/<stage>_bytes`, the trainer's bytes on the device
        in each stage since the last publish (the resident set on a CPU); `memory/offloaded_bytes`, the size of what
        was moved to the host; `memory/given_back_bytes`, how much less the trainer held after than before.
        """
        before = self.accelerator.memory_allocated()
        offloaded = 0
        with self._trainer_comes_back():
            offloaded += self._go_to(SENDING)
            metrics = self.sync.publish()
            offloaded += self._go_to(GENERATING)
        self._metrics["memory/offloaded_bytes"] = float(offloaded)
        self._metrics["memory/given_back_bytes"] = float(before - self._metrics["memory/generating_bytes"])
        return metrics | self._take_metrics()

    def make_room_for_proof(self) -> None:
        """For the sync, when the weights of a publish have arrived and before a server generates; collective.

        The KV cache comes while the policy's parameters are still here. An update at another time, as of a server that
        was lost while it generated, finds the cache in place.
        """
        if self._stage is SENDING:
            self._go_to(PROVING)

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Metrics | None = None) -> None:
        """The store's, with everything that it saves on the device."""
        with self.on_device():
            self.checkpoints.save(step, state, metrics=metrics)

    def poll(self) -> Metrics:
        return self.checkpoints.poll()

    def finish(self) -> None:
        self.checkpoints.finish()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The trainer's state is on the device inside, as at a checkpoint; collective."""
        if self._stage is not GENERATING:
            yield
            return
        with self._trainer_comes_back():
            self._go_to(SAVING)
            yield
            self._go_to(GENERATING)

    @contextmanager
    def _trainer_comes_back(self) -> Iterator[None]:
        """Leaves no state on the host when the body raises."""
        try:
            yield
        except BaseException:
            for engine in (self.policy, *self.others):
                engine.onload()
            self._stage = Stage("failed", self._stage.servers, EVERYTHING, EVERYTHING)
            raise

    def _go_to(self, stage: Stage) -> int:
        """Give and take until the devices are as in `stage`; returns the bytes that went to the host."""
        now = self._stage
        engines = [(self.policy, now.policy, stage.policy), *((e, now.others, stage.others) for e in self.others)]
        self._ask(self.servers.release, [tag for tag in reversed(TAGS) if tag in set(now.servers) - set(stage.servers)])
        offloaded = sum(engine.offload(**_parts(has - keeps)) for engine, has, keeps in engines if has - keeps)
        self.accelerator.synchronize()
        self.accelerator.empty_cache()
        for engine, has, keeps in engines:
            if keeps - has:
                engine.onload(**_parts(keeps - has))
        self._metrics[f"memory/{stage.name}_bytes"] = float(self.accelerator.memory_allocated())
        self._ask(self.servers.resume, [tag for tag in TAGS if tag in set(stage.servers) - set(now.servers)])
        self._stage = stage
        return offloaded

    def _ask(self, servers: Callable[[Sequence[str]], None], tags: list[str]) -> None:
        """Let the servers give or take, once every rank has come this far."""
        if tags:
            self.everyone.sum(torch.zeros(1))
            servers(tags)

    def _take_metrics(self) -> Metrics:
        """The numbers since the last call, largest over the ranks."""
        names, values = list(self._metrics), list(self._metrics.values())
        self._metrics = {}
        return dict(zip(names, self.everyone.max(torch.tensor(values, dtype=torch.float64)).tolist(), strict=True))


def _parts(chosen: frozenset[str]) -> dict[str, bool]:
    return {part: part in chosen for part in sorted(EVERYTHING)}
