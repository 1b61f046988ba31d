"""Bytes that one rank sends in a step, by collective, and those of each weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mega_rl.config.needs import has_pass_for_old_logprobs
from mega_rl.converters.plan.sharding import padded_vocab_size
from mega_rl.plan.generation import weight_bytes
from mega_rl.plan.messages import FP32, Group, share, stage_messages, stride_of
from mega_rl.plan.passes import num_microbatches, tokens_of_longest
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state.fsdp import shard_ranks, transformers_parameters
from mega_rl.plan.state.ranks import chunk_buffers, parameters_of, training_of


@dataclass(frozen=True)
class Traffic:
    """One kind of message."""

    use: str
    collective: str
    ranks: int  # of its group
    nbytes: int  # that a rank sends in a step
    stride: int = 1  # global ranks from one member of its group to the next


@dataclass(frozen=True)
class Passes:
    """Passes over micro-batches in one step."""

    forward: int  # without gradients
    training: int


def step_traffic(setup: RunSetup, pp_rank: int, *, rank: int | None = None) -> list[Traffic]:
    """Return what a rank of a pipeline stage sends in one trainer step when all responses are longest; None: its first.

    Ranks differ where the reference has stages of its own.
    """
    traffic: list[Traffic] = []
    rank = pp_rank * setup.layout.stage_size if rank is None else rank
    for model in setup.models.values():
        its = setup.for_model(model)
        traffic += update_traffic(setup, model, pp_rank)
        traffic += pass_traffic(its, model, passes_of(its, model), its.layout.coordinates(rank).pp_rank)
    return _merged(traffic)


def optimizer_steps(setup: RunSetup) -> int:
    """Return the optimizer steps of a trainer step."""
    trainer = setup.config.trainer
    return trainer.prompts_per_step // trainer.minibatch_size * setup.config.algorithm.epochs


def passes_of(setup: RunSetup, model: PlannedModel) -> Passes:
    """Return the passes of a model in a step; its log-probs or values before the update are one forward pass."""
    per_step = num_microbatches(setup) * (setup.config.trainer.prompts_per_step // setup.config.trainer.minibatch_size)
    forward = 0 if model.role == "actor" and not has_pass_for_old_logprobs(setup.config) else per_step
    return Passes(forward, num_microbatches(setup) * optimizer_steps(setup) if model.trainable else 0)


def pass_traffic(setup: RunSetup, model: PlannedModel, passes: Passes, pp_rank: int) -> list[Traffic]:
    """Return what forward and backward passes send: for layers that are cut, or for layers that are gathered."""
    if setup.spec == "hf":
        return _gathered_layers(setup, model, passes)
    layout = setup.layout
    layers = (
        Traffic(
            each.use,
            each.collective,
            _ranks(setup, each.group),
            each.forward * passes.forward + (each.forward + each.backward + each.again) * passes.training,
            stride_of(layout, each.group),
        )
        for each in stage_messages(setup, model, pp_rank)
    )
    return _merged([*layers, *_outputs(setup, passes.forward, pp_rank)])


def _outputs(setup: RunSetup, forward: int, pp_rank: int) -> Iterator[Traffic]:
    """Yield the way of log-probs or values to all ranks of a replica, after passes without gradients."""
    layout = setup.layout
    nbytes = forward * tokens_of_longest(setup) * layout.cp * FP32
    if pp_rank == layout.pp - 1:
        yield Traffic("outputs", "all-reduce", layout.cp, 2 * share(nbytes, layout.cp), stride_of(layout, "cp"))
    if layout.pp > 1:
        yield Traffic("outputs", "broadcast", layout.pp, nbytes, stride_of(layout, "pp"))


def update_traffic(setup: RunSetup, model: PlannedModel, pp_rank: int) -> list[Traffic]:
    """Return reductions of gradients and gathers of weights in all optimizer steps of a step."""
    if not model.trainable:
        return []
    if setup.spec == "hf":
        return _reduced_layers(setup, model)
    layout, par, steps = setup.layout, setup.config.engine.megatron, optimizer_steps(setup)
    if par.ddp.implementation != "ddp":
        return []
    rank = pp_rank * layout.stage_size
    traffic = []
    for stage in range(layout.vpp):
        for buffer, place in chunk_buffers(setup.sharding(model), training_of(setup, model), rank, stage):
            stride = stride_of(layout, "expert dp" if buffer.of_experts else "dp")
            gradient = buffer.numel * (FP32 if par.ddp.grad_reduce_in_fp32 else buffer.itemsize)
            sent = share(gradient, place.size) * steps
            if not buffer.distributed:
                traffic.append(Traffic("gradients", "all-reduce", place.size, 2 * sent, stride))
                continue
            traffic.append(Traffic("gradients", "reduce-scatter", place.size, sent, stride))
            weights = share(buffer.numel * buffer.itemsize, place.size) * steps
            traffic.append(Traffic("updated weights", "all-gather", place.size, weights, stride))
    return [*traffic, *_copied_parameters(setup, model, pp_rank)]


def _copied_parameters(setup: RunSetup, model: PlannedModel, pp_rank: int) -> list[Traffic]:
    """Return the sums of gradients of parameters that several ranks of a replica hold whole."""
    layout, hf, steps = setup.layout, model.hf, optimizer_steps(setup)
    reduced = FP32 if setup.config.engine.megatron.ddp.grad_reduce_in_fp32 else setup.itemsize
    traffic = []
    if hf.tied and model.head == "lm" and layout.pp > 1 and pp_rank in (0, layout.pp - 1):
        rows = padded_vocab_size(hf.vocab_size, layout.tp) // layout.tp
        sent = 2 * share(rows * hf.hidden_size * reduced, 2) * steps
        traffic.append(Traffic("tied embedding", "all-reduce", 2, sent, stride_of(layout, "embedding")))
    rank, training, sharding = pp_rank * layout.stage_size, training_of(setup, model), setup.sharding(model)
    summed = sum(
        parameter.numel
        for stage in range(layout.vpp)
        for parameter in parameters_of(sharding, training, rank, stage)
        if parameter.summed_over_tp and parameter.trained
    )
    sent = 2 * share(summed * reduced, layout.tp) * steps
    return [*traffic, Traffic("norms and other whole parameters", "all-reduce", layout.tp, sent)]


def _ranks(setup: RunSetup, group: Group) -> int:
    """Return the size of a group of a micro-batch's messages."""
    layout = setup.layout
    sizes: dict[Group, int] = {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "experts": layout.ep * layout.etp,
        "pp": layout.pp,
    }
    return sizes[group]


def _gathered_layers(setup: RunSetup, model: PlannedModel, passes: Passes) -> list[Traffic]:
    """Return the gathers of FSDP2's layers: once in a forward, twice in a training pass."""
    fsdp, ranks = setup.config.engine.fsdp, shard_ranks(setup.config, setup.machine.world_size)
    gathers = passes.forward + passes.training * (2 if fsdp.reshard_after_forward else 1)
    sent = share(_elements(model) * setup.itemsize, ranks) * gathers
    return [Traffic("weights of layers", "all-gather", ranks, sent)]


def _reduced_layers(setup: RunSetup, model: PlannedModel) -> list[Traffic]:
    """Return the reductions of FSDP2's gradients."""
    fsdp, ranks = setup.config.engine.fsdp, shard_ranks(setup.config, setup.machine.world_size)
    training = passes_of(setup, model).training
    reductions = training if fsdp.reduce_every_microbatch else optimizer_steps(setup)
    itemsize = FP32 if fsdp.grad_reduce_in_fp32 else setup.itemsize
    return [Traffic("gradients", "reduce-scatter", ranks, share(_elements(model) * itemsize, ranks) * reductions)]


def _elements(model: PlannedModel) -> int:
    return sum(parameter.rows * parameter.width for parameter in transformers_parameters(model.hf, model.head))


def _merged(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Return one entry for each use, collective and group, without empty ones."""
    merged: dict[tuple[str, str, int, int], int] = {}
    for each in traffic:
        key = (each.use, each.collective, each.ranks, each.stride)
        merged[key] = merged.get(key, 0) + each.nbytes
    return [
        Traffic(use, collective, ranks, nbytes, stride)
        for (use, collective, ranks, stride), nbytes in merged.items()
        if nbytes
    ]


def sync_traffic(setup: RunSetup) -> dict[str, int]:
    """Return the bytes of one weight sync: of the model, what a rank receives, and what leaves the trainer."""
    layout, config = setup.layout, setup.config
    model = weight_bytes(setup.actor.hf, setup.rollout_itemsize)
    pieces = layout.tp * layout.pp * (layout.ep if setup.actor.hf.moe is not None else 1)
    if setup.spec == "hf":
        pieces = config.engine.fsdp.shard_ranks or setup.machine.world_size
    gathered = round(model * (1 - 1 / pieces))
    sizes = {"model": model, "gathered by each rank": gathered}
    if config.rollout.backend == "sglang" and not setup.colocated:
        sizes["sent to the servers"] = model  # each stage's weights once, by one rank
    return sizes


def num_servers(setup: RunSetup) -> int:
    """Return the servers of a run: those that are joined, or those that each host starts, or each group of hosts."""
    sglang, machine = setup.config.rollout.sglang, setup.machine
    nodes = sglang.server.nodes
    per_host = sglang.server.count or max(1, machine.ranks_per_node // (sglang.server.tp // nodes))
    return len(sglang.urls) or per_host * (machine.num_nodes // nodes)
