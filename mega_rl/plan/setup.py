"""The run that a plan describes: its settings, its models by role, and the machine that it is to run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mega_rl.config.attention import Role
from mega_rl.config.needs import models_take_turns
from mega_rl.config.plugins.choices import has_reference, needs_critic
from mega_rl.config.rules.reference import has_own_layout
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.parallel.layout import ParallelLayout

_BYTES = {"bf16": 2, "fp32": 4}


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
    gpu_memory: int | None = None  # bytes of one device; None: not known, and nothing is judged
    has_te: bool = False  # Transformer Engine is installed there

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
    checkpoints: Mapping[str, HFConfig]  # by config key, "model.path" among them
    machine: Machine

    @cached_property
    def models(self) -> dict[Role, PlannedModel]:
        """Return the models of the run by role, the actor first."""
        return models_of(self.config, self.checkpoints)

    @cached_property
    def layout(self) -> ParallelLayout:
        """Return the layout of every model without its own. Raises ValueError for sizes that do not go together."""
        has_experts = any(model.hf.moe is not None for model in self.models.values())
        engine, world_size = self.config.engine, self.machine.world_size
        return ParallelLayout.of_engine(engine, world_size=world_size, has_experts=has_experts)

    def for_model(self, model: PlannedModel) -> RunSetup:
        """Return these inputs with the layout of a model: another one for a reference that has its own."""
        if model.role != "reference" or not has_own_layout(self.config):
            return self
        return replace(self, config=replace(self.config, engine=self.config.engine.of_reference))

    @property
    def spec(self) -> Spec:
        """Return whose layers run: those of transformers, of Transformer Engine, or Megatron-Core's own."""
        if self.config.engine.backend == "fsdp":
            return "hf"
        wanted = self.config.engine.megatron.transformer_impl
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
        sglang = self.config.rollout.sglang
        if self.config.rollout.backend != "sglang":
            return False
        if sglang.placement == "auto":
            return not sglang.urls and not self.config.trainer.async_steps
        return sglang.placement == "colocated"

    @property
    def takes_turns(self) -> bool:
        """Return whether each model has the device to itself while it works."""
        return models_take_turns(self.config, colocated=self.colocated)

    def sharding(self, model: PlannedModel) -> Sharding:
        """Return a model with its layout."""
        return Sharding(model.hf, self.for_model(model).layout, spec=self.spec, head=model.head)


def models_of(config: Config, checkpoints: Mapping[str, HFConfig]) -> dict[Role, PlannedModel]:
    """Return the models of a run by role; `checkpoints` maps config keys to architectures and has at least the actor's.

    A role without a checkpoint of its own has the actor's.
    """
    actor = checkpoints["model.path"]
    models: dict[Role, PlannedModel] = {"actor": PlannedModel("actor", actor, "lm", trainable=True)}
    if needs_critic(config):
        models["critic"] = PlannedModel("critic", checkpoints.get("model.critic_path", actor), "value", trainable=True)
    if has_reference(config):
        models["reference"] = PlannedModel("reference", checkpoints.get("model.ref_path", actor), "lm", trainable=False)
    if config.reward.source == "model":
        models["reward"] = PlannedModel("reward", checkpoints.get("reward.model.path", actor), "value", trainable=False)
    return models
