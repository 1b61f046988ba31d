"""The plan of a run as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from mega_rl.config.facts import divisors, listed
from mega_rl.plan.cost import Hardware, StepTime, step_time
from mega_rl.plan.memory import (
    CONTEXT,
    FRAGMENTATION,
    FitVerdict,
    RankMemory,
    embedded,
    host_bytes,
    in_gb,
    judge,
    memory_of_stages,
    server_of,
)
from mega_rl.plan.parameters import weight_bytes
from mega_rl.plan.passes import num_microbatches, tokens_of_a_pass
from mega_rl.plan.search import Candidate, Proposal, advice, cheapest, largest_batch, largest_rollout, nearby
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.traffic import Traffic, optimizer_steps, step_traffic, sync_traffic

_LAYERS = {"hf": "transformers' layers", "te": "Transformer Engine's layers", "local": "Megatron-Core's own layers"}


@dataclass(frozen=True)
class MemoryPlan:
    """Contents of a plan."""

    setup: RunSetup
    memory: Sequence[RankMemory]
    verdict: FitVerdict
    proposal: Proposal | None
    host: dict[str, int]
    traffic: Sequence[Traffic]  # from the first rank of the fullest stage
    sync: dict[str, int]
    nearby: Sequence[Candidate] = field(default_factory=list)
    search: Sequence[Candidate] | None = None  # None: not asked for
    time: StepTime | None = None  # None: the kind of GPU is not given


def make_plan(
    setup: RunSetup,
    *,
    search: Sequence[Candidate] | None = None,
    hardware: Hardware | None = None,
    server_ranks: int = 0,
) -> MemoryPlan:
    """Return the plan of a legal run; with `hardware` the time of a step, too.

    server_ranks: GPUs of each server that the run joins; 0: not known, so generation has no time.
    """
    memory = memory_of_stages(setup)
    verdict = judge(setup, memory)
    return MemoryPlan(
        setup,
        memory,
        verdict,
        cheapest(setup) if verdict.fits is False else None,
        host_bytes(setup, memory),
        step_traffic(setup, verdict.memory.pp_rank, rank=verdict.memory.rank),
        sync_traffic(setup),
        nearby(setup),
        search,
        None if hardware is None else step_time(setup, hardware, server_ranks=server_ranks, memory=memory),
    )


def as_text(plan: MemoryPlan) -> Iterator[str]:
    """Yield the lines of a plan: the verdict first, then tables of memory, batches, layouts and traffic."""
    yield _headline(plan.setup)
    if plan.setup.actor.hf.quantization is not None:
        yield f"Weights on disk are {plan.setup.actor.hf.quantization}: a run takes a checkpoint converted to bf16"
    yield f"Verdict: {plan.verdict.sentence}"
    if plan.verdict.fits is False:
        yield f"Cheapest change: {advice(plan.setup, plan.proposal)}"
    yield ""
    yield f"Memory of rank {plan.verdict.memory.rank}, which is the fullest, in GB. Needed is more than the sum:"
    yield f"{FRAGMENTATION:.0%} for fragmentation, and {CONTEXT / 1e9:.0f} GB for CUDA, NCCL and cuBLAS."
    phases = plan.verdict.memory.phases
    columns = list(dict.fromkeys(name for phase in phases for name, size in phase.entries.items() if size))
    rows = [[each.name, gb(each.needed), *(gb(each.entries.get(name, 0)) for name in columns)] for each in phases]
    yield from table(["phase", "needed", *columns], rows)
    if len(plan.memory) > 1:
        yield ""
        yield "Pipeline stages, GB needed"
        rows = [[f"{each.pp_rank}", f"{each.rank}", gb(each.peak.needed), each.peak.name] for each in plan.memory]
        yield from table(["stage", "rank", "needed", "while"], rows)
    yield ""
    yield "State by model, GB"
    states = plan.verdict.memory.states.items()
    rows = [[role, gb(own.weights), gb(own.gradients), gb(own.optimizer), gb(own.host)] for role, own in states]
    yield from table(["model", "weights", "gradients", "optimizer", "on the host"], rows)
    if plan.host:
        entries = ", ".join(f"{name} {in_gb(size)}" for name, size in plan.host.items())
        yield f"Host memory of the fullest host: {in_gb(sum(plan.host.values()))} ({entries})"
    yield ""
    yield from _batch_lines(plan.setup)
    yield from _candidate_lines("Layouts near by", plan.nearby)
    if plan.search is not None:
        yield from _candidate_lines("Layouts that fit, least work first", plan.search, empty="no layout fits")
    yield f"Sent by rank {plan.verdict.memory.rank} in a step, GB, when every response is as long as it may be"
    rows = [[each.use, each.collective, f"{each.ranks}", gb(each.nbytes)] for each in plan.traffic]
    yield from table(["use", "collective", "ranks", "GB"], rows)
    yield f"Each weight sync: {', '.join(f'{name} {in_gb(size)}' for name, size in plan.sync.items())}"
    if plan.time is not None:
        yield ""
        yield from _time_lines(plan.setup, plan.time)


def as_json(plan: MemoryPlan) -> dict[str, object]:
    """Return the plan as JSON's types; sizes are bytes."""
    setup, phase, proposal, time = plan.setup, plan.verdict.phase, plan.proposal, plan.time
    return {
        "world_size": setup.machine.world_size,
        "gpu_memory": setup.machine.gpu_memory,
        "layout": str(setup.layout),
        "layers": setup.spec,
        "fits": plan.verdict.fits,
        "verdict": plan.verdict.sentence,
        "peak": {"rank": plan.verdict.memory.rank, "phase": phase.name, "needed": phase.needed},
        "cheapest_change": None
        if proposal is None
        else {
            "settings": dict(proposal.settings),
            "world_size": proposal.world_size,
            "needed": proposal.verdict.phase.needed,
        },
        "ranks": [
            {
                "rank": each.rank,
                "pp_rank": each.pp_rank,
                "state": {role: asdict(state) for role, state in each.states.items()},
                "phases": {
                    one.name: {"needed": one.needed, "total": one.total, "entries": one.entries} for one in each.phases
                },
            }
            for each in plan.memory
        ],
        "host": plan.host,
        "batch": {
            "tokens_of_a_micro_batch": tokens_of_a_pass(setup),
            "micro_batches": num_microbatches(setup),
            "optimizer_steps": optimizer_steps(setup),
        },
        "nearby": [_candidate_json(each) for each in plan.nearby],
        "search": None if plan.search is None else [_candidate_json(each) for each in plan.search],
        "traffic": [asdict(each) for each in plan.traffic],
        "weight_sync": plan.sync,
        "time": None
        if time is None
        else {
            "seconds": time.total,
            "tokens": time.tokens,
            "training_mfu": time.mfu,
            "phases": {phase.name: dict(phase.parts) for phase in time.phases},
        },
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, numbers to the right."""
    padded = []
    for number, (title, *cells) in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, [title, *cells]))
        is_number = number > 0 and all(cell[:1].isdigit() or cell in ("-", "") for cell in cells)
        padded.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in (title, *cells)])
    for row in zip(*padded, strict=True):
        yield "  " + "  ".join(row).rstrip()


def gb(nbytes: float) -> str:
    """Return gigabytes with two digits, "-" for nothing."""
    return f"{nbytes / 1e9:,.2f}" if nbytes else "-"


def _headline(setup: RunSetup) -> str:
    hf, machine = setup.actor.hf, setup.machine
    memory = "" if machine.gpu_memory is None else f" of {in_gb(machine.gpu_memory)}"
    parameters = weight_bytes(hf, 1) / 1e9
    own = ((role, setup.for_model(model)) for role, model in setup.models.items())
    own_layouts = "".join(f"; {role} {each.layout}" for role, each in own if each is not setup)
    return (
        f"{setup.config.model.path}: {hf.family}, {hf.num_layers} layers, {parameters:,.2f} B parameters; "
        f"{machine.world_size} GPU{'s' * (machine.world_size > 1)}{memory} on {machine.num_nodes} "
        f"host{'s' * (machine.num_nodes > 1)}, {setup.layout}, {_LAYERS[setup.spec]}{own_layouts}"
    )


def _batch_lines(setup: RunSetup) -> Iterator[str]:
    trainer, dp = setup.config.trainer, setup.layout.dp
    yield "Batches"
    yield f"  micro-batch: {tokens_of_a_pass(setup):,} tokens on a rank, {num_microbatches(setup)} in a mini-batch"
    if setup.machine.gpu_memory is not None:
        largest = largest_batch(setup)
        yield "  largest that fits: " + ("none" if largest is None else f"{largest[0]}={largest[1]}")
    if setup.config.rollout.backend == "hf":
        fits = largest_rollout(setup)
        note = "" if fits is None else f"; largest rollout.hf.batch_size that fits: {fits}"
        yield f"  generation: {embedded(setup)[0]} sequences together on a rank{note}"
    elif setup.config.rollout.backend == "sglang":
        _, cache, sequences = server_of(setup)
        yield f"  servers: cache of {sequences} sequences of full length, {in_gb(cache)} on a device"
    if setup.config.rollout.source.name != "single_turn":
        yield f"  rollout.source={setup.config.rollout.source}: its own work is not counted"
    yield f"  legal: trainer.prompts_per_step a multiple of {dp}; trainer.minibatch_size one of "
    yield f"    {listed(divisors(trainer.prompts_per_step))}"
    yield ""


def _candidate_lines(title: str, candidates: Sequence[Candidate], *, empty: str = "") -> Iterator[str]:
    if not candidates and not empty:
        return
    yield title
    rows = [
        [
            str(each.layout),
            each.recompute,
            gb(each.verdict.phase.needed),
            {True: "fits", False: "too large", None: ""}[each.verdict.fits],
            f"{each.work:.2f}",
            gb(each.sent),
        ]
        for each in candidates
    ]
    if rows:
        yield from table(["layout", "recompute", "GB needed", "", "work", "GB sent"], rows)
    else:
        yield f"  {empty}"
    yield ""


def _time_lines(setup: RunSetup, time: StepTime) -> Iterator[str]:
    yield f"Expected time of a step: {seconds(time.total)}, {time.tokens / time.total:,.0f} tokens per second"
    rows = []
    for each in time.phases:  # with the parts that take at least a hundredth of it, longest first
        parts = sorted(each.parts.items(), key=lambda entry: -entry[1])
        spent = ", ".join(f"{name} {seconds(needed)}" for name, needed in parts if needed >= 0.01 * each.total)
        rows.append([each.name, seconds(each.total), spent])
    yield from table(["phase", "time", "spent on"], rows)
    phase, part, longest = time.bottleneck
    yield f"Training reaches {time.mfu:.0%} of the peak. Longest: {part} while {phase}, {longest / time.total:.0%}"
    if setup.config.rollout.sglang.urls and not time.phases[0].parts:
        yield "Generation has no time: give the GPUs of each joined server as --server-gpus 8"


def seconds(time: float) -> str:
    """Return a time as "0.3 s" or "1,204 s"."""
    return f"{time:,.1f} s" if time < 100 else f"{time:,.0f} s"


def _candidate_json(candidate: Candidate) -> dict[str, object]:
    return {
        "layout": str(candidate.layout),
        "settings": candidate.settings,
        "recompute": candidate.recompute,
        "needed": candidate.verdict.phase.needed,
        "fits": candidate.verdict.fits,
        "work": candidate.work,
        "sent": candidate.sent,
    }
