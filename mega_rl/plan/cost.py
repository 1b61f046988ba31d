"""Expected time of a step: operations, bytes and messages, each divided by a rate of the hardware.

Every response is as long as it may be. A phase is the sum of its parts, which follow one another. The slowest stage of
a pipeline counts, once for each micro-batch and for each that its ends wait for. docs/scale.md lists the
formulas and applies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil

from mega_rl.config.needs import updates_of_a_batch
from mega_rl.converters.architecture import HFConfig
from mega_rl.plan.activations import num_microbatches, recompute_of
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
from mega_rl.plan.state import weight_bytes
from mega_rl.plan.traffic import (
    Traffic,
    num_servers,
    pass_traffic,
    passes_of,
    sync_traffic,
    update_traffic,
)
from mega_rl.tracking.metrics.flops import PEAK_TFLOPS, ModelWork

# Work that recomputation adds to an update.
AGAIN = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
BUBBLE, COMPUTING = "waiting for other stages", "computing"


@dataclass(frozen=True)
class Hardware:
    """Coefficients of the cost model: rates per second and GPU in operations or bytes, and shares that work reaches.

    Peaks, memory and links come from data sheets. Shares and latencies are estimates for this package's code, until a
    device has measured them.
    """

    name: str
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


_ALL = (
    Hardware("a100", memory=80e9, peak=PEAK_TFLOPS["A100"] * 1e12, memory_rate=2.0e12, nvlink=300e9, network=25e9),
    Hardware("h100", memory=80e9, peak=PEAK_TFLOPS["H100"] * 1e12, memory_rate=3.35e12, nvlink=450e9, network=50e9),
    Hardware("h200", memory=141e9, peak=PEAK_TFLOPS["H200"] * 1e12, memory_rate=4.8e12, nvlink=450e9, network=50e9),
    Hardware("b200", memory=180e9, peak=PEAK_TFLOPS["B200"] * 1e12, memory_rate=7.7e12, nvlink=900e9, network=50e9),
)
HARDWARE = {each.name: each for each in _ALL}
RATES = tuple(field.name for field in fields(Hardware) if field.name != "name")


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
    clock = _Clock(setup, hardware)
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
            useful += setup.config.algorithm.epochs * one_epoch
    return StepTime(
        {phase: {name: seconds for name, seconds in parts.items() if seconds} for phase, parts in phases.items()},
        tokens=_rows(setup) * setup.longest,
        useful=useful,
        peak=setup.machine.world_size * hardware.peak,
        ahead=setup.config.trainer.async_steps > 0,
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
        """Return the seconds of so many micro-batches by cause, with the bubbles of the pipeline."""
        if not forward + training:
            return {}
        stages = [self._stage(model, forward, training, rank) for rank in range(self.setup.layout.pp)]
        slowest = max(stages, key=lambda parts: sum(parts.values()))
        steps = updates_of_a_batch(self.setup.config) if training else 1
        count = (forward + training) / steps
        idle = (self.setup.layout.pp - 1) / self.setup.layout.vpp / count
        bubble = sum(slowest.values()) * idle
        return slowest | {BUBBLE: bubble}

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
            hidden = each.use == "pipeline" and setup.config.engine.megatron.overlap_p2p
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
    """Return the seconds of a weight sync, and of turns: models to the host and back."""
    hardware, machine, sizes = clock.hardware, setup.machine, sync_traffic(setup)
    away = machine.world_size > machine.gpus_per_node
    rate = (hardware.network if away else hardware.nvlink) * hardware.link_share
    parts = {"gathering weights": sizes["gathered by each rank"] / rate}
    if "sent to the servers" in sizes:
        parts["weights to the servers"] = sizes["sent to the servers"] / (hardware.network * hardware.link_share)
    if setup.colocated or setup.takes_turns:
        times = {role: 1 + model.trainable for role, model in setup.models.items()}
        moved = max(sum(times[role] * (s.weights + s.optimizer) for role, s in each.states.items()) for each in memory)
        parts["models to the host and back"] = moved * machine.ranks_per_node / hardware.host_copy
    return parts


def _generation(setup: RunSetup, hardware: Hardware, server_ranks: int) -> dict[str, float]:
    """Return the seconds of a step's responses, on servers or embedded engines that all have as many."""
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
    """Return the share of the weights that so many tokens read: of experts only the chosen ones."""
    if hf.moe is None:
        return 1.0
    layers = sum(hf.is_moe(i) for i in range(hf.num_layers))
    experts = 3 * hf.hidden_size * hf.moe.ffn_hidden_size * hf.moe.num_experts * layers / weight_bytes(hf, 1)
    unread = (1 - hf.moe.top_k / hf.moe.num_experts) ** tokens
    return 1 - experts * unread


def _rows(setup: RunSetup) -> int:
    """Return the sequences of a step."""
    return setup.config.trainer.prompts_per_step * setup.config.rollout.n
