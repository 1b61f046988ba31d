"""Layouts and batch sizes near by, and the search for layouts of a world that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mega_rl.config.facts import divisors
from mega_rl.config.keys import value_of
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.changes import changed, is_legal
from mega_rl.plan.cost import AGAIN
from mega_rl.plan.passes import num_microbatches, recompute_of
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.traffic import step_traffic
from mega_rl.plan.verdict import FitVerdict, judge

_TOKENS = 1024  # step of the search for the largest micro-batch
_MEGATRON = "engine.megatron"


@dataclass(frozen=True)
class Candidate:
    """A layout of the run, and what it costs."""

    settings: dict[str, object]
    layout: ParallelLayout
    recompute: str
    verdict: FitVerdict
    work: float  # of a step, against one without recomputation and pipeline bubbles
    sent: int  # bytes that the busiest end of the pipeline sends in a step


def largest_batch(setup: RunSetup) -> tuple[str, int] | None:
    """Return (key, value) of the largest micro-batch that fits, in steps of 1024 tokens; None if none does."""
    micro = setup.config.trainer.microbatch
    key, step, first = "trainer.microbatch.max_tokens", _TOKENS, -(-setup.longest // _TOKENS)
    if not micro.packing:
        key, step, first = "trainer.microbatch.size", 1, 1
    if not _fits(setup, key, first * step):
        return None
    low, high = first, first + 1
    while _fits(setup, key, high * step) and high * step < 2**21:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(setup, key, middle * step) else (low, middle)
    return key, low * step


def largest_rollout(setup: RunSetup) -> int | None:
    """Return the most sequences that the embedded engine can generate together; None if not one fits."""
    key, rows = "rollout.hf.batch_size", setup.config.rollout.hf.batch_size
    if setup.config.rollout.backend != "hf" or setup.machine.gpu_memory is None:
        return None
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if size <= max(rows, 256)]
    return max((size for size in sizes if _fits(setup, key, size)), default=None)


def _fits(setup: RunSetup, key: str, value: int) -> bool:
    return bool(judge(changed(setup, {key: value})).fits)


def nearby(setup: RunSetup) -> list[Candidate]:
    """Return the legal layouts of the same devices that differ in one or two sizes by a factor of two."""
    if setup.config.engine.backend != "megatron":
        return []
    par = setup.config.engine.megatron
    sizes = {name: getattr(par, name) for name in ("tp", "pp", "cp", "ep")}
    moves: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        moves += [{name: value} for value in (size // 2, size * 2) if value]
        moves += [{name: size * 2, other: sizes[other] // 2} for other in sizes if other != name and sizes[other] > 1]
    candidates = [_candidate(setup, {**sizes, **move}, setup.config.model.recompute) for move in moves]
    return [candidate for candidate in candidates if candidate is not None]


def search(setup: RunSetup, *, most: int = 10) -> list[Candidate]:
    """Return the best layouts that fit, at most so many: least work first, then least traffic.

    Every legal tp within a host, pp, cp up to 8 and ep, with and without recomputation. Raises ValueError where the
    engine has no layouts.
    """
    if setup.config.engine.backend != "megatron":
        raise ValueError("engine.backend=fsdp has no layouts to search: every rank holds a share of everything")
    candidates: list[Candidate] = []
    for sizes, recompute in product(_sizes(setup), ("none", "selective", "full")):
        candidate = _candidate(setup, sizes, recompute)
        if candidate is not None and candidate.verdict.fits is not False:
            candidates.append(candidate)
    return sorted(candidates, key=lambda each: (round(each.work, 2), each.sent))[:most]


def _sizes(setup: RunSetup) -> Iterator[dict[str, int]]:
    machine, hf = setup.machine, setup.actor.hf
    tps = [tp for tp in divisors(machine.ranks_per_node) if hf.num_heads % tp == 0]
    pps = [pp for pp in divisors(hf.num_layers) if machine.world_size % pp == 0 and pp <= 64]
    cps = [cp for cp in (1, 2, 4, 8) if setup.longest >= 4096 * cp]
    eps = [1]
    if hf.moe is not None:
        eps = [ep for ep in divisors(hf.moe.num_experts) if machine.world_size % ep == 0 and ep & (ep - 1) == 0]
    for tp, pp, cp, ep in product(tps, pps, cps or [1], eps):
        if machine.world_size % (tp * pp * cp) == 0 and machine.world_size // pp % ep == 0:
            yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _candidate(setup: RunSetup, sizes: dict[str, int], recompute: str) -> Candidate | None:
    """Return a layout judged; None where it is not legal. Its pipeline is even and its virtual stages are kept."""
    par = setup.config.engine.megatron
    settings: dict[str, object] = {f"{_MEGATRON}.{name}": size for name, size in sizes.items()}
    if sizes["tp"] > 1:
        settings[f"{_MEGATRON}.sequence_parallel"] = True
    elif par.sequence_parallel:
        settings[f"{_MEGATRON}.sequence_parallel"] = False
    if sizes["ep"] > 1 and par.etp == 0 and sizes["tp"] > 1:
        settings[f"{_MEGATRON}.etp"] = 1
    if sizes["pp"] != par.pp:
        settings |= {f"{_MEGATRON}.vpp": 1, f"{_MEGATRON}.overlap_p2p": False, f"{_MEGATRON}.pipeline": ""}
    settings["model.recompute"] = recompute
    new = changed(setup, settings)
    if not is_legal(new):
        return None
    verdict = judge(new)
    pp = new.layout.pp
    bubble = (pp - 1) / (num_microbatches(new) * new.layout.vpp)
    again = AGAIN[recompute_of(new).mode]
    sent = 0
    if verdict.fits is not False:
        sent = max(sum(each.nbytes for each in step_traffic(new, rank)) for rank in {0, pp - 1})
    kept = {key: value for key, value in settings.items() if value != value_of(setup.config, key)}
    return Candidate(kept, new.layout, recompute, verdict, (1 + again) * (1 + bubble), sent)
