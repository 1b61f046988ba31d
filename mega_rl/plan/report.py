"""The plan of a run as text and as JSON, for `mega-rl plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_rl.config.needs import updates_of_a_batch
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.activations import num_microbatches, tokens_of_a_pass
from mega_rl.plan.cost import HARDWARE, Hardware, StepTime, Traffic, step_time, step_traffic, sync_seconds, sync_traffic
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
from mega_rl.plan.preflight.checkpoints import untrained
from mega_rl.plan.preflight.host import is_missing, smallest_gpu
from mega_rl.plan.search import Candidate, Proposal, advice, cheapest, search
from mega_rl.plan.setup import Machine, RunSetup, parse_bytes, read_setup
from mega_rl.plan.state import weight_bytes
from mega_rl.rollout.sglang.weights.reshard import TYPICAL_CHANGES
from mega_rl.tracking.progress import aligned

_LAYERS = {"hf": "transformers' layers", "te": "Transformer Engine's layers", "local": "Megatron-Core's own layers"}


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a legal run."""

    setup: RunSetup
    memory: list[RankMemory]  # one rank of each pipeline stage
    verdict: FitVerdict
    proposal: Proposal | None  # the cheapest change for a run that does not fit
    traffic: Sequence[Traffic]  # messages of the fullest rank
    time: StepTime | None  # None without a kind of GPU
    candidates: Sequence[Candidate] | None  # layouts that fit; None: not asked for


def plan_of(
    setup: RunSetup,
    *,
    candidates: Sequence[Candidate] | None = None,
    hardware: Hardware | None = None,
    server_ranks: int = 0,
) -> MemoryPlan:
    """Return the plan of a legal run; server_ranks: GPUs of each joined server, 0: not known."""
    memory = memory_of_stages(setup)
    verdict = judge(setup, memory)
    proposal = cheapest(setup) if verdict.fits is False else None
    traffic = step_traffic(setup, verdict.memory.pp_rank, rank=verdict.memory.rank)
    time = None if hardware is None else step_time(setup, hardware, server_ranks=server_ranks, memory=memory)
    return MemoryPlan(setup, memory, verdict, proposal, traffic, time, candidates)


def read_machine(
    gpus: int, gpus_per_node: int, *, gpu: str, gpu_memory: str, layers: str, server_link: float
) -> Machine:
    """Return the machine of the command's options, by default with the memory of GPUs here; server_link: Gbit/s."""
    if layers not in ("auto", "te", "local"):
        raise UserError(f"--layers={layers!r}: legal: auto (Transformer Engine's where it is installed), te, local")
    if gpu and gpu not in HARDWARE:
        raise UserError(f"--gpu={gpu!r}: legal: {', '.join(HARDWARE)}")
    has_te = layers == "te" or (layers == "auto" and not is_missing("transformer_engine"))
    if gpu_memory:
        memory: int | None = parse_bytes(gpu_memory)
    else:
        memory = round(HARDWARE[gpu].memory) if gpu else smallest_gpu()
    return Machine(gpus, gpus_per_node, memory, has_te, server_link * 1e9 / 8)


def plan_recipe(
    recipe: Path, overrides: Sequence[str], machine: Machine, *, searched: bool, gpu: str, server_ranks: int
) -> MemoryPlan:
    """Return the plan of a recipe on a machine. Raises UserError and UserErrors."""
    setup = read_setup(recipe, overrides, machine)
    if problems := [f"{key}: {why}" for key, hf in setup.checkpoints.items() for why in untrained(hf)]:
        raise UserErrors(problems)  # the same errors as in training
    if searched and setup.config.engine.backend != "megatron":
        raise UserError("--search: engine.backend=fsdp has no layouts, every rank holds a share of everything")
    if server_ranks and not (gpu and setup.config.rollout.sglang.urls):
        raise UserError("--server-gpus: is of servers that are joined (rollout.sglang.urls), and needs --gpu")
    if machine.server_link and not setup.config.rollout.sglang.urls:
        raise UserError("--server-link: is of servers that are joined (rollout.sglang.urls), and there are none")
    candidates = search(setup) if searched else None
    return plan_of(setup, candidates=candidates, hardware=HARDWARE.get(gpu), server_ranks=server_ranks)


def as_text(plan: MemoryPlan) -> Iterator[str]:
    """Yield the lines of a plan: the verdict, then memory, batches, layouts, traffic and time."""
    setup, fullest = plan.setup, plan.verdict.memory
    yield _headline(setup)
    if setup.actor.hf.quantization is not None:
        yield f"Weights on disk are {setup.actor.hf.quantization}: they are decoded as they are read"
    yield f"Verdict: {plan.verdict.sentence}"
    if plan.verdict.fits is False:
        yield f"Cheapest change: {advice(setup, plan.proposal)}"
    yield ""
    yield f"Memory of rank {fullest.rank}, which is the fullest, in GB. Needed is more than the sum:"
    yield f"{FRAGMENTATION:.0%} for fragmentation, and {CONTEXT / 1e9:.0f} GB for CUDA, NCCL and cuBLAS."
    columns = list(dict.fromkeys(name for phase in fullest.phases for name, size in phase.entries.items() if size))
    rows = [
        [each.name, gb(each.needed), *(gb(each.entries.get(name, 0)) for name in columns)] for each in fullest.phases
    ]
    yield from table(["phase", "needed", *columns], rows)
    if len(plan.memory) > 1:
        yield ""
        yield "Pipeline stages, GB needed"
        rows = [[f"{each.pp_rank}", f"{each.rank}", gb(each.peak.needed), each.peak.name] for each in plan.memory]
        yield from table(["stage", "rank", "needed", "while"], rows)
    host = host_bytes(setup, plan.memory)
    if host:
        entries = ", ".join(f"{name} {in_gb(size)}" for name, size in host.items())
        yield f"Host memory of the fullest host: {in_gb(sum(host.values()))} ({entries})"
    yield ""
    yield from _batch_lines(setup)
    if plan.candidates is not None:
        yield "Layouts that fit, least work first" if plan.candidates else "No layout fits"
        rows = [[str(each.layout), each.recompute, gb(each.needed), f"{each.work:.2f}"] for each in plan.candidates]
        yield from table(["layout", "recompute", "GB needed", "work"], rows)
        yield ""
    yield f"Sent by rank {fullest.rank} in a step, GB, when every response is as long as it may be"
    rows = [[each.use, each.collective, f"{each.ranks}", gb(each.nbytes)] for each in plan.traffic]
    yield from table(["use", "collective", "ranks", "GB"], rows)
    yield f"Each weight sync: {', '.join(f'{name} {in_gb(size)}' for name, size in sync_traffic(setup).items())}"
    if setup.machine.server_link:
        times = sync_seconds(setup, setup.machine.server_link)
        yield f"Over the link to a server: {', '.join(f'{name} {seconds(needed)}' for name, needed in times.items())}"
        if "changes" in times:
            yield f"  {min(times, key=times.__getitem__)} are faster, if changes are {TYPICAL_CHANGES:.0%} of the bytes"
    if plan.time is not None:
        yield ""
        yield from _time_lines(setup, plan.time)


def as_json(plan: MemoryPlan) -> dict[str, object]:
    """Return the plan as JSON's types; sizes are bytes."""
    setup, verdict, proposal, time = plan.setup, plan.verdict, plan.proposal, plan.time
    return {
        **{"world_size": setup.machine.world_size, "gpu_memory": setup.machine.gpu_memory},
        **{"layout": str(setup.layout), "layers": setup.spec, "fits": verdict.fits, "verdict": verdict.sentence},
        "cheapest_change": proposal and {"settings": proposal.settings, "world_size": proposal.world_size},
        "ranks": [
            {
                **{"rank": each.rank, "pp_rank": each.pp_rank},
                "state": {role: asdict(state) for role, state in each.states.items()},
                "phases": {one.name: {"needed": one.needed, "entries": one.entries} for one in each.phases},
            }
            for each in plan.memory
        ],
        "host": host_bytes(setup, plan.memory),
        "search": plan.candidates
        and [
            {**{"settings": each.settings, "recompute": each.recompute}, **{"needed": each.needed, "work": each.work}}
            for each in plan.candidates
        ],
        "traffic": [asdict(each) for each in plan.traffic],
        "weight_sync": sync_traffic(setup),
        "weight_sync_seconds": sync_seconds(setup, link) if (link := setup.machine.server_link) else None,
        "time": time and {"seconds": time.total, "training_mfu": time.mfu, "phases": time.phases},
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"  {line}" for line in aligned(head, rows))


def gb(nbytes: float) -> str:
    """Return gigabytes with two digits, "-" for nothing."""
    return f"{nbytes / 1e9:,.2f}" if nbytes else "-"


def _headline(setup: RunSetup) -> str:
    hf, machine = setup.actor.hf, setup.machine
    memory = "" if machine.gpu_memory is None else f" of {in_gb(machine.gpu_memory)}"
    own = ((role, setup.for_model(model)) for role, model in setup.models.items())
    own_layouts = "".join(f"; {role} {each.layout}" for role, each in own if each is not setup)
    return (
        f"{setup.config.model.path}: {hf.family}, {hf.num_layers} layers, {weight_bytes(hf, 1) / 1e9:,.2f} B "
        f"parameters; {machine.world_size} GPU{'s' * (machine.world_size > 1)}{memory} on {machine.num_nodes} "
        f"host{'s' * (machine.num_nodes > 1)}, {setup.layout}, {_LAYERS[setup.spec]}{own_layouts}"
    )


def _batch_lines(setup: RunSetup) -> Iterator[str]:
    rollout, steps = setup.config.rollout, updates_of_a_batch(setup.config)
    yield "Batches"
    yield f"  {steps} optimizer steps of {num_microbatches(setup)} micro-batches of {tokens_of_a_pass(setup):,} tokens"
    if rollout.backend == "hf":
        yield f"  generation: {embedded(setup)[0]} sequences together on a rank"
    elif rollout.backend == "sglang":
        _, cache, sequences = server_of(setup)
        yield f"  servers: cache of {sequences} sequences of full length, {in_gb(cache)} on a device"
    if rollout.source.name != "single_turn":
        yield f"  rollout.source={rollout.source}: its own work is not counted"
    yield ""


def _time_lines(setup: RunSetup, time: StepTime) -> Iterator[str]:
    yield f"Expected time of a step: {seconds(time.total)}, {time.tokens / time.total:,.0f} tokens per second"
    rows = []
    for name, its in time.phases.items():  # with the parts that take at least a hundredth of it, longest first
        parts, total = sorted(its.items(), key=lambda entry: -entry[1]), sum(its.values())
        spent = ", ".join(f"{part} {seconds(needed)}" for part, needed in parts if needed >= 0.01 * total)
        rows.append([name, seconds(total), spent])
    yield from table(["phase", "time", "spent on"], rows)
    yield f"Training reaches {time.mfu:.0%} of the peak"
    if setup.config.rollout.sglang.urls and not time.phases["generating"]:
        yield "Generation has no time: give the GPUs of each joined server as --server-gpus 8"


def seconds(time: float) -> str:
    """Return a time as "0.3 s" or "1,204 s"."""
    return f"{time:,.1f} s" if time < 100 else f"{time:,.0f} s"
