"""The trainer of a run, built area by area."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import MetricsSink
from mega_rl.rewards.builtin import RewardFunction
from mega_rl.rollout.hidden_tokens import describe_zero_rows
from mega_rl.trainer.assemble.algorithms import build_algorithm, build_collector
from mega_rl.trainer.assemble.checkpoints import build_saves, open_checkpoints, restore
from mega_rl.trainer.assemble.data import build_prompts, warn_of_date, with_length
from mega_rl.trainer.assemble.load import Inputs, LoadedRun, build_evaluation, load_run, read_inputs
from mega_rl.trainer.assemble.metrics import build_meter, open_sink
from mega_rl.trainer.assemble.records import build_recorder
from mega_rl.trainer.events import DumpRollouts, SaveAndExport, Validate, Warn
from mega_rl.trainer.loop import Event, Stages, StepLog, Trainer
from mega_rl.trainer.validation import Evaluation

log = logging.getLogger(__name__)


def build_trainer(
    config: Config,
    accelerator: Accelerator,
    groups: Groups,
    *,
    stop_requested: Callable[[], bool],
    resources: ExitStack,
    reward_function: RewardFunction | None = None,
) -> Trainer:
    """Return the trainer of a run; `resources` ends servers, files of metrics and locks."""
    # Mistakes in data, rewards and attention end the run before weights are loaded and before anything is written.
    inputs = read_inputs(config, accelerator, ranks_of(groups.host_world), resources, reward_function=reward_function)
    prompts = build_prompts(config, inputs.tokens, inputs.rewards, inputs.rows, inputs.vocab_size, inputs.world)
    resources.callback(prompts.order.close)
    inputs = _with_length(inputs, len(prompts.train))
    # From here on no other run writes into this one's folder.
    checkpoints = open_checkpoints(inputs.plan.config, groups, fingerprint=prompts.fingerprint)
    resources.enter_context(checkpoints)
    run = load_run(inputs, accelerator, groups, resources, prompts=prompts.order.batch)
    done, drawn = restore(checkpoints, run, prompts, in_epochs=config.trainer.epochs > 0)
    checkpoints.move_earlier_run(Path(config.trainer.run_dir))
    sink = open_sink(run, prompts, done=done)
    resources.push(partial(_close_sink, sink))
    meter = build_meter(run, accelerator, done=done)
    stage, steps = Stages(meter, run.rollouts.devices), StepLog(sink, meter)
    batches = build_collector(run, prompts, stage, steps, drawn=drawn)
    algorithm = build_algorithm(run, stage, steps)
    saves = build_saves(run, checkpoints, batches, stage, steps, done=done, stop_requested=stop_requested)
    evaluation = build_evaluation(inputs, run, prompts.held_out, stage.hold)
    events = _build_events(run, evaluation, saves, done=done)
    return Trainer(batches, algorithm, run.rollouts.sync, events, stage, steps, run.config.trainer.steps, done)


def _with_length(inputs: Inputs, num_prompts: int) -> Inputs:
    """Return the inputs of a run whose trainer.steps are known; warn of tokenizer and vocabulary before it."""
    plan, tokens = inputs.plan, inputs.tokens
    if inputs.world.rank == 0:
        warn_of_date(tokens.tokenizer, plan.config.data.chat)
        if zero_rows := describe_zero_rows(Path(plan.config.model.path), plan.engine.hidden_tokens, tokens.stop_ids):
            log.warning("%s", zero_rows)
    config = with_length(plan.config, num_prompts, world_size=inputs.world.size)
    return replace(inputs, plan=replace(plan, config=config))


def _build_events(run: LoadedRun, evaluation: Evaluation, saves: SaveAndExport, *, done: int) -> list[Event]:
    """Return the events around steps, in this order; done: steps when the run begins."""
    trainer, metrics, tokens = run.config.trainer, run.config.metrics, run.tokens
    stage, log = saves.stage, saves.log
    dumps = DumpRollouts(
        log.sink, tokens.reader.written, tokens.render, stage,
        steps=trainer.steps, interval=metrics.rollout_interval, count=metrics.rollout_samples,
    )  # fmt: skip
    validate = Validate(evaluation, dumps, stage, log, trainer.steps, trainer.val_interval)
    recorder = build_recorder(run, stage, done=done)
    return [*([] if recorder is None else [recorder]), dumps, Warn(log), validate, saves]


def _close_sink(sink: MetricsSink, kind: type[BaseException] | None, *_: object) -> None:
    """Close the run's sinks; kind: exception type that ended the run."""
    sink.close(failed=kind is not None and not issubclass(kind, KeyboardInterrupt))
