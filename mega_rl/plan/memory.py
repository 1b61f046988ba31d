"""Device memory of one rank in every phase, host memory, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mega_rl.config.choices import LOSS
from mega_rl.config.needs import Role
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import padded_vocab_size
from mega_rl.plan.activations import forward_pass, training_pass
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.state import StateBytes, state_of, weight_bytes
from mega_rl.rollout.sglang.weights.reshard import sending_bytes

# CUDA's context, NCCL's channels and cuBLAS' workspaces, outside torch's allocator.
CONTEXT = 2 * 10**9
# Memory that torch's allocator holds in pieces too small for the next tensor, as a share of the memory in use.
FRAGMENTATION = 0.05
# Memory of a server that no release gives back: CUDA's context, graphs and workspaces (not measured yet; SGLang
# reserves as much when it chooses its share).
SERVER_RESIDUE = 3 * 10**9
_PARTS, _SAVED = ("weights", "gradients", "optimizer"), ("weights", "optimizer")


@dataclass(frozen=True)
class MemoryPhase:
    """One part of a step, and the memory that a device holds in it."""

    name: str
    entries: dict[str, int]  # bytes by use

    @property
    def needed(self) -> int:
        """Return the device memory that the phase needs: with the context and the cost of fragmentation."""
        return round(sum(self.entries.values()) * (1 + FRAGMENTATION)) + CONTEXT


@dataclass(frozen=True)
class RankMemory:
    """Memory of a pipeline stage's first rank; the stage's other ranks differ only by padding."""

    rank: int
    pp_rank: int
    states: Mapping[Role, StateBytes]
    phases: tuple[MemoryPhase, ...]

    @property
    def peak(self) -> MemoryPhase:
        """Return the phase that needs most."""
        return max(self.phases, key=lambda phase: phase.needed)


@dataclass(frozen=True)
class FitVerdict:
    """The phase and rank that need most, against the memory of a device."""

    fits: bool | None  # None: the memory of a device is not known
    memory: RankMemory
    limit: int | None

    @property
    def sentence(self) -> str:
        """Return the verdict in words, with the three largest uses of the phase."""
        peak = self.memory.peak
        largest = sorted(peak.entries.items(), key=lambda entry: -entry[1])[:3]
        uses = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in largest if size)
        needs = f"rank {self.memory.rank} needs {in_gb(peak.needed)} while {peak.name} ({uses})"
        if self.limit is None:
            return f"{needs}; the memory of a GPU is not known here: give it as --gpu-memory 80G"
        if self.fits:
            return f"it fits: {needs}, of {in_gb(self.limit)}"
        return f"it does not fit: {needs}, and a GPU has {in_gb(self.limit)}"


def judge(setup: RunSetup, memory: Iterable[RankMemory] | None = None) -> FitVerdict:
    """Return the verdict on a run; `memory`: of its stages, if it is known already."""
    stages = memory_of_stages(setup, ends=True) if memory is None else memory
    fullest = max(stages, key=lambda each: each.peak.needed)
    limit = setup.machine.gpu_memory
    fits = None if limit is None else fullest.peak.needed <= limit
    return FitVerdict(fits, fullest, limit)


def in_gb(nbytes: float) -> str:
    """Return bytes in gigabytes of 10^9, as "79.3 GB"."""
    return f"{nbytes / 1e9:,.1f} GB"


def memory_of_stages(setup: RunSetup, *, ends: bool = False) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage; `ends`: first and last only."""
    layouts = {setup.for_model(model).layout for model in setup.models.values()}
    stages = {each: {0, each.pp - 1} if ends else range(each.pp) for each in layouts}
    ranks = {stage * layout.stage_size for layout, numbers in stages.items() for stage in numbers}
    memory = []
    for rank in sorted(ranks):
        states = {role: state_of(setup, model, rank) for role, model in setup.models.items()}
        pp_rank = setup.layout.coordinates(rank).pp_rank
        phases = [*_generation_phases(setup, states), *_trainer_phases(setup, states, rank, pp_rank)]
        memory.append(RankMemory(rank, pp_rank, states, tuple(phases)))
    return memory


def _trainer_phases(
    setup: RunSetup, states: Mapping[Role, StateBytes], rank: int, pp_rank: int
) -> Iterable[MemoryPhase]:
    """Yield the phases in which the trainer computes."""
    passes = []
    for role, model in setup.models.items():
        its = setup.for_model(model)
        peak = forward_pass(its, model, its.layout.coordinates(rank).pp_rank)
        passes.append(_resident(setup, states, role, ("weights",)) | peak)
    yield MemoryPhase("computing log-probs and values", max(passes, key=lambda entries: sum(entries.values())))
    for role, model in setup.models.items():
        if model.trainable:
            resident = _resident(setup, states, role)
            training = training_pass(setup, model, pp_rank)
            if role == "actor":
                training["teacher's projection"] = projection_bytes(setup, pp_rank)
            yield MemoryPhase(f"training the {role}", resident | training)
            step = {"gradients of main weights": states[role].step}
            yield MemoryPhase(f"the optimizer step of the {role}", resident | step)


def _generation_phases(setup: RunSetup, states: Mapping[Role, StateBytes]) -> Iterable[MemoryPhase]:
    """Yield the phases of sending weights and generating, and of a save next to colocated servers."""
    export = {"export buckets": _export_buckets(setup)}
    if not setup.colocated:
        yield MemoryPhase("sending weights", _resident(setup, states, "actor", ("weights",)) | export)
        if setup.config.rollout.backend == "hf":
            cache = {"KV cache and logits": embedded(setup)[1]}
            yield MemoryPhase("generating", _resident(setup, states, "actor", ()) | cache)
        return
    weights, cache_bytes, _ = server_of(setup)
    servers = {"servers' weights": weights, "servers' residue": SERVER_RESIDUE}
    saved = [_resident(setup, states, role, _SAVED) for role, model in setup.models.items() if model.trainable]
    fullest = max(saved, key=lambda entries: sum(entries.values()))
    yield MemoryPhase("sending weights", {"policy's weights": states["actor"].weights} | export | servers)
    yield MemoryPhase("generating", {**servers, "KV cache": cache_bytes})
    yield MemoryPhase("saving a checkpoint", fullest | {"servers' weights": weights})


def _resident(
    setup: RunSetup, states: Mapping[Role, StateBytes], role: Role, parts: tuple[str, ...] = _PARTS
) -> dict[str, int]:
    """Return the memory of models while a role works, and of rollout engines meanwhile."""
    here, parts = ([states[role]], parts) if setup.takes_turns else (list(states.values()), _PARTS)
    entries = {part: sum(getattr(state, part) for state in here) for part in parts}
    if setup.config.rollout.backend == "hf":
        entries["rollout model"] = weight_bytes(setup.actor.hf, setup.rollout_itemsize)
    elif setup.colocated:
        entries["servers' residue"] = SERVER_RESIDUE
    return entries


def _export_buckets(setup: RunSetup) -> int:
    """Return the bytes of export buffers: a bucket or the largest tensor, and its parts."""
    hf, layout, bucket = setup.actor.hf, setup.layout, setup.config.rollout.bucket_mib << 20
    if setup.colocated:
        return sending_bytes(hf, bucket_bytes=bucket, itemsize=setup.rollout_itemsize)
    largest = hf.vocab_size * hf.hidden_size * setup.rollout_itemsize
    pieces = (2 if max(layout.tp, layout.ep * layout.etp) > 1 else 1) + 2 * (setup.config.rollout.backend == "sglang")
    return max(bucket, largest) * pieces


def kv_bytes_per_token(hf: HFConfig, itemsize: int, *, tp: int = 1) -> int:
    """Return the bytes of a token's keys and values over all layers on one tensor-parallel rank."""
    if hf.mla is not None:
        return hf.num_layers * (hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim) * itemsize  # the same on every rank
    heads = -(-hf.num_kv_heads // tp)
    return hf.num_layers * 2 * heads * hf.head_dim * itemsize


def rows_of_a_rank(setup: RunSetup) -> int:
    """Return the sequences that one rank generates in a step; every rank generates its share."""
    return -(-setup.config.trainer.prompts_per_step // setup.machine.world_size) * setup.config.rollout.n


def _longest_sampled(setup: RunSetup) -> int:
    """Return the tokens of the longest sequence that a rollout engine holds, validations included."""
    return max(setup.longest, setup.config.data.max_prompt_tokens + setup.config.validation.max_new_tokens)


def embedded(setup: RunSetup) -> tuple[int, int]:
    """Return (rows generated together, bytes of their cache and logits) of the embedded engine."""
    config, hf, b = setup.config, setup.actor.hf, setup.rollout_itemsize
    rows = min(config.rollout.hf.batch_size, rows_of_a_rank(setup))
    per_token = kv_bytes_per_token(hf, b)
    if hf.mla is not None:
        width = hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim + hf.mla.v_head_dim
        per_token = hf.num_layers * hf.num_heads * width * b
    logits = rows * hf.vocab_size * (b + 3 * 4)  # the last token's; sampling works on float32
    return rows, rows * _longest_sampled(setup) * per_token + logits


def server_of(setup: RunSetup) -> tuple[int, int, int]:
    """Return (bytes of weights, bytes of cache, sequences in the cache) of a server's device."""
    sglang, hf, b = setup.config.rollout.sglang, setup.actor.hf, setup.rollout_itemsize
    server = sglang.server
    weights = weight_bytes(hf, b) // server.tp
    per_token = kv_bytes_per_token(hf, b, tp=server.tp)
    tokens = server.max_total_tokens
    if not tokens and server.mem_fraction and setup.machine.gpu_memory:
        share = round(server.mem_fraction * setup.machine.gpu_memory)
        tokens = max(0, share - weights) // per_token
    longest = _longest_sampled(setup)
    tokens = tokens or longest * min(16, sglang.max_concurrency)
    return weights, tokens * per_token, tokens // longest


def projection_bytes(setup: RunSetup, pp_rank: int) -> int:
    """Return the bytes of a teacher's projection that a pipeline rank copies while the student trains."""
    if not LOSS.needs(setup.config, "needs_teacher") or pp_rank < setup.layout.pp - 1:
        return 0
    teacher, tp = setup.models["reference"], setup.layout.tp
    copied = setup.for_model(teacher) is not setup or setup.takes_turns or setup.spec == "hf"
    nbytes = padded_vocab_size(teacher.hf.vocab_size, tp) // tp * teacher.hf.hidden_size * setup.itemsize
    return nbytes if copied else 0


def host_bytes(setup: RunSetup, memory: list[RankMemory]) -> dict[str, int]:
    """Return the bytes of host memory on the fullest host, by use."""
    ranks, checkpoint = setup.machine.ranks_per_node, setup.config.checkpoint
    entries = {"optimizer state": max(sum(s.host for s in each.states.values()) for each in memory) * ranks}
    if setup.colocated or setup.takes_turns:
        # Gradients are zero when they come back, so none of them is kept.
        kept = max(sum(state.weights + state.optimizer for state in each.states.values()) for each in memory)
        entries["models that leave their devices, pinned"] = kept * ranks
    saved = max(_saved(setup, each.states) for each in memory) * ranks
    if checkpoint.memory.interval:
        # The newest one and the one that is being written, and on several hosts copies of another host's.
        entries["checkpoints in memory"] = 2 * min(2, -(-setup.layout.world_size // ranks)) * saved
    if checkpoint.async_save:
        entries["checkpoint on its way to disk"] = saved
    return {name: size for name, size in entries.items() if size}


def _saved(setup: RunSetup, states: Mapping[Role, StateBytes]) -> int:
    """Return one rank's bytes of a checkpoint: its optimizer state and share of the weights."""
    shares = setup.layout.dp * setup.layout.cp if setup.spec != "hf" else 1
    trained = {role for role, model in setup.models.items() if model.trainable}
    return sum(s.optimizer + s.host + s.weights // shares for role, s in states.items() if role in trained)
