"""Plan of a run, decided once from its Config and the machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mega_rl.config.attention import Role, requested_attention
from mega_rl.config.choices import has_reference, needs_critic
from mega_rl.config.schema import Config
from mega_rl.converters.plan.sharding import Head
from mega_rl.engines.base import EngineSettings, ModelEngine, ModelRequest
from mega_rl.engines.build import build_engine, resolve_model
from mega_rl.engines.models.attention_choice import check_one_backend
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.rollout.hidden_tokens import hidden_tokens

log = logging.getLogger(__name__)

TRAINED_ROLES: tuple[Role, ...] = ("actor", "critic")
_HEADS: dict[Role, Head] = {"actor": "lm", "critic": "value", "reference": "lm", "reward": "value"}


@dataclass(frozen=True)
class RunPlan:
    """A run before anything is built: settings, models by role, dtype of rollouts."""

    config: Config
    engine: EngineSettings
    models: Mapping[Role, ModelRequest]
    rollout_dtype: torch.dtype


def plan_run(config: Config, accelerator: Accelerator) -> RunPlan:
    """Return the plan of a run on this machine.

    Raises:
        UserError: a model cannot run as the config asks, or not with the others in one process.
    """
    settings, device_type = engine_settings(config), accelerator.device.type
    models = {role: _model_of(config, role, settings, device_type, _HEADS[role]) for role in roles_of(config)}
    if any(model.impl == "te" for model in models.values()):
        check_one_backend({role: requested_attention(config, role) for role in models})
    elif (
        device_type == "cuda"
        and config.engine.backend == "megatron"
        and config.engine.megatron.transformer_impl == "auto"
    ):
        log.info("Transformer Engine is not installed: Megatron-Core's own layers run instead, which are slower")
    rollout_dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    return RunPlan(config, settings, models, DTYPES[rollout_dtype])


def build_actor(
    config: Config, groups: Groups, accelerator: Accelerator, *, head: Head = "lm", trainable: bool = True
) -> ModelEngine:
    """Return the engine of `config.model.path` only, with its weights loaded; collective. Raises UserError."""
    settings = engine_settings(config)
    model = _model_of(config, "actor", settings, accelerator.device.type, head)
    return build_engine(replace(model, trainable=trainable), settings=settings, groups=groups, accelerator=accelerator)


def _model_of(config: Config, role: Role, settings: EngineSettings, device_type: str, head: Head) -> ModelRequest:
    """Return the model of a role as its engine is asked for it. Raises UserError."""
    return resolve_model(
        role,
        checkpoint_of(config, role),
        head=head,
        trainable=role in TRAINED_ROLES,
        settings=settings,
        attention=requested_attention(config, role),
        device_type=device_type,
    )


def engine_settings(config: Config) -> EngineSettings:
    """Return the settings of a run that its engines read."""
    own_sampler = config.rollout.backend == "none"  # a user's engine may sample any token
    hidden = () if own_sampler else hidden_tokens(Path(config.model.path), config.rollout.stop_token_ids)
    return EngineSettings(
        engine=config.engine,
        model=config.model,
        optim=config.optim,
        microbatch=config.trainer.microbatch,
        deterministic=config.trainer.deterministic,
        timeout_s=config.trainer.timeout_s,
        temperature=config.rollout.temperature,
        export_bucket_bytes=config.rollout.bucket_mib << 20,
        hidden_tokens=hidden,
    )


def roles_of(config: Config) -> list[Role]:
    """Return the roles of a run that are models."""
    there: dict[Role, bool] = {
        "actor": True,
        "critic": needs_critic(config),
        "reference": has_reference(config),
        "reward": config.reward.source.name == "model",
    }
    return [role for role, is_there in there.items() if is_there]


def checkpoint_of(config: Config, role: Role) -> Path:
    """Return the checkpoint that the model of a role comes from."""
    model = config.model
    paths: dict[Role, str] = {
        "actor": model.path,
        "critic": model.critic_path or model.path,
        "reference": model.ref_path or model.path,
        "reward": config.reward.model_path,
    }
    return Path(paths[role])
