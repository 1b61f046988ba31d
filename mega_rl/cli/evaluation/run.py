"""An evaluation on this rank; imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from mega_rl.accelerator import prepare
from mega_rl.assemble.evaluation_run import evaluate
from mega_rl.config.schema import Config
from mega_rl.environment import variables_of
from mega_rl.operations.diagnosis.cause import investigate


def run(config: Config) -> Mapping[str, object]:
    """Prepare the accelerator and evaluate; returns the results."""
    variables = variables_of(config.engine, config.rollout, config.trainer)
    deepep = config.engine.megatron.moe.dispatcher == "deepep"
    return evaluate(config, prepare(config.trainer.device, variables=variables, deepep=deepep), investigate)
