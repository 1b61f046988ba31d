"""Changes of settings that need less memory, cheapest first, and the cheapest combination that makes a run fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from mega_rl.config.keys import value_of, with_settings
from mega_rl.config.needs import has_several_models, unmet
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import facts_of
from mega_rl.plan.generation import weight_bytes
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.verdict import FitVerdict, judge

MOST_CHANGES = 4  # together
_MOST_TRIED = 200  # combinations


@dataclass(frozen=True)
class SettingChange:
    """New values of settings, and their price: what it costs in speed, in steps of roughly a tenth."""

    kind: str  # changes of one kind exclude each other
    settings: Mapping[str, object]
    price: float
    gpus: int = 1  # so many times as many devices


@dataclass(frozen=True)
class Proposal:
    """A change that makes a run fit."""

    settings: Mapping[str, object]
    world_size: int
    verdict: FitVerdict

    def words(self, before: RunSetup) -> str:
        """Return the change as a sentence would give it."""
        new = ", ".join(
            f"{key}={_written(value)} (now {_written(value_of(before.config, key))})"
            for key, value in self.settings.items()
        )
        if self.world_size == before.machine.world_size:
            return f"set {new}"
        return f"take {self.world_size} GPUs" + (f" and set {new}" if new else "")


def changed(setup: RunSetup, settings: Mapping[str, object], *, gpus: int = 1) -> RunSetup:
    """Return the run with other settings; those that lose their effect by it take their defaults."""
    idle = {entry.key for entry in unmet(setup.config)}
    config = with_settings(setup.config, settings)
    defaults = Config()
    for entry in unmet(config):
        if entry.key not in idle and entry.key not in settings:
            config = with_settings(config, {entry.key: value_of(defaults, entry.key)})
    machine = replace(setup.machine, world_size=setup.machine.world_size * gpus)
    return replace(setup, config=config, machine=machine)


def is_legal(setup: RunSetup) -> bool:
    """Return whether the settings go together with each other, with the models and with the number of ranks."""
    facts = {key: facts_of(hf) for key, hf in setup.checkpoints.items()}
    return not check(setup.config, world_size=setup.machine.world_size, models=facts)


def cheapest(setup: RunSetup) -> Proposal | None:
    """Return the cheapest changes that let a run fit, None if those that are tried do not.

    Changes are added one by one, those of the lowest price together first, and only where they lower the peak.
    """
    assert setup.machine.gpu_memory is not None, "nothing fits a memory that is not known"
    options = list(possible(setup))
    # (price together, order, changes): what is tried next comes first
    open_sets: list[tuple[float, int, tuple[SettingChange, ...]]] = [(0.0, 0, ())]
    needed: dict[tuple[int, ...], int] = {(): judge(setup).phase.needed}
    seen: set[frozenset[int]] = set()
    while open_sets and len(seen) < _MOST_TRIED:
        _, _, chosen = heappop(open_sets)
        proposal = _proposal(setup, chosen)
        if proposal.verdict.fits:
            return proposal
        for option in options:
            extended = (*chosen, option)
            key = frozenset(map(id, extended))
            if key in seen or option.kind in {change.kind for change in chosen} or len(extended) > MOST_CHANGES:
                continue
            seen.add(key)
            peak = _peak(setup, extended)
            if peak is not None and peak < needed[tuple(map(id, chosen))]:
                needed[tuple(map(id, extended))] = peak
                heappush(open_sets, (sum(change.price for change in extended), len(seen), extended))
    return None


def _together(setup: RunSetup, chosen: Sequence[SettingChange]) -> RunSetup:
    settings = {key: value for change in chosen for key, value in change.settings.items()}
    return changed(setup, settings, gpus=max((change.gpus for change in chosen), default=1))


def _peak(setup: RunSetup, chosen: Sequence[SettingChange]) -> int | None:
    """Return what the fullest phase needs after some changes; None where they are not legal."""
    new = _together(setup, chosen)
    return judge(new).phase.needed if is_legal(new) else None


def _proposal(setup: RunSetup, chosen: Sequence[SettingChange]) -> Proposal:
    new = _together(setup, chosen)
    settings = {key: value for change in chosen for key, value in change.settings.items()}
    return Proposal(settings, new.machine.world_size, judge(new))


def possible(setup: RunSetup) -> Iterator[SettingChange]:
    """Yield every single change of a run that may make it smaller."""
    yield from _of_batches(setup)
    yield from _of_rollouts(setup)
    yield from _of_training(setup)
    if setup.config.engine.backend == "megatron":
        yield from _of_layout(setup)
    for times in (2, 4, 8, 16):
        yield SettingChange("gpus", {}, 20.0 * times, gpus=times)


def _of_batches(setup: RunSetup) -> Iterator[SettingChange]:
    micro = setup.config.trainer.microbatch
    key, size = "trainer.microbatch.max_tokens", micro.max_tokens
    if not micro.packing:
        key, size = "trainer.microbatch.size", micro.size
    smallest = setup.longest if micro.packing else 1
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
    """Yield servers in place of the embedded engine, or more ranks for a server, with room for half a device."""
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
    if not setup.takes_turns and has_several_models(setup.config):
        # Beside the embedded engine only where servers do not help: a model for which it has no room is served faster.
        price = 0.8 if setup.config.rollout.backend == "sglang" else 3.0
        yield SettingChange("turns", {"engine.resident_roles": "one"}, price)
    if model.recompute == "none" and engine.backend == "megatron":
        yield SettingChange("recompute", {"model.recompute": "selective"}, 1.0)
    if model.recompute != "full":
        yield SettingChange("recompute", {"model.recompute": "full"}, 3.3)
    elif model.recompute_layers:
        yield SettingChange("recompute", {"model.recompute_layers": 0}, 1.0)
    if engine.backend == "fsdp":
        if not engine.fsdp.cpu_offload:
            yield SettingChange("offload", {"engine.fsdp.cpu_offload": True}, 12.0)
        if engine.fsdp.shard_ranks:
            yield SettingChange("sharding", {"engine.fsdp.shard_ranks": 0}, 1.0)
        return
    optimizer = engine.megatron.optimizer
    if not optimizer.distributed:
        yield SettingChange("sharding", {"engine.megatron.optimizer.distributed": True}, 0.5)
    if not optimizer.cpu_offload and not optimizer.precision_aware:
        yield SettingChange("offload", {"engine.megatron.optimizer.cpu_offload": 1.0}, 12.0)


def _of_layout(setup: RunSetup) -> Iterator[SettingChange]:
    par, machine = setup.config.engine.megatron, setup.machine
    if par.tp > 1 and not par.sequence_parallel:
        yield SettingChange("tp", {"engine.megatron.sequence_parallel": True}, 0.1)
    for times in (2, 4, 8):
        price = 2.0 * times
        if par.tp * times <= machine.gpus_per_node:
            settings: dict[str, object] = {"engine.megatron.tp": par.tp * times}
            if not par.sequence_parallel:
                settings["engine.megatron.sequence_parallel"] = True
            yield SettingChange("tp", settings, price)
        if not par.pipeline:
            yield SettingChange("pp", {"engine.megatron.pp": par.pp * times}, price + 0.5)
        yield SettingChange("cp", {"engine.megatron.cp": par.cp * times}, price + 0.7)
        if setup.actor.hf.moe is not None:
            yield SettingChange("ep", {"engine.megatron.ep": par.ep * times}, price - 0.5)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
