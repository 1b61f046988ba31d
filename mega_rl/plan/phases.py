"""Device memory of one rank in every phase of a step, what hosts hold, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.config.attention import Role
from mega_rl.plan.generation import embedded, server_of
from mega_rl.plan.passes import PassBytes, forward_pass, training_pass
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.state.ranks import state_of
from mega_rl.plan.state.sizes import StateBytes

# CUDA's context, NCCL's channels and cuBLAS' workspaces, outside torch's allocator.
CONTEXT = 2 * 10**9
# Memory that torch's allocator holds in pieces too small for the next tensor, as a share of what is in use.
FRAGMENTATION = 0.05


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
    """Memory of one rank: of the first rank of a pipeline stage, whose others differ by padding alone."""

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
    pp = setup.layout.pp
    return [_memory_of(setup, pp_rank) for pp_rank in (sorted({0, pp - 1}) if ends else range(pp))]


def _memory_of(setup: RunSetup, pp_rank: int) -> RankMemory:
    rank = pp_rank * setup.layout.stage_size
    states = {role: state_of(setup, model, rank) for role, model in setup.models.items()}
    phases = [*_generation_phases(setup, states), *_trainer_phases(setup, states, pp_rank)]
    return RankMemory(rank, pp_rank, states, tuple(phases))


def _trainer_phases(setup: RunSetup, states: Mapping[Role, StateBytes], pp_rank: int) -> list[MemoryPhase]:
    """Return the phases in which the trainer computes, with the state of all its models on the device."""
    resident = _resident(setup, states)
    phases = []
    passes = {role: forward_pass(setup, model, pp_rank) for role, model in setup.models.items()}
    role, widest = max(passes.items(), key=lambda entry: entry[1].total)
    phases.append(MemoryPhase("computing log-probs and values", resident | _entries(widest)))
    for role, model in setup.models.items():
        if model.trainable:
            training = _entries(training_pass(setup, model, pp_rank))
            step = {"gradients of main weights": states[role].step}
            phases.append(MemoryPhase(f"training the {role}", resident | training))
            phases.append(MemoryPhase(f"the optimizer step of the {role}", resident | step))
    return phases


def _generation_phases(setup: RunSetup, states: Mapping[Role, StateBytes]) -> list[MemoryPhase]:
    """Return the phases in which weights are sent and responses are generated."""
    resident, export = _resident(setup, states), {"export buckets": _export_buckets(setup)}
    if setup.config.rollout.backend == "hf":
        engine = embedded(setup)
        return [
            MemoryPhase("sending weights", resident | export),
            MemoryPhase("generating", resident | {"KV cache and logits": engine.cache}),
        ]
    if not setup.colocated:
        return [MemoryPhase("sending weights", resident | export)]
    server, policy = server_of(setup), states["actor"].weights
    weights = {"servers' weights": server.weights, "servers' residue": server.residue}
    return [
        MemoryPhase("sending weights", {"policy's weights": policy} | export | weights),
        MemoryPhase("generating", {**weights, "KV cache": server.cache}),
        MemoryPhase("saving a checkpoint", resident | {"servers' weights": server.weights}),
    ]


def _resident(setup: RunSetup, states: Mapping[Role, StateBytes]) -> dict[str, int]:
    """Return what the trainer's models hold, and what generation leaves beside them."""
    entries = {
        "weights": sum(state.weights for state in states.values()),
        "gradients": sum(state.gradients for state in states.values()),
        "optimizer": sum(state.optimizer for state in states.values()),
    }
    if setup.config.rollout.backend == "hf":
        entries["rollout model"] = embedded(setup).weights
    elif setup.colocated:
        entries["servers' residue"] = server_of(setup).residue
    return entries


def _entries(peak: PassBytes) -> dict[str, int]:
    return {"activations": peak.activations, "logits": peak.logits, "working memory": peak.working}


def _export_buckets(setup: RunSetup) -> int:
    """Return the bytes of the buffers that weights are gathered into: a bucket of every member, and the result."""
    layout = setup.layout
    members = max(layout.tp, layout.ep * layout.etp, 1)
    return (setup.config.rollout.bucket_mib << 20) * (members + 1 if members > 1 else 1)


def host_bytes(setup: RunSetup, memory: list[RankMemory]) -> dict[str, int]:
    """Return the bytes of host memory on the fullest host, by use."""
    ranks = setup.machine.ranks_per_node
    entries = {"optimizer state": max(sum(s.host for s in each.states.values()) for each in memory) * ranks}
    if setup.colocated:
        device = max(sum(state.device for state in each.states.values()) for each in memory)
        entries["trainer while servers generate"] = device * ranks
    if setup.config.checkpoint.async_save:
        entries["checkpoint on its way to disk"] = max(_saved(setup, each.states) for each in memory) * ranks
    return {name: size for name, size in entries.items() if size}


def _saved(setup: RunSetup, states: Mapping[Role, StateBytes]) -> int:
    """Return the bytes of a checkpoint that one rank writes: its optimizer state and its share of the weights."""
    shares = setup.layout.dp * setup.layout.cp if setup.spec != "hf" else 1
    trained = {role for role, model in setup.models.items() if model.trainable}
    return sum(s.optimizer + s.host + s.weights // shares for role, s in states.items() if role in trained)
