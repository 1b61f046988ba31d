"""The lines of `mega-rl plan`: a recipe on GPUs that are given or here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.cost import hardware_of
from mega_rl.plan.preflight.checkpoints import untrained
from mega_rl.plan.preflight.host import is_missing, smallest_gpu
from mega_rl.plan.report import as_json, as_text, make_plan
from mega_rl.plan.search import search
from mega_rl.plan.setup import Machine, parse_bytes, read_setup


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command."""

    gpus: int = 0  # 0: the fewest that the layout allows
    gpus_per_node: int = 8
    gpu_memory: str = ""  # 80G; empty: memory of the GPUs here
    layers: str = "auto"  # auto, te or local
    search: bool = False
    as_json: bool = False
    gpu: str = ""  # kind of GPU, for the time of a step; empty: none is given
    rates: Sequence[str] = ()  # coefficients that replace those of the kind
    server_gpus: int = 0  # for each server that the run joins


def plan_lines(recipe: Path, overrides: Sequence[str], options: PlanOptions) -> Iterator[str]:
    """Yield the plan of a recipe, as text or as JSON. Raises UserError and UserErrors."""
    if options.layers not in ("auto", "te", "local"):
        raise UserError(
            f"--layers={options.layers!r}: legal: auto (Transformer Engine's where it is installed), te, local"
        )
    given = parse_bytes(options.gpu_memory, option="--gpu-memory") if options.gpu_memory else None
    has_te = options.layers == "te" or (options.layers == "auto" and not is_missing("transformer_engine"))
    if options.rates and not options.gpu:
        raise UserError("--rate: needs the kind of GPU whose coefficient it replaces, as --gpu h200")
    hardware = hardware_of(options.gpu, options.rates) if options.gpu else None
    if given is None and hardware is not None:
        given = round(hardware.memory)
    memory = smallest_gpu() if given is None else given
    setup = read_setup(recipe, overrides, Machine(options.gpus, options.gpus_per_node, memory, has_te))
    if problems := [f"{key}: {why}" for key, hf in setup.checkpoints.items() for why in untrained(hf)]:
        raise UserErrors(problems)  # the same errors as in training
    if options.search and setup.config.engine.backend != "megatron":
        raise UserError("--search: engine.backend=fsdp has no layouts, every rank holds a share of everything")
    if options.server_gpus and not (hardware and setup.config.rollout.sglang.urls):
        raise UserError("--server-gpus: is of servers that are joined (rollout.sglang.urls), and needs --gpu")
    plan = make_plan(
        setup,
        search=search(setup) if options.search else None,
        hardware=hardware,
        server_ranks=options.server_gpus,
    )
    yield from [json.dumps(as_json(plan), indent=2)] if options.as_json else as_text(plan)
