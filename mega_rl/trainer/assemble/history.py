"""History of a run: its checkpoints, the identity that they must match, and the one that it resumes from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from mega_rl.algorithms.kl import KLController
from mega_rl.checkpoint.identity import run_identity
from mega_rl.checkpoint.random_state import RandomState
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.config.origins import as_record, recorded
from mega_rl.config.schema import Config
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import WeightSync
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def build_checkpoints(config: Config, groups: Groups, *, data_fingerprint: str) -> RunCheckpoints:
    """Open the run's checkpoint folder with the identity that a checkpoint must match; without engines yet.

    Collective. Raises UserError on all ranks.
    """
    ranks = ranks_of(groups.host_world)
    named, local = recorded(config).data, config.data
    names = [*named.train_files, *named.mixture.files()]
    files = dict(zip(names, [*local.train_files, *local.mixture.files()], strict=True))
    known = {"seed": config.trainer.seed, "data": data_fingerprint, "engine": config.engine.backend}
    return RunCheckpoints(
        root=Path(config.trainer.run_dir) / "checkpoints",
        engines={},
        ranks=ranks,
        settings=config.checkpoint,
        identity=run_identity(known, Path(config.model.path), files, sampled=local.stream.rows > 0, ranks=ranks),
        layout=str(groups.layout),
        config=as_record(config),
        rank_states={"random": RandomState()},
    )


class Restored(NamedTuple):
    """Position that a run starts at."""

    steps: int = 0  # done
    prompts_drawn: int = 0


def resume(
    checkpoints: RunCheckpoints, kl: KLController, sync: WeightSync, *, steps: int, prompts_per_step: int, length: str
) -> Restored:
    """Restore the latest checkpoint and return the position that it had come to; zeros when the run starts afresh.

    `steps` of the run are all that there are to do. prompts_per_step: drawn by each step of a checkpoint of a version
    that kept no number. length: the setting that says how long the run is.
    """
    with progress.phase("reading the checkpoint"):
        checkpoint = checkpoints.restore()
    if checkpoint is None:
        return Restored()
    kl.restore(checkpoint.state["kl"])
    sync.resume_at(checkpoint.state["weight_version"])
    log.info("resumed after step %d", checkpoint.step)
    if checkpoint.step >= steps:
        log.info(
            "step %d of %d is done: nothing is left to train; raise %s to train on", checkpoint.step, steps, length
        )
    return Restored(checkpoint.step, int(checkpoint.state.get("prompts_drawn", checkpoint.step * prompts_per_step)))


def saves_nothing(config: Config) -> bool:
    """Return whether a run that is not stopped ends without a checkpoint and without its weights."""
    settings = config.checkpoint
    return not (settings.save_final or settings.save_interval or settings.hf_final or settings.hf_interval)
