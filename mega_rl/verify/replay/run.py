"""A replay on ranks of this machine: one launch for each layout, then the comparison with the record."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.gpus import gpu_for_each
from mega_rl.tracking import progress
from mega_rl.tracking.records.format import folder_of
from mega_rl.tracking.records.reader import Record, read_record
from mega_rl.verify.launcher import RanksFailed, run_ranks
from mega_rl.verify.layouts import Layout, resolve_runs
from mega_rl.verify.replay.compare import Difference, compare
from mega_rl.verify.replay.plan import ReplayPlan, recorded_config, replay_config
from mega_rl.verify.replay.weights import find_weights
from mega_rl.verify.run import RANK, working_folder

__all__ = ["Replay", "prepare", "replay_layouts", "working_folder"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replay:
    """Result of replaying a record under one layout."""

    layout: Layout
    differences: tuple[Difference, ...]  # one for each tensor that was computed again, in causal order

    @property
    def first(self) -> Difference | None:
        """Return the first tensor, in causal order, that is beyond its tolerance; None: all agree."""
        return next((difference for difference in self.differences if not difference.good), None)


@dataclass(frozen=True)
class Prepared:
    """A record with its weights in place, and the layouts to replay it under."""

    record: Record
    config: Config  # config of the recorded run
    models: dict[str, str]  # Hugging Face folder of each role
    layouts: tuple[Layout, ...]


def prepare(folder: Path, names: str, work: Path, *, weights: Path | None = None) -> Prepared:
    """Return a record that can be replayed under the layouts of a list. Raises UserError before anything is started."""
    record = read_record(folder)
    config = recorded_config(record.description)
    with progress.phase("finding the weights"):
        models = find_weights(record, config, work / "weights", given=weights)
    layouts = resolve_runs(names, read_hf_config(Path(models["actor"])))
    prepared = Prepared(record, config, models, tuple(layouts))
    for layout in layouts:
        replay_config(config, plan_of(prepared, layout, work, timeout_s=1.0))
    return prepared


def plan_of(prepared: Prepared, layout: Layout, work: Path, *, timeout_s: float) -> ReplayPlan:
    """Return the plan of one layout."""
    record = prepared.record.folder.absolute()
    return ReplayPlan(str(record), str(work / layout.name), prepared.models, layout, timeout_s)


def replay_layouts(prepared: Prepared, work: Path, *, timeout_s: float, atol: float | None = None) -> Iterator[Replay]:
    """Yield the result of each layout. Raises RunError where its ranks fail, UserError where they refuse it."""
    on_gpus = gpu_for_each(max(layout.ranks for layout in prepared.layouts))
    with progress.rounds("layout", len(prepared.layouts)) as rounds:
        for layout in prepared.layouts:
            plan = plan_of(prepared, layout, work, timeout_s=timeout_s)
            Path(plan.target).mkdir(parents=True)
            path = work / "plan.json"
            plan.write(path)
            log.info("%d rank%s: %s", layout.ranks, "s" * (layout.ranks > 1), layout.name)
            try:
                run_ranks(RANK, [str(path)], ranks=layout.ranks, logs=work, timeout_s=timeout_s, use_gpus=on_gpus)
            except RanksFailed as failure:
                kind = UserError if failure.blamed == UserError.exit_code else RunError
                raise kind(f"{layout.name}: {failure}") from failure
            yield Replay(layout, tuple(result_of(prepared.record, plan, atol=atol)))
            rounds.advance()


def result_of(record: Record, plan: ReplayPlan, *, atol: float | None = None) -> Sequence[Difference]:
    """Return the differences of a record and of what the ranks of a plan have written."""
    replayed = folder_of(Path(plan.target), record.description.step)
    if not replayed.is_dir():
        raise RunError(f"{plan.layout.name}: the ranks have written no record of the step; see their lines above")
    return compare(record, read_record(replayed), atol=atol)
