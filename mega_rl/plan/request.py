"""From a recipe and options to the run that is planned; every mistake is reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mega_rl.config.facts import divisors, listed
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.rules.reference import has_own_layout
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import facts_of, read_hf_config
from mega_rl.data.hub.resolve import checkpoint_folder
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.setup import Machine, RunSetup

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


def read_setup(recipe: Path | None, overrides: Sequence[str], machine: Machine) -> RunSetup:
    """Return the run of a recipe on a machine; of the models only config.json is read, downloaded where it must be.

    A machine with a world size of 0 gets the smallest world that the layout allows. Raises UserErrors with every
    mistake.
    """
    config = load(recipe, overrides)
    checkpoints, problems = _checkpoints(config)
    machine = replace(machine, world_size=machine.world_size or smallest_world(config))
    facts = {key: facts_of(hf) for key, hf in checkpoints.items()}
    problems += check(config, world_size=machine.world_size, models=facts)
    problems += server_hosts(config, machine)
    if problems:
        raise UserErrors(problems)
    return RunSetup(config, checkpoints, machine)


def server_hosts(config: Config, machine: Machine) -> list[str]:
    """Return why servers that the run starts do not fit the machine's hosts."""
    server = config.rollout.sglang.server
    if config.rollout.backend != "sglang" or config.rollout.sglang.urls or server.tp % server.nodes:
        return []
    given, hosts, gpus = f"rollout.sglang.server.nodes={server.nodes}", machine.num_nodes, machine.gpus_per_node
    ranks = server.tp // server.nodes
    if hosts % server.nodes:
        legal = listed(divisors(hosts))
        return [f"{given}: the run has {hosts} host(s), and each server takes {server.nodes} of them; legal: {legal}"]
    if ranks > gpus:
        return [
            f"rollout.sglang.server.tp={server.tp} with {given}: a server has {ranks} ranks on each of its hosts, "
            f"which have {gpus} GPUs; raise nodes to {-(-server.tp // gpus)}, or lower tp"
        ]
    return []


def smallest_world(config: Config) -> int:
    """Return the fewest ranks that a layout can have."""
    if config.engine.backend == "fsdp":
        return config.engine.fsdp.shard_ranks or 1
    par = config.engine.megatron
    layouts = (par, par.of_reference) if has_own_layout(config) else (par,)
    return math.lcm(*(each.pp * math.lcm(each.tp * each.cp, each.ep * (each.etp or each.tp)) for each in layouts))


def parse_bytes(text: str, *, option: str) -> int:
    """Return the bytes of "80G", "80GB", "141e9" or "80GiB". Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]?I?)B?", text.strip(), re.IGNORECASE)
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 10**8 <= size <= 10**13:
        raise UserError(f"{option}={text!r}: needs a size of one GPU's memory, as 80G or 79.6GiB")
    return round(size)


def _checkpoints(config: Config) -> tuple[dict[str, HFConfig], list[str]]:
    """Return the architecture of every checkpoint that the run names, and why others cannot be read."""
    model, reward = config.model, config.reward
    paths = {"model.path": model.path, "model.ref_path": model.ref_path, "model.critic_path": model.critic_path}
    if reward.source == "model":
        paths["reward.model.path"] = reward.model.path
    problems = [] if model.path else ["model.path is empty: name a folder with a config.json, or a model of the Hub"]
    checkpoints: dict[str, HFConfig] = {}
    for key, path in paths.items():
        if not path:
            continue
        try:
            folder = checkpoint_folder(path, label=key, weights=False)
            checkpoints[key] = read_hf_config(folder)
        except UserError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
    return checkpoints, problems
