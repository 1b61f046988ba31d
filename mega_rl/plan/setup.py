"""The run that a plan describes: settings, models by role, machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mega_rl.config.loader import load
from mega_rl.config.needs import Role, models_take_turns, requested_models, shares_devices
from mega_rl.config.rules import check
from mega_rl.config.rules.parallel import has_own_layout
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import facts_of, read_hf_config
from mega_rl.converters.plan.parameters import adapted
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.data.downloads import checkpoint_folder, checkpoint_paths
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout

_BYTES = {"bf16": 2, "fp32": 4}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class PlannedModel:
    """The model of one role."""

    role: Role
    hf: HFConfig
    head: Head
    trainable: bool


@dataclass(frozen=True)
class Machine:
    """The devices and hosts of a run."""

    world_size: int
    gpus_per_node: int = 8
    gpu_memory: int | None = None  # bytes of one device; None: not known, so there is no verdict
    has_te: bool = False  # Transformer Engine is installed
    server_link: float = 0.0  # bytes per second to a joined server; 0: as between hosts

    @property
    def num_nodes(self) -> int:
        """Return the number of hosts."""
        return -(-self.world_size // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks of a full host."""
        return min(self.world_size, self.gpus_per_node)


@dataclass(frozen=True)
class RunSetup:
    """Inputs of a plan."""

    config: Config
    checkpoints: Mapping[str, HFConfig]  # config key -> architecture; has "model.path"
    machine: Machine

    @cached_property
    def models(self) -> dict[Role, PlannedModel]:
        """Return the models of the run by role, the actor first."""
        return models_of(self.config, self.checkpoints)

    @cached_property
    def layout(self) -> ParallelLayout:
        """Return the layout of models without their own. Raises ValueError for unfit sizes."""
        has_experts = any(model.hf.moe is not None for model in self.models.values())
        engine, world_size = self.config.engine, self.machine.world_size
        return ParallelLayout.of_engine(engine, world_size=world_size, has_experts=has_experts)

    def for_model(self, model: PlannedModel) -> RunSetup:
        """Return these inputs with the layout of a model; only a reference may have its own."""
        if model.role != "reference" or not has_own_layout(self.config):
            return self
        return replace(self, config=replace(self.config, engine=self.config.engine.of_reference))

    @property
    def spec(self) -> Spec:
        """Return the layers that run: transformers', Transformer Engine's, or Megatron-Core's own."""
        if self.config.engine.backend == "fsdp":
            return "hf"
        wanted = "local" if self.config.model.adapter.rank else self.config.engine.megatron.transformer_impl
        return "te" if wanted == "transformer_engine" or (wanted == "auto" and self.machine.has_te) else "local"

    @property
    def actor(self) -> PlannedModel:
        """Return the policy."""
        return self.models["actor"]

    @property
    def itemsize(self) -> int:
        """Return the bytes of a weight or activation in training."""
        return _BYTES[self.config.model.dtype]

    @property
    def logit_itemsize(self) -> int:
        """Return the bytes of a logit in training."""
        return _BYTES["fp32"] if self.config.model.fp32_head else self.itemsize

    @property
    def rollout_itemsize(self) -> int:
        """Return the bytes of a weight in rollouts."""
        dtype = self.config.rollout.dtype
        return self.itemsize if dtype == "auto" else _BYTES[dtype]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence: prompt and response."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def colocated(self) -> bool:
        """Return whether started servers share the trainer's devices and take turns with it."""
        rollout = self.config.rollout
        return rollout.backend == "sglang" and shares_devices(rollout, self.config.trainer)

    @property
    def takes_turns(self) -> bool:
        """Return whether each model has the device to itself while it works."""
        return models_take_turns(self.config.engine, len(self.models) > 1, colocated=self.colocated)

    def sharding(self, model: PlannedModel) -> Sharding:
        """Return a model with its layout."""
        return Sharding(model.hf, self.for_model(model).layout, spec=self.spec, head=model.head)


def models_of(config: Config, checkpoints: Mapping[str, HFConfig]) -> dict[Role, PlannedModel]:
    """Return the models of a run by role; without a checkpoint it is the actor's."""
    own = {"critic": "model.critic_path", "reference": "model.ref_path", "reward": "reward.source.path"}
    models: dict[Role, PlannedModel] = {}
    for role, asked in requested_models(config).items():
        hf = checkpoints.get(own.get(role, ""), checkpoints["model.path"])
        trainable = role in ("actor", "critic")
        hf = adapted(hf, config.model.adapter, asked.head) if trainable else hf
        models[role] = PlannedModel(role, hf, asked.head, trainable=trainable)
    return models


def read_setup(recipe: Path | None, overrides: Sequence[str], machine: Machine) -> RunSetup:
    """Return the run of a recipe on a machine; reads only the config.json of each model.

    A machine with a world size of 0 gets the smallest world that the layout allows. Raises UserErrors with every
    mistake.
    """
    config = load(recipe, overrides)
    problems: list[str] = []
    if not config.model.path:
        problems.append("model.path is empty: name a folder with a config.json, or a model of the Hub")
    checkpoints: dict[str, HFConfig] = {}
    for key, path in checkpoint_paths(config).items():
        try:
            checkpoints[key] = read_hf_config(checkpoint_folder(path, label=key, weights=False))
        except UserError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
    machine = replace(machine, world_size=machine.world_size or smallest_world(config))
    facts = {key: facts_of(hf) for key, hf in checkpoints.items()}
    problems += check(config, world_size=machine.world_size, models=facts)
    if problems:
        raise UserErrors(problems)
    return RunSetup(config, checkpoints, machine)


def smallest_world(config: Config) -> int:
    """Return the fewest ranks that a layout can have."""
    if config.engine.backend == "fsdp":
        return config.engine.fsdp.shard_ranks or 1
    par = config.engine.megatron
    layouts = (par, par.of_reference) if has_own_layout(config) else (par,)
    return math.lcm(*(each.pp * math.lcm(each.tp * each.cp, each.ep * (each.etp or each.tp)) for each in layouts))


def parse_bytes(text: str) -> int:
    """Return the bytes of "80G", "80GB", "141e9" or "80GiB", of --gpu-memory. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]?I?)B?", text.strip(), re.IGNORECASE)
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 10**8 <= size <= 10**13:
        raise UserError(f"--gpu-memory={text!r}: needs a size of one GPU's memory, as 80G or 79.6GiB")
    return round(size)
