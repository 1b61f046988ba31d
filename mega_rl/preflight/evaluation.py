"""Settings of an evaluation without training, from those of a recipe, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mega_rl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    CurriculumConfig,
    DataConfig,
    DynamicSamplingConfig,
    MetricsConfig,
    MixtureConfig,
    ModelConfig,
    OptimConfig,
    OverlongConfig,
    ReferenceLayoutConfig,
    StreamConfig,
    TrainerConfig,
)
from mega_rl.errors import UserError
from mega_rl.preflight.launcher import launched_world_size
from mega_rl.preflight.run import check_run

SAMPLES, RESULTS = "samples.jsonl", "results.json"


def checked(config: Config, *, world_size: int | None, out: str, launchers: int = 1) -> Config:
    """Return `evaluation_config` of a config, with which an evaluation can start; arguments as of `check_run`.

    Raises UserErrors with every mistake found, one line each; UserError for a folder that holds another's samples.
    """
    size = launched_world_size() if world_size is None else world_size
    earlier = [name for name in (SAMPLES, RESULTS) if (Path(out) / name).exists()]
    if earlier:
        raise UserError(
            f"--out={out}: holds {' and '.join(earlier)} of an earlier evaluation, which this one would replace; name "
            "another folder, or remove them"
        )
    own = evaluation_config(config, world_size=size, out=out)
    if not (own.data.val_files or own.validation.sets):
        raise UserError("there are no prompts to evaluate on; name a file, as --data gsm8k=gsm8k_test.jsonl")
    return check_run(own, world_size=size, launchers=launchers, trains=False)


def evaluation_config(config: Config, *, world_size: int, out: str) -> Config:
    """Return the config that evaluates `model.path` on the held-out prompts of `config` and writes into `out`.

    Of the model, the layout, rollouts, rewards and data nothing changes; what only training reads takes its default.
    Without a temperature of its own, several samples of a prompt are drawn at that of rollouts.
    """
    model, val, data = config.model, config.validation, config.data
    megatron = config.engine.megatron
    length = val.max_new_tokens or config.rollout.max_new_tokens
    temperature = config.rollout.temperature if val.n > 1 and val.temperature == 0 else val.temperature
    return replace(
        config,
        model=ModelConfig(
            path=model.path,
            dtype=model.dtype,
            fp32_head=model.fp32_head,
            attn_implementation=model.attn_implementation,
        ),
        engine=replace(
            config.engine,
            megatron=replace(
                megatron, moe=replace(megatron.moe, routing_replay=False), reference=ReferenceLayoutConfig()
            ),
        ),
        optim=OptimConfig(),
        algorithm=AlgorithmConfig(advantage="reinforce_plus_plus"),  # needs no other model
        data=_held_out(data),
        rollout=replace(
            config.rollout,
            n=1,
            max_new_tokens=length,
            dynamic_sampling=DynamicSamplingConfig(),
            sglang=replace(config.rollout.sglang, partial_rollout=False, return_routing=False),
        ),
        reward=replace(config.reward, overlong=OverlongConfig()),
        validation=replace(val, temperature=temperature, max_new_tokens=0),
        checkpoint=CheckpointConfig(resume="never"),
        metrics=MetricsConfig(progress_bar=config.metrics.progress_bar),
        trainer=_trainer(config, world_size=world_size, out=out, longest=data.max_prompt_tokens + length),
    )


def _trainer(config: Config, *, world_size: int, out: str, longest: int) -> TrainerConfig:
    """Return the settings of one step that trains nothing; longest: tokens of a prompt and its response."""
    trainer = config.trainer
    micro = trainer.microbatch
    return TrainerConfig(
        run_dir=out,
        steps=1,
        prompts_per_step=world_size,
        minibatch_size=world_size,
        seed=trainer.seed,
        val_interval=1,
        device=trainer.device,
        deterministic=trainer.deterministic,
        timeout_s=trainer.timeout_s,
        microbatch=replace(
            micro,
            max_tokens=max(micro.max_tokens, 2 * longest if micro.packing else 1),
            skip_zero_advantages=False,
        ),
    )


def _held_out(data: DataConfig) -> DataConfig:
    """Return the data of an evaluation: held-out files alone."""
    return replace(
        data,
        source="files",
        source_settings={},
        val_size=0,
        train_files=[],
        mixture=MixtureConfig(),
        curriculum=CurriculumConfig(),
        stream=StreamConfig(),
    )
