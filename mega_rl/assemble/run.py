"""A Config turned into a trainer with all its parts, and run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mega_rl import progress
from mega_rl.accelerator import Accelerator
from mega_rl.accelerator.determinism import deterministic
from mega_rl.assemble.history import build_checkpoints, resume, saves_nothing
from mega_rl.assemble.rewards import build_reward, prepare_reward, reward_columns
from mega_rl.assemble.roles import Roles, build_estimator, build_roles, check_attention, role_facts
from mega_rl.assemble.rollouts import Rollouts, build_rollouts, start_servers
from mega_rl.checkpoint.export import HfExports
from mega_rl.config.needs import is_on_policy
from mega_rl.config.origins import as_record
from mega_rl.config.render import resolved_yaml
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.columns import RewardColumns
from mega_rl.data.prompts import PromptSampler, fingerprint, load_prompts, split
from mega_rl.metrics.sinks import make_sink
from mega_rl.metrics.startup import show_startup
from mega_rl.metrics.summary import show_summary
from mega_rl.metrics.timers import PhaseTimer
from mega_rl.parallel import groups as process_groups
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.commits import check_commits
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline, uneven_pipeline
from mega_rl.protocols import MetricsSink, RolloutSource
from mega_rl.rollout.stop_tokens import check_stop_tokens, name_stop_tokens
from mega_rl.trainer import PPOTrainer, RunSettings
from mega_rl.trainer.experience import MinibatchPlan
from mega_rl.trainer.mismatch import MismatchGuard
from mega_rl.trainer.old_logprobs import RecomputedLogprobs, UpdateLogprobs
from mega_rl.trainer.staleness import StalenessGuard
from mega_rl.trainer.stop import StopRequest
from mega_rl.types import Prompt
from mega_rl.workers.reward_functions import RewardFunction
from mega_rl.workers.rollout import VocabularyGuard

log = logging.getLogger(__name__)


def layout_of(config: Config, *, world_size: int) -> ParallelLayout:
    """The parallel layout of a run over `world_size` ranks."""
    parallel = config.parallel
    pipeline = None
    if parallel.pipeline:
        pipeline = parse_pipeline(parallel.pipeline)
    elif parallel.first_stage_layers or parallel.last_stage_layers:
        pipeline = uneven_pipeline(
            read_hf_config(config.model.path).num_layers,
            parallel.pp * parallel.vpp,
            first=parallel.first_stage_layers,
            last=parallel.last_stage_layers,
        )
    return ParallelLayout(
        world_size=world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        ep=parallel.ep,
        etp=parallel.etp or parallel.tp,
        pipeline=pipeline,
    )


def train(config: Config, accelerator: Accelerator) -> int:
    """Train as `config` says on every rank of this job; returns the exit code (0, or 128 + signal when stopped)."""
    with running(config, accelerator) as (trainer, stop):
        done = trainer.fit()
    if os.environ.get("RANK", "0") == "0":
        show_summary(Path(config.trainer.run_dir))
        if stop.exit_code:
            log.warning("stopped after step %d of %d; the same command goes on from there", done, config.trainer.steps)
    return stop.exit_code


@contextmanager
def running(
    config: Config, accelerator: Accelerator, *, reward: RewardFunction | None = None
) -> Iterator[tuple[PPOTrainer, StopRequest]]:
    """Yield the trainer of a run with all its parts, and the request that stops it; all of it ends with the block.

    reward: scores responses in place of the function that the config names.
    """
    with session(config, accelerator) as groups, ExitStack() as resources:
        check_commits(config.origins, GroupRanks(groups.world))
        stop = StopRequest(GroupRanks(groups.world))
        resources.callback(stop.restore)
        with progress.phase("preparing the run"):
            trainer = build_trainer(
                config, accelerator, groups, stop_requested=stop, resources=resources, reward_function=reward
            )
        yield trainer, stop
        resources.callback(progress.begin("closing files and servers").end)


@contextmanager
def session(config: Config, accelerator: Accelerator) -> Iterator[Groups]:
    """The process groups of a run, taken down at the end."""
    layout = layout_of(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    with deterministic(config.trainer.deterministic):
        with progress.phase(f"connecting {layout.world_size} ranks"):
            groups = process_groups.initialize(
                layout,
                accelerator=accelerator,
                timeout_s=config.trainer.timeout_s,
                optimizer_instances=config.ddp.optimizer_instances,
            )
        try:
            process_groups.seed_model_parallel(config.trainer.seed, groups)
            yield groups
        finally:
            process_groups.destroy()


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
) -> PPOTrainer:
    """Return every part of a run, connected; `resources` ends what must end with it: servers, files of metrics.

    reward_function: in place of the one that the config names.
    """
    # Mistakes in data, rewards and attention are found before the weights are loaded, and before anything is written.
    world = GroupRanks(groups.world)
    is_writer = world.rank == 0
    check_attention(config, accelerator)
    with progress.phase("reading the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
        stop_ids = check_stop_tokens(config, tokenizer, is_writer=is_writer)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    reward = prepare_reward(config, tokenizer, decode, reward_function)
    with progress.phase("reading and tokenizing the data", announce=True):
        train, held_out = load_data(
            config,
            tokenizer,
            vocab_size=read_hf_config(config.model.path).vocab_size,
            columns=reward_columns(config, reward),
        )
    if is_writer and len(train) < config.trainer.prompts_per_step:
        log.warning(
            "the data have %d prompts, fewer than trainer.prompts_per_step=%d: a step has some of them more than once",
            *(len(train), config.trainer.prompts_per_step),
        )
    checkpoints = build_checkpoints(config, groups, data_fingerprint=fingerprint(train))
    resources.enter_context(checkpoints)  # from here on no other run writes into this one's folder
    servers = start_servers(config, accelerator, world, resources)  # they come up while the models are built
    roles = build_roles(config, accelerator, groups)

    actor = roles.actor_engine
    run_dir = Path(config.trainer.run_dir)
    prompts = PromptSampler(
        train,
        batch_size=config.trainer.prompts_per_step,
        shuffle=config.data.shuffle,
        seed=config.trainer.seed,
    )
    checkpoints.add_engine("actor", actor)
    if roles.critic_engine is not None:
        checkpoints.add_engine("critic", roles.critic_engine)
    with progress.phase("preparing the rollout engine"):
        rollouts = build_rollouts(
            config,
            accelerator,
            world,
            servers,
            roles,
            checkpoints=checkpoints,
            prompts=prompts.batch,
            resources=resources,
        )
    if rollouts.pending is not None:
        checkpoints.add_rank_state("rollout", rollouts.pending)
    start = resume(checkpoints, roles.kl, rollouts.sync, steps=config.trainer.steps)
    checkpoints.move_earlier_run(run_dir)
    guard = MismatchGuard(
        limit=config.rollout.logprob_diff_limit,
        ranks=actor.data_parallel,
        current=(lambda: rollouts.sync.weight_version) if config.trainer.async_steps else None,
    )
    if is_writer:
        if saves_nothing(config):
            log.warning("this run saves nothing: its weights are lost at its end; set checkpoint.save_final=true")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(resolved_yaml(config))
    metrics = make_sink(
        config.metrics,
        run_dir,
        is_writer=is_writer,
        resume_step=start + 1,
        total_steps=config.trainer.steps,
        settings=as_record(config),
        has_reference=roles.reference_engine is not None,
    )
    resources.push(partial(_close_metrics, metrics))
    if is_writer:
        show_startup(role_facts(config, roles), stop_tokens=name_stop_tokens(tokenizer, stop_ids))
    return PPOTrainer(
        settings=run_settings(config),
        prompts=prompts,
        val_prompts=held_out,
        rollout=_known_tokens(rollouts.source, roles, world),
        reward=build_reward(
            config,
            reward,
            roles.reward_engine,
            decode=decode,
            replica=actor.replica,
            everyone=world,
        ),
        actor=roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=build_estimator(config, roles.kl),
        minibatches=minibatch_plan(config),
        kl=roles.kl,
        staleness=StalenessGuard(
            limit=config.trainer.async_steps, ranks=actor.data_parallel, current=lambda: rollouts.sync.weight_version
        ),
        old_logprobs=UpdateLogprobs(guard) if is_on_policy(config) else RecomputedLogprobs(roles.actor, guard),
        sync=rollouts.sync,
        ranks=actor.data_parallel,
        timer=PhaseTimer(synchronize=accelerator.synchronize),
        metrics=metrics,
        checkpoints=rollouts.checkpoints,
        export=_exporter(config, roles, rollouts, world),
        decode=decode,
        render=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
        stop_requested=stop_requested,
        start=start,
    )


def _close_metrics(metrics: MetricsSink, kind: type[BaseException] | None, *_: object) -> None:
    """Close the run's sinks; `kind` is of the exception that ends it, where a second Ctrl-C is no failure."""
    metrics.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))


def _known_tokens(source: RolloutSource, roles: Roles, everyone: GroupRanks) -> RolloutSource:
    """The source, watched where a model that reads its tokens has a smaller vocabulary than the actor."""
    readers = [engine for engine in (roles.critic_engine, roles.reference_engine) if engine is not None]
    smallest = min(readers, key=lambda engine: engine.sharding.hf.vocab_size, default=roles.actor_engine)
    vocab_size = smallest.sharding.hf.vocab_size
    if vocab_size >= roles.actor_engine.sharding.hf.vocab_size:
        return source
    return VocabularyGuard(source, vocab_size=vocab_size, reader=smallest.name, everyone=everyone)


def _exporter(config: Config, roles: Roles, rollouts: Rollouts, world: GroupRanks) -> Callable[[int], None]:
    """Return the function that writes the actor as a Hugging Face checkpoint, given the number of steps done."""
    exports = HfExports(
        engine=roles.actor_engine,
        root=Path(config.trainer.run_dir) / "hf",
        source=Path(config.model.path),
        ranks=world,
        on_error=config.checkpoint.on_error,
    )

    def export(done: int) -> None:
        with rollouts.on_device():
            exports(done)

    return export


def run_settings(config: Config) -> RunSettings:
    """What the loop itself needs to know."""
    return RunSettings(
        steps=config.trainer.steps,
        val_interval=config.trainer.val_interval,
        save_interval=config.checkpoint.save_interval,
        save_final=config.checkpoint.save_final,
        hf_interval=config.checkpoint.hf_interval,
        hf_final=config.checkpoint.hf_final,
        rollout_interval=config.metrics.rollout_interval,
        rollout_samples=config.metrics.rollout_samples,
    )


def minibatch_plan(config: Config) -> MinibatchPlan:
    """How a step's batch is cut."""
    return MinibatchPlan(
        minibatch_size=config.trainer.minibatch_size,
        epochs=config.algorithm.epochs,
        aggregation=config.algorithm.loss_aggregation,
        max_response_tokens=config.rollout.max_new_tokens,
        seed=config.trainer.seed,
    )


def load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, columns: RewardColumns
) -> tuple[list[Prompt], Sequence[Prompt]]:
    """Return (training prompts, held-out prompts), each with the columns that the reward reads."""
    data = config.data
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        chat_template=data.chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
        system_prompt=data.system_prompt,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        malformed=data.malformed_rows,
        reward_columns=columns,
        vocab_size=vocab_size,
    )
    prompts = load(data.train_files)
    if data.val_files:
        return prompts, load(data.val_files)
    return split(prompts, data.val_size, seed=config.trainer.seed)
