"""Device memory of one rank in every phase of a step, what hosts hold, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.config.attention import Role
from mega_rl.plan.generation import embedded, server_of
from mega_rl.plan.passes import PassBytes, forward_pass, training_pass
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.state.lessons import hidden_bytes, lesson_bytes, teaches
from mega_rl.plan.state.ranks import state_of
from mega_rl.plan.state.sizes import StateBytes
from mega_rl.rollout.sglang.weights.reshard import sending_bytes

# CUDA's context, NCCL's channels and cuBLAS' workspaces, outside torch's allocator.
CONTEXT = 2 * 10**9
# Memory that torch's allocator holds in pieces too small for the next tensor, as a share of what is in use.
FRAGMENTATION = 0.05
_PARTS = ("weights", "gradients", "optimizer")
_SAVED = ("weights", "optimizer")


@dataclass(frozen=True)
class MemoryPhase:
    """One part of a step, and what a device holds in it."""

    name: str
    entries: dict[str, int]  # bytes by use

    @property
    def total(self) -> int:
        """Return the sum of the entries."""
        return sum(self.entries.values())

    @property
    def needed(self) -> int:
        """Return the device memory that the phase needs: with the context and what fragmentation costs."""
        return round(self.total * (1 + FRAGMENTATION)) + CONTEXT


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank: of the first rank of a pipeline stage, whose others differ by padding alone.

    Where the reference has stages of its own, of the first rank of each of these, too.
    """

    rank: int
    pp_rank: int
    states: Mapping[Role, StateBytes]  # by role
    phases: tuple[MemoryPhase, ...]

    @property
    def peak(self) -> MemoryPhase:
        """Return the phase that needs most."""
        return max(self.phases, key=lambda phase: phase.needed)


def memory_of_stages(setup: RunSetup, *, ends: bool = False) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline stage; `ends`: of the first and the last alone.

    Those two are the fullest: the first has most micro-batches in flight, the last the logits.
    """
    layouts = {setup.for_model(model).layout for model in setup.models.values()}
    stages = {each: {0, each.pp - 1} if ends else range(each.pp) for each in layouts}
    ranks = {stage * layout.stage_size for layout, numbers in stages.items() for stage in numbers}
    return [_memory_of(setup, rank) for rank in sorted(ranks)]


def _memory_of(setup: RunSetup, rank: int) -> RankMemory:
    states = {role: state_of(setup, model, rank) for role, model in setup.models.items()}
    phases = [*_generation_phases(setup, states), *_trainer_phases(setup, states, rank)]
    return RankMemory(rank, setup.layout.coordinates(rank).pp_rank, states, tuple(phases))


def _trainer_phases(setup: RunSetup, states: Mapping[Role, StateBytes], rank: int) -> list[MemoryPhase]:
    """Return the phases in which the trainer computes."""
    pp_rank = setup.layout.coordinates(rank).pp_rank
    passes = []
    for role, model in setup.models.items():
        its = setup.for_model(model)
        peak = forward_pass(its, model, its.layout.coordinates(rank).pp_rank)
        passes.append(_resident(setup, states, role, ("weights",)) | _entries(peak))
    fullest = max(passes, key=lambda entries: sum(entries.values()))
    phases = [MemoryPhase("computing log-probs and values", fullest)]
    for role, model in setup.models.items():
        if model.trainable:
            resident = _resident(setup, states, role)
            training = _entries(training_pass(setup, model, pp_rank))
            if role == "actor":
                training["teacher's projection"] = lesson_bytes(setup, pp_rank).projection
            step = {"gradients of main weights": states[role].step}
            phases.append(MemoryPhase(f"training the {role}", resident | training))
            phases.append(MemoryPhase(f"the optimizer step of the {role}", resident | step))
    return phases


def _generation_phases(setup: RunSetup, states: Mapping[Role, StateBytes]) -> list[MemoryPhase]:
    """Return the phases in which weights are sent and responses are generated."""
    export = {"export buckets": _export_buckets(setup)}
    sending = _resident(setup, states, "actor", ("weights",)) | export
    if setup.config.rollout.backend == "hf":
        generating = _resident(setup, states, "actor", ()) | {"KV cache and logits": embedded(setup).cache}
        return [MemoryPhase("sending weights", sending), MemoryPhase("generating", generating)]
    if not setup.colocated:
        return [MemoryPhase("sending weights", sending)]
    server, policy = server_of(setup), states["actor"].weights
    weights = {"servers' weights": server.weights, "servers' residue": server.residue}
    saved = [_resident(setup, states, role, _SAVED) for role, model in setup.models.items() if model.trainable]
    fullest = max(saved, key=lambda entries: sum(entries.values()))
    return [
        MemoryPhase("sending weights", {"policy's weights": policy} | export | weights),
        MemoryPhase("generating", {**weights, "KV cache": server.cache}),
        MemoryPhase("saving a checkpoint", fullest | {"servers' weights": server.weights}),
    ]


def _resident(
    setup: RunSetup, states: Mapping[Role, StateBytes], role: Role, parts: tuple[str, ...] = _PARTS
) -> dict[str, int]:
    """Return what models hold while a role works, and what generation leaves beside them.

    That is the state of all models, or where models take turns these parts of the role's own.
    """
    here, parts = ([states[role]], parts) if setup.takes_turns else (list(states.values()), _PARTS)
    entries = {part: sum(getattr(state, part) for state in here) for part in parts}
    if setup.config.rollout.backend == "hf":
        entries["rollout model"] = embedded(setup).weights
    elif setup.colocated:
        entries["servers' residue"] = server_of(setup).residue
    return entries


def _entries(peak: PassBytes) -> dict[str, int]:
    return {"activations": peak.activations, "logits": peak.logits, "working memory": peak.working}


def _export_buckets(setup: RunSetup) -> int:
    """Return the bytes of the buffers for gathered weights: a bucket, or the largest tensor, and its parts.

    And those in which weights travel to servers: `sending_bytes` to colocated ones, else two of the largest bucket.
    """
    hf, layout, bucket = setup.actor.hf, setup.layout, setup.config.rollout.bucket_mib << 20
    largest = hf.vocab_size * hf.hidden_size * setup.rollout_itemsize
    if setup.colocated:
        return sending_bytes(hf, bucket_bytes=bucket, itemsize=setup.rollout_itemsize)
    pieces = (2 if max(layout.tp, layout.ep * layout.etp) > 1 else 1) + 2 * (setup.config.rollout.backend == "sglang")
    return max(bucket, largest) * pieces


def host_bytes(setup: RunSetup, memory: list[RankMemory]) -> dict[str, int]:
    """Return the bytes of host memory on the fullest host, by use."""
    ranks = setup.machine.ranks_per_node
    entries = {"optimizer state": max(sum(s.host for s in each.states.values()) for each in memory) * ranks}
    if setup.colocated or setup.takes_turns:
        # Gradients are zero when they come back, so that nothing of them is kept.
        kept = max(sum(state.weights + state.optimizer for state in each.states.values()) for each in memory)
        entries["models that leave their devices, pinned"] = kept * ranks
    if (hidden := _hidden_on_host(setup)) > 0:
        entries["the teacher's hidden states"] = hidden
    if (projection := lesson_bytes(setup, setup.layout.pp - 1).kept) > 0:
        entries["the teacher's projection"] = projection * min(ranks, setup.layout.stage_size)
    if setup.config.checkpoint.memory.interval:
        # The newest one and the one that is being written, and on several hosts copies of another host's.
        copies = 2 * min(2, -(-setup.layout.world_size // ranks))
        entries["checkpoints in memory"] = copies * max(_saved(setup, each.states) for each in memory) * ranks
    if setup.config.checkpoint.async_save:
        entries["checkpoint on its way to disk"] = max(_saved(setup, each.states) for each in memory) * ranks
    return {name: size for name, size in entries.items() if size}


def _hidden_on_host(setup: RunSetup) -> int:
    """Return the bytes of a mini-batch's hidden states on the fullest host, of all ranks of last stages there.

    A teacher on a layout of its own has them as it cuts the rows, beside those that the student has received.
    """
    if not teaches(setup):
        return 0
    cuts = {setup.layout: setup}
    cuts |= {each.layout: each for each in (setup.for_model(setup.models["reference"]),)}
    ranks = setup.machine.ranks_per_node
    return sum(
        hidden_bytes(each, setup.models["reference"]) * min(ranks, layout.stage_size) for layout, each in cuts.items()
    )


def _saved(setup: RunSetup, states: Mapping[Role, StateBytes]) -> int:
    """Return the bytes of a checkpoint that one rank writes: its optimizer state and its share of the weights."""
    shares = setup.layout.dp * setup.layout.cp if setup.spec != "hf" else 1
    trained = {role for role, model in setup.models.items() if model.trainable}
    return sum(s.optimizer + s.host + s.weights // shares for role, s in states.items() if role in trained)
