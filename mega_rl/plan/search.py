"""A search for layouts that fit, and the cheapest change that makes a run fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product

from mega_rl.config.keys import value_of, with_settings
from mega_rl.config.needs import unmet
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.config.values import divisors
from mega_rl.converters.hf.config import facts_of
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.activations import num_microbatches, recompute_of
from mega_rl.plan.cost import AGAIN
from mega_rl.plan.memory import FitVerdict, in_gb, judge
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.state import weight_bytes

_MEGATRON = "engine.megatron"
MOST_CHANGES = 4  # together
_MOST_TRIED = 200  # combinations


@dataclass(frozen=True)
class SettingChange:
    """New values of settings, and their price in speed, in steps of roughly a tenth."""

    kind: str  # changes of one kind exclude each other
    settings: Mapping[str, object]
    price: float
    gpus: int = 1  # factor on the number of devices


@dataclass(frozen=True)
class Proposal:
    """A change of settings and the verdict on the changed run."""

    settings: Mapping[str, object]
    world_size: int
    verdict: FitVerdict


def advice(setup: RunSetup, proposal: Proposal | None) -> str:
    """Return the sentence that says how to make a run fit."""
    if proposal is None:
        return "none of the changes that were tried is enough; take more GPUs, or a smaller model or shorter sequences"

    def written(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    now = {key: value_of(setup.config, key) for key in proposal.settings}
    new = ", ".join(f"{key}={written(value)} (now {written(now[key])})" for key, value in proposal.settings.items())
    words = f"set {new}"
    if proposal.world_size != setup.machine.world_size:
        words = f"take {proposal.world_size} GPUs" + (f" and set {new}" if new else "")
    peak = proposal.verdict.memory.peak
    return f"{words}: {in_gb(peak.needed)} then, while {peak.name}"


def changed(setup: RunSetup, settings: Mapping[str, object], *, gpus: int = 1) -> RunSetup:
    """Return the run with other settings; settings that lose their effect take their defaults."""
    idle = {entry.key for entry in unmet(setup.config)}
    config = with_settings(setup.config, settings)
    defaults = Config()
    for entry in unmet(config):
        if entry.key not in idle and entry.key not in settings:
            config = with_settings(config, {entry.key: value_of(defaults, entry.key)})
    machine = replace(setup.machine, world_size=setup.machine.world_size * gpus)
    return replace(setup, config=config, machine=machine)


def is_legal(setup: RunSetup) -> bool:
    """Return whether the settings fit each other, the models and the number of ranks."""
    facts = {key: facts_of(hf) for key, hf in setup.checkpoints.items()}
    return not check(setup.config, world_size=setup.machine.world_size, models=facts)


def cheapest(setup: RunSetup) -> Proposal | None:
    """Return the cheapest changes that let a run fit, None if none is enough."""
    assert setup.machine.gpu_memory is not None, "nothing fits a memory that is not known"
    options = list(possible(setup))
    first = Proposal({}, setup.machine.world_size, judge(setup))
    # (total price, order, changes, outcome): the search continues with the smallest entry.
    open_sets: list[tuple[float, int, tuple[SettingChange, ...], Proposal]] = [(0.0, 0, (), first)]
    seen: set[frozenset[int]] = set()
    while open_sets and len(seen) < _MOST_TRIED:
        _, _, chosen, proposal = heappop(open_sets)
        if proposal.verdict.fits:
            return proposal
        for option in options:
            extended = (*chosen, option)
            key = frozenset(map(id, extended))
            if key in seen or option.kind in {change.kind for change in chosen} or len(extended) > MOST_CHANGES:
                continue
            seen.add(key)
            settings = {key: value for change in extended for key, value in change.settings.items()}
            new = changed(setup, settings, gpus=max(change.gpus for change in extended))
            if is_legal(new) and (verdict := judge(new)).memory.peak.needed < proposal.verdict.memory.peak.needed:
                outcome = Proposal(settings, new.machine.world_size, verdict)
                heappush(open_sets, (sum(change.price for change in extended), len(seen), extended, outcome))
    return None


def possible(setup: RunSetup) -> Iterator[SettingChange]:
    """Yield every single change that may make a run smaller."""
    yield from _of_batches(setup)
    yield from _of_rollouts(setup)
    yield from _of_training(setup)
    if setup.config.engine.backend == "megatron":
        yield from _of_layout(setup)
    for times in (2, 4, 8, 16):
        yield SettingChange("gpus", {}, 20.0 * times, gpus=times)


def _of_batches(setup: RunSetup) -> Iterator[SettingChange]:
    micro = setup.config.trainer.microbatch
    key, size, smallest = "trainer.microbatch.size", micro.size, 1
    if micro.packing:
        key, size, smallest = "trainer.microbatch.max_tokens", micro.max_tokens, setup.longest
    price, halved = 1.0, size // 2
    while halved >= smallest:
        yield SettingChange("batch", {key: halved}, price)
        price, halved = price + 0.5, halved // 2
    rows = setup.config.rollout.hf.batch_size
    if setup.config.rollout.backend == "hf":
        for number in (2, 4, 8, 16):
            if rows // number >= 8:
                yield SettingChange("rollout", {"rollout.hf.batch_size": rows // number}, 1.0 + 0.5 * number)


def _of_rollouts(setup: RunSetup) -> Iterator[SettingChange]:
    """Yield servers instead of the embedded engine, or more ranks for a server."""
    machine, rollout = setup.machine, setup.config.rollout
    weights = weight_bytes(setup.actor.hf, setup.rollout_itemsize)
    if machine.gpu_memory is None:
        return
    server = rollout.sglang.server
    sizes = [(tp, 1) for tp in (1, 2, 4, 8, 16) if tp <= machine.ranks_per_node and machine.ranks_per_node % tp == 0]
    sizes += [(n * machine.ranks_per_node, n) for n in (2, 4, 8) if machine.num_nodes % n == 0]
    heads = setup.actor.hf.num_heads
    fitting = [(tp, n) for tp, n in sizes if weights / tp < machine.gpu_memory / 2 and heads % tp == 0]
    if not fitting or rollout.sglang.urls or rollout.backend == "none":
        return
    tp, nodes = fitting[0]
    settings: dict[str, object] = {} if tp == server.tp else {"rollout.sglang.server.tp": tp}
    if nodes != server.nodes:
        settings["rollout.sglang.server.nodes"] = nodes
    if rollout.backend == "hf":
        yield SettingChange("rollout", {"rollout.backend": "sglang", **settings}, 2.5)
    elif tp > server.tp:
        yield SettingChange("rollout", settings, 1.0 + nodes - 1)


def _of_training(setup: RunSetup) -> Iterator[SettingChange]:
    model, engine = setup.config.model, setup.config.engine
    if not setup.takes_turns and len(setup.models) > 1:
        # With the embedded engine only if servers do not help: they are the faster way for a model without room.
        price = 0.8 if setup.config.rollout.backend == "sglang" else 3.0
        yield SettingChange("turns", {"engine.resident_roles": "one"}, price)
    if model.recompute == "none" and engine.backend == "megatron":
        yield SettingChange("recompute", {"model.recompute": "selective"}, 1.0)
    if model.recompute != "full":
        yield SettingChange("recompute", {"model.recompute": "full"}, 3.3)
    if engine.backend == "fsdp":
        if not engine.fsdp.cpu_offload:
            yield SettingChange("offload", {"engine.fsdp.cpu_offload": True}, 12.0)
        return
    optimizer = engine.megatron.optimizer
    if not optimizer.distributed:
        yield SettingChange("sharding", {f"{_MEGATRON}.optimizer.distributed": True}, 0.5)
    if not optimizer.cpu_offload and not optimizer.precision_aware:
        yield SettingChange("offload", {f"{_MEGATRON}.optimizer.cpu_offload": 1.0}, 12.0)


def _of_layout(setup: RunSetup) -> Iterator[SettingChange]:
    par, machine = setup.config.engine.megatron, setup.machine
    sequence_parallel = {} if par.sequence_parallel else {f"{_MEGATRON}.sequence_parallel": True}
    if par.tp > 1 and sequence_parallel:
        yield SettingChange("tp", sequence_parallel, 0.1)
    for times in (2, 4, 8):
        price = 2.0 * times
        if par.tp * times <= machine.gpus_per_node:
            yield SettingChange("tp", {f"{_MEGATRON}.tp": par.tp * times, **sequence_parallel}, price)
        if not par.pipeline:
            yield SettingChange("pp", {f"{_MEGATRON}.pp": par.pp * times}, price + 0.5)
        yield SettingChange("cp", {f"{_MEGATRON}.cp": par.cp * times}, price + 0.7)
        if setup.actor.hf.moe is not None:
            yield SettingChange("ep", {f"{_MEGATRON}.ep": par.ep * times}, price - 0.5)


@dataclass(frozen=True)
class Candidate:
    """A layout of the run, and its costs."""

    settings: dict[str, object]
    layout: ParallelLayout
    recompute: str
    needed: int  # bytes of a device
    work: float  # relative to a step without recomputation and pipeline bubbles


def search(setup: RunSetup, *, most: int = 10) -> list[Candidate]:
    """Return at most `most` of the best layouts that fit: least work first, then least memory."""
    tried = [_candidate(setup, *each) for each in product(_sizes(setup), ("none", "selective", "full"))]
    fitting = [each for each in tried if each is not None]
    return sorted(fitting, key=lambda each: (round(each.work, 2), each.needed))[:most]


def _sizes(setup: RunSetup) -> Iterator[dict[str, int]]:
    machine, hf = setup.machine, setup.actor.hf
    tps = [tp for tp in divisors(machine.ranks_per_node) if hf.num_heads % tp == 0]
    pps = [pp for pp in divisors(hf.num_layers) if machine.world_size % pp == 0 and pp <= 64]
    cps = [cp for cp in (1, 2, 4, 8) if setup.longest >= 4096 * cp]
    experts = 1 if hf.moe is None else hf.moe.num_experts
    eps = [ep for ep in divisors(experts) if machine.world_size % ep == 0 and ep & (ep - 1) == 0]
    for tp, pp, cp, ep in product(tps, pps, cps or [1], eps):
        if machine.world_size % (tp * pp * cp) == 0 and machine.world_size // pp % ep == 0:
            yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _candidate(setup: RunSetup, sizes: dict[str, int], recompute: str) -> Candidate | None:
    """Return a layout, without vpp for another pp; None if illegal or too large."""
    par = setup.config.engine.megatron
    settings: dict[str, object] = {f"{_MEGATRON}.{name}": size for name, size in sizes.items()}
    if sizes["tp"] > 1 or par.sequence_parallel:
        settings[f"{_MEGATRON}.sequence_parallel"] = sizes["tp"] > 1
    if sizes["ep"] > 1 and par.etp == 0 and sizes["tp"] > 1:
        settings[f"{_MEGATRON}.etp"] = 1
    if sizes["pp"] != par.pp:
        settings |= {f"{_MEGATRON}.vpp": 1, f"{_MEGATRON}.pipeline": ""}
    settings["model.recompute"] = recompute
    new = changed(setup, settings)
    if not is_legal(new) or (verdict := judge(new)).fits is False:
        return None
    bubble = (new.layout.pp - 1) / (num_microbatches(new) * new.layout.vpp)
    work = (1 + AGAIN[recompute_of(new).mode]) * (1 + bubble)
    kept = {key: value for key, value in settings.items() if value != value_of(setup.config, key)}
    return Candidate(kept, new.layout, recompute, verdict.memory.peak.needed, work)
