"""Expected time of a step: operations, bytes and messages, divided by the hardware's rates.

Every response is as long as it may be. A phase is the sum of its parts, which follow one another. The slowest stage of
a pipeline counts, once for each micro-batch and for each that its ends wait for. docs/scale.md lists the
formulas and applies them.

Of an all-gather or reduce-scatter over d ranks a rank sends (d - 1) / d of the whole tensor, of an all-reduce twice
that, of an all-to-all the part that does not stay. Numbers that steer a step are left out: losses, norms, shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from mega_rl.config.needs import has_pass_for_old_logprobs, updates_of_a_batch
from mega_rl.converters.architecture import HFConfig, is_moe
from mega_rl.converters.plan.sharding import padded_vocab_size
from mega_rl.plan.activations import num_microbatches, recompute_of, tokens_of_longest
from mega_rl.plan.memory import (
    CONTEXT,
    FRAGMENTATION,
    SERVER_RESIDUE,
    RankMemory,
    kv_bytes_per_token,
    memory_of_stages,
    rows_of_a_rank,
    server_of,
)
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state import (
    FP32,
    chunk_buffers,
    parameters_of,
    shard_ranks,
    training_of,
    transformers_parameters,
    weight_bytes,
)
from mega_rl.rollout.sglang.weights.reshard import TYPICAL_CHANGES, sending_seconds
from mega_rl.tracking.metrics.flops import PEAK_TFLOPS, ModelWork

# Work that recomputation adds to an update.
AGAIN = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
BUBBLE, COMPUTING = "waiting for other stages", "computing"
_CHANGES = "or, over a slow link, changes"


@dataclass(frozen=True)
class Hardware:
    """Coefficients of the cost model: rates per second and GPU, and shares that work reaches.

    Peaks, memory and links come from data sheets. Shares and latencies are estimates for this package's code, until a
    device has measured them.
    """

    memory: float  # bytes
    peak: float  # dense bf16 operations
    memory_rate: float  # to and from the device's memory
    nvlink: float  # one way, between GPUs of a host
    network: float  # one way, to other hosts, for each GPU's adapter
    host_copy: float = 200e9  # to or from pinned host memory, all GPUs of a host at once
    matmul_share: float = 0.55  # share of `peak` in a pass
    memory_share: float = 0.7  # share of `memory_rate` in a token's step or the optimizer's
    link_share: float = 0.8  # share of `nvlink` and `network` in a collective
    served_layer_s: float = 20e-6  # least time of one layer for one token in a server, whose step is a CUDA graph
    embedded_layer_s: float = 500e-6  # the same if Python launches each kernel


HARDWARE = {
    "a100": Hardware(memory=80e9, peak=PEAK_TFLOPS["A100"] * 1e12, memory_rate=2.0e12, nvlink=300e9, network=25e9),
    "h100": Hardware(memory=80e9, peak=PEAK_TFLOPS["H100"] * 1e12, memory_rate=3.35e12, nvlink=450e9, network=50e9),
    "h200": Hardware(memory=141e9, peak=PEAK_TFLOPS["H200"] * 1e12, memory_rate=4.8e12, nvlink=450e9, network=50e9),
    "b200": Hardware(memory=180e9, peak=PEAK_TFLOPS["B200"] * 1e12, memory_rate=7.7e12, nvlink=900e9, network=50e9),
}


@dataclass(frozen=True)
class StepTime:
    """Expected times of a step."""

    phases: Mapping[str, Mapping[str, float]]  # seconds by phase and by what they are spent on
    tokens: int  # prompts and responses
    useful: float  # operations of all updates, without recomputation
    peak: float  # operations per second of all trainer GPUs
    ahead: bool = False  # the next step's responses are generated meanwhile

    @property
    def total(self) -> float:
        """Return the seconds of a step; generation ahead hides the shorter of itself and of training."""
        seconds = {name: sum(parts.values()) for name, parts in self.phases.items()}
        hidden = min(seconds["generating"], sum(seconds.values()) - seconds["generating"] - seconds["sending weights"])
        return sum(seconds.values()) - (hidden if self.ahead else 0.0)

    @property
    def mfu(self) -> float:
        """Return the share of the peak that training reaches while it runs."""
        training = sum(sum(parts.values()) for name, parts in self.phases.items() if name.startswith("training"))
        return self.useful / training / self.peak


def step_time(
    setup: RunSetup, hardware: Hardware, *, server_ranks: int = 0, memory: Sequence[RankMemory] | None = None
) -> StepTime:
    """Return the expected time of a step; server_ranks: GPUs of each joined server."""
    clock, config = _Clock(setup, hardware), setup.config
    memory = memory_of_stages(setup) if memory is None else memory
    its = [(setup.for_model(model), model) for model in setup.models.values()]
    forward: dict[str, float] = {}
    for each, model in its:
        for name, seconds in _Clock(each, hardware).passes(model, passes_of(each, model)[0], 0).items():
            forward[name] = forward.get(name, 0.0) + seconds
    phases = {
        "generating": _generation(setup, hardware, server_ranks),
        "sending weights": _sending(setup, clock, memory),
        "computing log-probs and values": forward,
    }
    useful = 0.0
    for role, model in setup.models.items():
        if model.trainable:
            parts = clock.passes(model, 0, passes_of(setup, model)[1]) | clock.updates(model, memory)
            phases[f"training the {role}"] = parts
            one_epoch = ModelWork(model.hf, head=model.head).update([setup.longest] * _rows(setup))
            useful += config.algorithm.epochs * one_epoch
    return StepTime(
        {phase: {name: seconds for name, seconds in parts.items() if seconds} for phase, parts in phases.items()},
        tokens=_rows(setup) * setup.longest,
        useful=useful,
        peak=setup.machine.world_size * hardware.peak,
        ahead=config.trainer.async_steps > 0 and config.rollout.backend == "sglang" and not setup.colocated,
    )


@dataclass(frozen=True)
class _Clock:
    """Times of a run's passes and messages."""

    setup: RunSetup
    hardware: Hardware

    def message(self, traffic: Traffic) -> float:
        """Return the seconds of a message at the rate of the slowest link on its way."""
        nvlink, network = (rate * self.hardware.link_share for rate in (self.hardware.nvlink, self.hardware.network))
        per_host = max(1, min(traffic.ranks, self.setup.machine.gpus_per_node // traffic.stride))
        if per_host == traffic.ranks:
            return traffic.nbytes / nvlink
        if traffic.collective == "all-to-all":
            away = traffic.nbytes * (traffic.ranks - per_host) / (traffic.ranks - 1)
            return max(away / network, (traffic.nbytes - away) / nvlink)
        if traffic.collective == "send":
            return traffic.nbytes / network
        return traffic.nbytes / min(nvlink, network * per_host)

    def passes(self, model: PlannedModel, forward: int, training: int) -> dict[str, float]:
        """Return the seconds of a number of micro-batches by cause, with the bubbles of the pipeline."""
        if not forward + training:
            return {}
        stages = [self._stage(model, forward, training, rank) for rank in range(self.setup.layout.pp)]
        slowest = max(stages, key=lambda parts: sum(parts.values()))
        steps = updates_of_a_batch(self.setup.config) if training else 1
        count = (forward + training) / steps
        idle = (self.setup.layout.pp - 1) / self.setup.layout.vpp / count
        return slowest | {BUBBLE: sum(slowest.values()) * idle}

    def _stage(self, model: PlannedModel, forward: int, training: int, pp_rank: int) -> dict[str, float]:
        setup, layout = self.setup, self.setup.layout
        again = AGAIN[recompute_of(setup).mode]
        layers = [i for stage in range(layout.vpp) for i in layout.layers_of(pp_rank, model.hf.num_layers, stage)]
        forward_work = ModelWork(model.hf, head=model.head, layers=layers, output=pp_rank == layout.pp - 1)
        # The last micro-batch of a mini-batch is seldom full.
        rows = setup.config.trainer.minibatch_size * setup.config.rollout.n / layout.dp / num_microbatches(setup)
        work = rows * forward_work.forward([setup.longest]) * (forward + training * 3 * (1 + again))
        shared = layout.tp * layout.cp if setup.spec != "hf" else 1
        parts = {COMPUTING: work / shared / (self.hardware.peak * self.hardware.matmul_share)}
        for each in pass_traffic(setup, model, forward, training, pp_rank):
            hidden = each.use == "pipeline" and layout.vpp > 1
            parts[each.use] = parts.get(each.use, 0.0) + (0.0 if hidden else self.message(each))
        return parts

    def updates(self, model: PlannedModel, memory: Sequence[RankMemory]) -> dict[str, float]:
        """Return the seconds of all optimizer steps: reductions, gathers, and the optimizer's reads and writes."""
        steps, ddp = updates_of_a_batch(self.setup.config), self.setup.config.engine.megatron.ddp
        slowest: dict[str, float] = {}
        for stage in memory:
            state = stage.states[model.role]
            moved = 2 * state.optimizer + state.gradients + state.weights
            parts = {"optimizer": steps * moved / (self.hardware.memory_rate * self.hardware.memory_share)}
            parts["optimizer on the host"] = steps * 2 * state.host / self.hardware.host_copy
            for each in update_traffic(self.setup, model, stage.pp_rank):
                # Only the first stage reduces buckets during the backward; all stages gather during the forward.
                hidden = stage.pp_rank == 0 and each.use == "gradients" and ddp.overlap_grad_reduce
                hidden |= each.use == "updated weights" and ddp.overlap_param_gather
                parts[each.use] = parts.get(each.use, 0.0) + (0.0 if hidden else self.message(each))
            if sum(parts.values()) > sum(slowest.values()):
                slowest = parts
        return slowest


def _sending(setup: RunSetup, clock: _Clock, memory: Sequence[RankMemory]) -> dict[str, float]:
    """Return the seconds of a step's weight syncs, and of turns: models to the host and back."""
    hardware, machine, sizes = clock.hardware, setup.machine, sync_traffic(setup)
    away = machine.world_size > machine.gpus_per_node
    rate = (hardware.network if away else hardware.nvlink) * hardware.link_share
    interval = setup.config.rollout.sglang.sync.interval
    syncs = ceil(updates_of_a_batch(setup.config) / interval) if interval else 1
    parts = {"gathering weights": syncs * sizes["gathered by each rank"] / rate}
    if "sent to the servers" in sizes:
        link = machine.server_link or hardware.network * hardware.link_share
        parts["weights to the servers"] = syncs * min(sync_seconds(setup, link).values())
    if setup.colocated or setup.takes_turns:
        times = {role: 1 + model.trainable for role, model in setup.models.items()}
        moved = max(sum(times[role] * (s.weights + s.optimizer) for role, s in each.states.items()) for each in memory)
        parts["models to the host and back"] = moved * machine.ranks_per_node / hardware.host_copy
    return parts


def _generation(setup: RunSetup, hardware: Hardware, server_ranks: int) -> dict[str, float]:
    """Return the seconds of a step's responses, shared evenly by servers or embedded engines."""
    hf, b, rollout = setup.actor.hf, setup.rollout_itemsize, setup.config.rollout
    if rollout.backend == "none":
        return {}
    if rollout.backend == "hf":
        rows, ranks, floor = rows_of_a_rank(setup), 1, hardware.embedded_layer_s
        together = min(rollout.hf.batch_size, rows)
    else:
        ranks = server_ranks if rollout.sglang.urls else rollout.sglang.server.tp
        if not ranks:
            return {}
        rows, floor = ceil(_rows(setup) / num_servers(setup)), hardware.served_layer_s
        together = max(1, min(rows, _room(setup, hardware, ranks), rollout.sglang.max_concurrency))
    waves = ceil(rows / together)
    rate = hardware.memory_rate * hardware.memory_share
    weights = weight_bytes(hf, b) * _share_read(hf, together) / ranks
    context = setup.longest - rollout.max_new_tokens / 2
    cache = together * context * kv_bytes_per_token(hf, b, tp=ranks)
    prompts = ModelWork(hf, head="lm").forward([setup.config.data.max_prompt_tokens] * rows)
    per_token = ModelWork(hf, head="lm").forward([1] * together)
    speed = hardware.peak * hardware.matmul_share * ranks
    reading = {"reading weights": weights / rate, "reading the cache": cache / rate}
    least = max(hf.num_layers * floor, per_token / speed)
    slack = max(0.0, least - sum(reading.values()))
    tokens = waves * rollout.max_new_tokens
    parts = {name: tokens * seconds for name, seconds in reading.items()}
    return parts | {"launches and messages": tokens * slack, "prompts": prompts / speed}


def _room(setup: RunSetup, hardware: Hardware, ranks: int) -> int:
    """Return the sequences of full length that fit a server's cache."""
    rollout, hf, b = setup.config.rollout, setup.actor.hf, setup.rollout_itemsize
    server = rollout.sglang.server
    if server.max_total_tokens or server.mem_fraction:
        return server_of(setup)[2]
    room = hardware.memory / (1 + FRAGMENTATION) - CONTEXT - SERVER_RESIDUE - weight_bytes(hf, b) / ranks
    return int(room / (kv_bytes_per_token(hf, b, tp=ranks) * setup.longest))


def _share_read(hf: HFConfig, tokens: int) -> float:
    """Return the share of the weights that tokens read: of experts only the chosen ones."""
    if hf.moe is None:
        return 1.0
    layers = sum(is_moe(hf, i) for i in range(hf.num_layers))
    experts = 3 * hf.hidden_size * hf.moe.ffn_hidden_size * hf.moe.num_experts * layers / weight_bytes(hf, 1)
    unread = (1 - hf.moe.top_k / hf.moe.num_experts) ** tokens
    return 1 - experts * unread


def _rows(setup: RunSetup) -> int:
    """Return the sequences of a step."""
    return setup.config.trainer.prompts_per_step * setup.config.rollout.n


_TP = "tensor parallelism"


@dataclass(frozen=True)
class Traffic:
    """One kind of message."""

    use: str
    collective: str
    ranks: int  # in its group
    nbytes: int  # a rank's bytes in a step
    stride: int = 1  # global ranks from one member of its group to the next


class Message(NamedTuple):
    """Bytes of one kind in a micro-batch."""

    use: str
    collective: str
    group: str  # tp, cp, ep, etp, experts or pp
    forward: int = 0
    backward: int = 0
    repeats: bool = False  # the backward repeats the forward


def step_traffic(setup: RunSetup, pp_rank: int, *, rank: int | None = None) -> list[Traffic]:
    """Return a rank's traffic in a step whose responses are all longest."""
    traffic: list[Traffic] = []
    rank = pp_rank * setup.layout.stage_size if rank is None else rank
    for model in setup.models.values():
        its = setup.for_model(model)
        traffic += update_traffic(setup, model, pp_rank)
        traffic += pass_traffic(its, model, *passes_of(its, model), its.layout.coordinates(rank).pp_rank)
    return _merged(traffic)


def passes_of(setup: RunSetup, model: PlannedModel) -> tuple[int, int]:
    """Return the passes of a model over micro-batches in a step: (without gradients, training)."""
    trainer, micros = setup.config.trainer, num_microbatches(setup)
    forward = micros * (trainer.prompts_per_step // trainer.minibatch_size)
    if model.role == "actor" and not has_pass_for_old_logprobs(setup.config):
        forward = 0
    return forward, micros * updates_of_a_batch(setup.config) if model.trainable else 0


def pass_traffic(setup: RunSetup, model: PlannedModel, forward: int, training: int, pp_rank: int) -> list[Traffic]:
    """Return the messages of forward and training passes: of layers that are cut or gathered."""
    layout = setup.layout
    if setup.spec == "hf":  # FSDP2 gathers a layer once in a forward, twice in a training pass
        fsdp, ranks = setup.config.engine.fsdp, shard_ranks(setup.config, setup.machine.world_size)
        gathers = forward + training * (2 if fsdp.reshard_after_forward else 1)
        nbytes = _share(_elements(model) * setup.itemsize, ranks) * gathers
        return [Traffic("weights of layers", "all-gather", ranks, nbytes)]
    groups = {  # (size, distance of neighbours in global ranks)
        **{"tp": (layout.tp, 1), "cp": (layout.cp, layout.tp), "pp": (layout.pp, layout.stage_size)},
        **{"etp": (layout.etp, 1), "ep": (layout.ep, layout.etp), "experts": (layout.ep * layout.etp, 1)},
    }
    traffic = []
    for each in _stage_messages(setup, model, pp_rank):
        per_pass = each.forward * (2 if each.repeats else 1) + each.backward
        ranks, stride = groups[each.group]
        nbytes = each.forward * forward + per_pass * training
        traffic.append(Traffic(each.use, each.collective, ranks, nbytes, stride))
    # Log-probs or values travel to all ranks of a replica after passes without gradients.
    outputs = forward * tokens_of_longest(setup) * layout.cp * FP32
    if pp_rank == layout.pp - 1:
        traffic.append(Traffic("outputs", "all-reduce", layout.cp, 2 * _share(outputs, layout.cp), layout.tp))
    if layout.pp > 1:
        traffic.append(Traffic("outputs", "broadcast", layout.pp, outputs, layout.stage_size))
    return _merged(traffic)


def _share(nbytes: int, ranks: int) -> int:
    """Return the part of a tensor that belongs to the other ranks of a group."""
    return nbytes * (ranks - 1) // ranks


def update_traffic(setup: RunSetup, model: PlannedModel, pp_rank: int) -> list[Traffic]:
    """Return reductions of gradients and gathers of weights in all optimizer steps of a step."""
    if not model.trainable:
        return []
    steps, layout, par = updates_of_a_batch(setup.config), setup.layout, setup.config.engine.megatron
    if setup.spec == "hf":
        fsdp, ranks = setup.config.engine.fsdp, shard_ranks(setup.config, setup.machine.world_size)
        reductions = passes_of(setup, model)[1] if fsdp.reduce_every_microbatch else steps
        itemsize = FP32 if fsdp.grad_reduce_in_fp32 else setup.itemsize
        return [Traffic("gradients", "reduce-scatter", ranks, _share(_elements(model) * itemsize, ranks) * reductions)]
    if par.ddp.name != "ddp":
        return []
    rank, traffic = pp_rank * layout.stage_size, []
    for stage in range(layout.vpp):
        for buffer, _ in chunk_buffers(setup.sharding(model), training_of(setup, model), rank, stage):
            stride = layout.ep * layout.etp if buffer.of_experts else layout.tp
            gradient = buffer.numel * (FP32 if par.ddp.grad_reduce_in_fp32 else buffer.itemsize)
            sent = _share(gradient, buffer.ranks) * steps
            if not buffer.distributed:
                traffic.append(Traffic("gradients", "all-reduce", buffer.ranks, 2 * sent, stride))
                continue
            traffic.append(Traffic("gradients", "reduce-scatter", buffer.ranks, sent, stride))
            weights = _share(buffer.numel * buffer.itemsize, buffer.ranks) * steps
            traffic.append(Traffic("updated weights", "all-gather", buffer.ranks, weights, stride))
    return [*traffic, *_copied_parameters(setup, model, pp_rank, steps)]


def _copied_parameters(setup: RunSetup, model: PlannedModel, pp_rank: int, steps: int) -> Iterator[Traffic]:
    """Yield the sums of gradients of parameters that several ranks of a replica hold whole."""
    layout, hf = setup.layout, model.hf
    reduced = FP32 if setup.config.engine.megatron.ddp.grad_reduce_in_fp32 else setup.itemsize
    if hf.tied and model.head == "lm" and layout.pp > 1 and pp_rank in (0, layout.pp - 1):
        rows = padded_vocab_size(hf.vocab_size, layout.tp) // layout.tp
        sent = 2 * _share(rows * hf.hidden_size * reduced, 2) * steps
        yield Traffic("tied embedding", "all-reduce", 2, sent, layout.stage_size * (layout.pp - 1))
    rank, training, sharding = pp_rank * layout.stage_size, training_of(setup, model), setup.sharding(model)
    summed = sum(
        parameter.numel
        for stage in range(layout.vpp)
        for parameter in parameters_of(sharding, training, rank, stage)
        if parameter.summed_over_tp and parameter.trained
    )
    sent = 2 * _share(summed * reduced, layout.tp) * steps
    yield Traffic("norms and other whole parameters", "all-reduce", layout.tp, sent)


def _elements(model: PlannedModel) -> int:
    return sum(parameter.numel for parameter in transformers_parameters(model.hf, model.head))


def _merged(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Return one entry for each use, collective and group, without empty ones."""
    merged = Counter[Traffic]()
    for each in traffic:
        merged[replace(each, nbytes=0)] += each.nbytes
    return [replace(key, nbytes=nbytes) for key, nbytes in merged.items() if nbytes]


def sync_traffic(setup: RunSetup) -> dict[str, int]:
    """Return the bytes of one weight sync: the model's, each rank's, the servers'."""
    layout, config = setup.layout, setup.config
    model = weight_bytes(setup.actor.hf, setup.rollout_itemsize)
    pieces = layout.tp * layout.pp * (layout.ep if setup.actor.hf.moe is not None else 1)
    if setup.spec == "hf":
        pieces = shard_ranks(config, setup.machine.world_size)
    sizes = {"model": model, "gathered by each rank": round(model * (1 - 1 / pieces))}
    if config.rollout.backend == "sglang" and not setup.colocated:
        sizes["sent to the servers"] = model  # each stage's weights once, by one rank
        if config.rollout.sglang.urls and config.rollout.sglang.sync.delta != "off":
            sizes[_CHANGES] = round(model * TYPICAL_CHANGES)
    return sizes


def sync_seconds(setup: RunSetup, link_rate: float) -> dict[str, float]:
    """Return the seconds in which servers get all weights, and changes if they may; link_rate: bytes per second."""
    sizes = sync_traffic(setup)
    times = dict(zip(("all weights", "changes"), sending_seconds(sizes["sent to the servers"], link_rate), strict=True))
    return times if _CHANGES in sizes else {"all weights": times["all weights"]}


def num_servers(setup: RunSetup) -> int:
    """Return the number of servers that a run joins, or that its hosts start."""
    sglang, machine = setup.config.rollout.sglang, setup.machine
    nodes = sglang.server.nodes
    per_host = sglang.server.count or max(1, machine.ranks_per_node // (sglang.server.tp // nodes))
    return len(sglang.urls) or max(1, per_host * (machine.num_nodes // nodes))


def _stage_messages(setup: RunSetup, model: PlannedModel, pp_rank: int) -> Iterator[Message]:
    """Yield the messages of a micro-batch on a pipeline rank; a kind may repeat."""
    layout, recompute = setup.layout, recompute_of(setup)
    stage = _Stage(setup, model, tokens_of_longest(setup))
    if pp_rank == 0:
        yield from stage.reduce_rows(model.hf.hidden_size)  # rows of the embedding are cut over tensor parallelism
    for chunk in range(layout.vpp):
        for place, number in enumerate(layout.layers_of(pp_rank, model.hf.num_layers, chunk)):
            full = recompute.mode == "full" and (not recompute.layers or place < recompute.layers)
            for part, messages in stage.layer(moe=is_moe(model.hf, number)).items():
                repeats = full or recompute.selects(part)
                yield from (each._replace(repeats=repeats) for each in messages)
    if pp_rank == layout.pp - 1:
        yield from stage.head()
    if layout.pp > 1:  # hidden states that a stage passes on, and gradients that it passes back
        one = stage.local_tokens * model.hf.hidden_size * setup.itemsize
        ahead, back = (layout.vpp - (pp_rank == end) for end in (layout.pp - 1, 0))
        yield Message("pipeline", "send", "pp", one * ahead, one * back)


@dataclass(frozen=True)
class _Stage:
    """Messages of the parts of a model's stage."""

    setup: RunSetup
    model: PlannedModel
    tokens: int  # number in a micro-batch on a rank

    @property
    def local_tokens(self) -> int:
        """Return the tokens that a rank has outside attention and MLP."""
        layout = self.setup.layout
        return self.tokens // layout.tp if layout.sequence_parallel else self.tokens

    def head(self) -> list[Message]:
        """Return the messages of the output layer and of sums over a cut vocabulary."""
        layout = self.setup.layout
        if layout.tp == 1:
            return []
        if self.model.head == "value":
            values = _share(self.tokens * FP32, layout.tp)  # every rank computes their whole gradient
            return [Message(_TP, "all-gather", "tp", values)] if layout.sequence_parallel else []
        entropy = self.model.role == "actor" and self.setup.config.algorithm.entropy_coef != 0
        one = 2 * _share(self.tokens * FP32, layout.tp)
        sums = Message("log-probs", "all-reduce", "tp", 3 * one, one * entropy)  # only training computes the entropy
        return [*self._gather_columns(self.model.hf.hidden_size), sums]

    def layer(self, *, moe: bool) -> dict[str, list[Message]]:
        """Return the messages of a layer by the part that recomputation repeats together."""
        parts = {"attention": self._projections(), "core_attn": self._context_parallel()}
        if not moe:
            return parts | {"mlp": self._mlp()}
        assert self.model.hf.moe is not None
        shared = self._mlp() if self.model.hf.moe.shared_ffn_hidden_size else []
        return parts | {"moe": [*self._experts(), *shared]}

    def _mlp(self) -> list[Message]:
        return [*self._gather_columns(self.model.hf.hidden_size), *self.reduce_rows(self.model.hf.hidden_size)]

    def _projections(self) -> list[Message]:
        """Return the messages of attention's projections; those of latent attention follow one another."""
        hf, mla, layout = self.model.hf, self.model.hf.mla, self.setup.layout
        if mla is None:
            return self._mlp()
        messages = [*self._gather_columns(mla.q_lora_rank or hf.hidden_size), *self._gather_columns(mla.kv_lora_rank)]
        if layout.tp > 1 and layout.sequence_parallel:
            turned = self._ring(mla.qk_rope_head_dim)
            messages.append(Message(_TP, "all-gather", "tp", turned))
            messages.append(Message(_TP, "reduce-scatter", "tp", 0, turned))
        return [*messages, *self.reduce_rows(hf.hidden_size)]

    def _ring(self, width: int) -> int:
        """Return the bytes of a gather or scatter of all tokens over tensor parallelism."""
        return _share(self.tokens * width * self.setup.itemsize, self.setup.layout.tp)

    def _gather_columns(self, width: int) -> list[Message]:
        """Return the messages of a linear layer whose rows are cut; `width`: of its input."""
        layout, ring = self.setup.layout, self._ring(width)
        if layout.tp == 1:
            return []
        if not layout.sequence_parallel:
            return [Message(_TP, "all-reduce", "tp", 0, 2 * ring)]
        # The backward gathers the input once more, for the weights' gradient.
        return [Message(_TP, "all-gather", "tp", ring, ring), Message(_TP, "reduce-scatter", "tp", 0, ring)]

    def reduce_rows(self, width: int) -> list[Message]:
        """Return the messages of a linear layer or embedding whose products are sums over ranks."""
        layout, ring = self.setup.layout, self._ring(width)
        if layout.tp == 1:
            return []
        if not layout.sequence_parallel:
            return [Message(_TP, "all-reduce", "tp", 2 * ring)]
        return [Message(_TP, "reduce-scatter", "tp", ring), Message(_TP, "all-gather", "tp", 0, ring)]

    def _context_parallel(self) -> list[Message]:
        """Return the gathers of keys and values, and the way back of their gradients."""
        hf, layout = self.model.hf, self.setup.layout
        if layout.cp == 1:
            return []
        width = 2 * max(hf.num_kv_heads // layout.tp, 1) * hf.head_dim
        if hf.mla is not None:
            head = hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim + hf.mla.v_head_dim
            width = hf.num_heads // layout.tp * head
        sent, use = self.tokens * width * self.setup.itemsize * (layout.cp - 1), "context parallelism"
        if self.setup.spec == "te":  # a ring, whose backward also carries gradients
            return [Message(use, "send", "cp", sent, 2 * sent)]
        return [Message(use, "all-gather", "cp", sent), Message(use, "all-to-all", "cp", 0, sent)]

    def _experts(self) -> list[Message]:
        """Return the way of tokens to their experts and back; all experts get the same number."""
        hf, layout, moe = self.model.hf, self.setup.layout, self.model.hf.moe
        assert moe is not None
        if layout.ep * layout.etp == 1:
            return []
        # Sums are in the router's type, FP32.
        hidden, combined = hf.hidden_size * self.setup.itemsize, hf.hidden_size * FP32
        messages = []
        if self.setup.config.engine.megatron.moe.dispatcher == "allgather":
            tokens = self.local_tokens * (layout.ep * layout.etp - 1)
            there, weights = tokens * hidden, tokens * moe.num_experts * FP32
            choices = tokens * moe.num_experts  # a byte each
            back = tokens * combined
            messages.append(Message("experts", "all-gather", "experts", there + weights + choices, back))
            messages.append(Message("experts", "reduce-scatter", "experts", back, there + weights))
            return messages
        routed = self.local_tokens * moe.top_k
        if layout.ep > 1:
            both = _share(routed * (hidden + FP32), layout.ep) + _share(routed * hidden, layout.ep)
            messages.append(Message("experts", "all-to-all", "ep", both, both))
        if layout.etp > 1:
            there, back = (routed * width * (layout.etp - 1) for width in (hidden + FP32, combined))
            messages.append(Message("experts", "all-gather", "etp", there, back))
            messages.append(Message("experts", "reduce-scatter", "etp", back, there))
        return messages
