"""Bytes that one rank sends in a step, by collective, and those of each weight sync.

Of an all-gather or reduce-scatter over d ranks a rank sends (d - 1) / d of the whole tensor, of an all-reduce twice
that, of an all-to-all what does not stay; less is impossible, and ring algorithms send as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.plan.generation import weight_bytes
from mega_rl.plan.passes import num_microbatches, recompute_of, tokens_of_a_pass
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state.fsdp import shard_ranks, transformers_parameters
from mega_rl.plan.state.ranks import chunk_buffers, training_of

FP32 = 4


@dataclass(frozen=True)
class Traffic:
    """One kind of message."""

    use: str
    collective: str
    ranks: int  # of its group
    nbytes: int  # that a rank sends in a step


@dataclass(frozen=True)
class Passes:
    """Passes over micro-batches in one step."""

    forward: int  # without gradients
    training: int


def step_traffic(setup: RunSetup, pp_rank: int) -> list[Traffic]:
    """Return what the first rank of a pipeline stage sends in one trainer step when all responses are longest."""
    traffic: list[Traffic] = []
    for model in setup.models.values():
        passes = _passes(setup, model)
        traffic += _gradient_traffic(setup, model, pp_rank)
        if setup.spec != "hf":
            traffic += _layer_traffic(setup, model, passes, pp_rank)
    merged: dict[tuple[str, str, int], int] = {}
    for each in traffic:
        key = (each.use, each.collective, each.ranks)
        merged[key] = merged.get(key, 0) + each.nbytes
    return [Traffic(*key, nbytes) for key, nbytes in merged.items() if nbytes]


def optimizer_steps(setup: RunSetup) -> int:
    """Return the optimizer steps of a trainer step."""
    trainer = setup.config.trainer
    return trainer.prompts_per_step // trainer.minibatch_size * setup.config.algorithm.epochs


def _passes(setup: RunSetup, model: PlannedModel) -> Passes:
    """Return the passes of a model in a step; its log-probs or values before the update are one forward pass."""
    per_step = num_microbatches(setup) * (setup.config.trainer.prompts_per_step // setup.config.trainer.minibatch_size)
    algorithm, steps = setup.config.algorithm, optimizer_steps(setup)
    is_free = model.role == "actor" and algorithm.old_logprobs == "auto" and steps == 1
    is_free = is_free and algorithm.kl.placement != "reward"
    forward = 0 if is_free else per_step
    return Passes(forward, num_microbatches(setup) * steps if model.trainable else 0)


def _gradient_traffic(setup: RunSetup, model: PlannedModel, pp_rank: int) -> list[Traffic]:
    """Return reductions of gradients and gathers of weights over data parallelism."""
    if setup.spec == "hf":
        return _fsdp_traffic(setup, model)
    layout, par, steps = setup.layout, setup.config.engine.megatron, optimizer_steps(setup)
    rank = pp_rank * layout.stage_size
    if not model.trainable or par.ddp.implementation != "ddp":
        return []
    traffic = []
    for stage in range(layout.vpp):
        for buffer, place in chunk_buffers(setup.sharding(model), training_of(setup, model), rank, stage):
            gradient = buffer.numel * (FP32 if par.ddp.grad_reduce_in_fp32 else buffer.itemsize)
            sent = _share(gradient, place.size) * steps
            if not buffer.distributed:
                traffic.append(Traffic("gradients", "all-reduce", place.size, 2 * sent))
                continue
            traffic.append(Traffic("gradients", "reduce-scatter", place.size, sent))
            weights = _share(buffer.numel * buffer.itemsize, place.size) * steps
            traffic.append(Traffic("updated weights", "all-gather", place.size, weights))
    return traffic


def _fsdp_traffic(setup: RunSetup, model: PlannedModel) -> list[Traffic]:
    """Return the gathers and reductions of FSDP2: weights twice in a training pass, gradients once."""
    fsdp, ranks = setup.config.engine.fsdp, shard_ranks(setup.config, setup.machine.world_size)
    numel = sum(parameter.rows * parameter.width for parameter in transformers_parameters(model.hf, model.head))
    passes = _passes(setup, model)
    gathers = passes.forward + passes.training * (2 if fsdp.reshard_after_forward else 1)
    reductions = passes.training if fsdp.reduce_every_microbatch else optimizer_steps(setup)
    reduced = FP32 if fsdp.grad_reduce_in_fp32 else setup.itemsize
    return [
        Traffic("weights of layers", "all-gather", ranks, _share(numel * setup.itemsize, ranks) * gathers),
        Traffic("gradients", "reduce-scatter", ranks, _share(numel * reduced, ranks) * reductions * model.trainable),
    ]


def _layer_traffic(setup: RunSetup, model: PlannedModel, passes: Passes, pp_rank: int) -> list[Traffic]:
    """Return what tensor, context, expert and pipeline parallelism send for the layers of a stage."""
    layout, hf, b = setup.layout, model.hf, setup.itemsize
    tokens = tokens_of_a_pass(setup)
    numbers = [i for stage in range(layout.vpp) for i in layout.layers_of(pp_rank, hf.num_layers, stage)]
    hidden = tokens * hf.hidden_size * b
    again = recompute_of(setup).mode == "full"
    # A layer has two such points in a forward, two in a backward, and two more in a forward that runs again.
    points = len(numbers) * 2 * (passes.forward + passes.training * (3 if again else 2))
    traffic = []
    if layout.tp > 1:
        ring = _share(hidden, layout.tp)
        if layout.sequence_parallel:
            # The backward gathers the input of column-parallel layers once more, for the weights' gradients.
            gathers = points + len(numbers) * 2 * passes.training
            traffic.append(Traffic("tensor parallelism", "all-gather", layout.tp, ring * gathers))
            traffic.append(Traffic("tensor parallelism", "reduce-scatter", layout.tp, ring * points))
        else:
            traffic.append(Traffic("tensor parallelism", "all-reduce", layout.tp, 2 * ring * points))
    if layout.cp > 1 and hf.mla is None:
        keys = tokens * 2 * max(hf.num_kv_heads // layout.tp, 1) * hf.head_dim * b * (layout.cp - 1)
        traffic.append(Traffic("context parallelism", "gathers of keys and values", layout.cp, keys * points // 2))
    mixtures = sum(hf.is_moe(i) for i in numbers)
    if hf.moe is not None and layout.ep * layout.etp > 1:
        share = 1 / layout.tp if layout.sequence_parallel else 1.0
        routed = round(tokens * share * hf.moe.top_k * hf.hidden_size * b)
        sent = _share(routed, layout.ep) * points * mixtures // max(len(numbers), 1)
        traffic.append(Traffic("experts", "all-to-all", layout.ep, sent))
    if layout.pp > 1:
        traffic += _pipeline_traffic(setup, passes, hidden, pp_rank)
    return traffic


def _pipeline_traffic(setup: RunSetup, passes: Passes, hidden: int, pp_rank: int) -> list[Traffic]:
    """Return the hidden states that a stage passes on and the gradients that it passes back."""
    layout = setup.layout
    per_message = hidden // layout.tp if layout.sequence_parallel else hidden
    ahead = layout.vpp if pp_rank < layout.pp - 1 else layout.vpp - 1
    back = layout.vpp if pp_rank > 0 else layout.vpp - 1
    messages = (passes.forward + passes.training) * ahead + passes.training * back
    return [Traffic("pipeline", "send", layout.pp, per_message * messages)]


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
        sizes["sent to all servers"] = model * num_servers(setup)
    return sizes


def num_servers(setup: RunSetup) -> int:
    """Return the servers of a run: those that are joined, or those that each host starts."""
    sglang, machine = setup.config.rollout.sglang, setup.machine
    per_host = sglang.server.count or max(1, machine.ranks_per_node // sglang.server.tp)
    return len(sglang.urls) or per_host * machine.num_nodes


def _share(nbytes: int, ranks: int) -> int:
    return nbytes * (ranks - 1) // ranks
