"""A lockstep on each layout: the real run on ranks of this machine, then the independent trainer on its record."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config.keys import flat
from mega_rl.config.schema import Config
from mega_rl.errors import RunError, UserError
from mega_rl.tracking import progress
from mega_rl.verify.launcher import RanksFailed, run_ranks
from mega_rl.verify.layouts import Layout, resolve_runs, stages_of
from mega_rl.verify.plan import REFERENCE, RUNS
from mega_rl.verify.rl.compare import follow, off
from mega_rl.verify.rl.faults import FAULTS, SHARED, Fault
from mega_rl.verify.rl.inputs import LockstepRun, algorithm_run, with_layout
from mega_rl.verify.rl.model import read_architecture, write_inputs
from mega_rl.verify.rl.reading import ALGORITHMS, lockstep_settings
from mega_rl.verify.rl.rewards import reward_rule
from mega_rl.verify.run import RANK, working_folder
from mega_rl.verify.tolerances import TOLERANCES, UpdateErrors

__all__ = ["follow_layouts", "prepare_run", "self_check", "working_folder"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lockstep:
    """Result of following a run on one layout."""

    layout: Layout
    updates: tuple[UpdateErrors, ...]
    problem: str  # first error out of tolerance, or how the ranks failed; empty: the two trainers agree

    @property
    def good(self) -> bool:
        """Return whether the two trainers agree."""
        return not self.problem


@dataclass(frozen=True)
class PlantedFault:
    """A fault and how it was named; `phase` is empty where it was not found."""

    fault: Fault
    phase: str
    where: str  # update
    error: float

    @property
    def good(self) -> bool:
        """Return whether the fault is named by its phase."""
        return self.phase == self.fault.phase


def prepare_run(run: LockstepRun, names: str, folder: Path) -> tuple[Config, list[Layout]]:
    """Write the inputs of a run to `folder`; return the config that names them, and the layouts of a list of names.

    Raises UserError for a model or algorithm that cannot be followed, and for layouts that the model cannot have.
    """
    lockstep_settings(run.config)
    layouts = resolve_runs(names, read_architecture(run))
    with progress.phase("making the model"):
        config, small = write_inputs(run, folder, multiple=stages_of(layouts))
    return config, resolve_runs(names, small)


def follow_layouts(
    config: Config, layouts: Sequence[Layout], folder: Path, *, timeout_s: float, tolerances: Mapping[str, float]
) -> Iterator[Lockstep]:
    """Yield the lockstep of each layout; the config names the small model and the prompts.

    Raises UserError for a run that the trainer refuses.
    """
    for layout in layouts:
        target = folder / layout.name
        real = with_layout(config, layout, run_dir=target / "run")
        log.info("%s: the real run on %d rank%s", layout.name, layout.ranks, "s" * (layout.ranks > 1))
        try:
            record_runs([real], [target], ranks=layout.ranks, timeout_s=timeout_s)
        except RanksFailed as failure:
            if failure.blamed == UserError.exit_code:
                raise UserError(f"{layout.name}: {failure}") from None
            yield Lockstep(layout, (), str(failure))
            continue
        with progress.phase(f"following {layout.name}"):
            updates = tuple(follow_config(config, target))
        yield Lockstep(layout, updates, problem_of(updates, tolerances))


def follow_config(config: Config, trace: Path, fault: Fault | None = None) -> Iterator[UpdateErrors]:
    """Follow the trace of a config's run, with a fault in the independent trainer; yields the errors of each update."""
    settings, rule, formulas = lockstep_settings(config), reward_rule(config), None
    if fault is not None:
        (settings, formulas), rule = fault.plant(settings), fault.rule(rule)
    reference = Path(config.model.ref_path) if config.model.ref_path else None
    yield from follow(trace, Path(config.model.path), settings, rule, formulas, reference=reference)


def record_runs(configs: Sequence[Config], folders: Sequence[Path], *, ranks: int, timeout_s: float) -> None:
    """Run the real trainer of each config in one launch; each trace goes to its folder. Raises RanksFailed."""
    for folder in folders:
        folder.mkdir(parents=True)
    plan = folders[0] / "plan.json"
    runs = [{"settings": flat(config), "folder": str(to)} for config, to in zip(configs, folders, strict=True)]
    plan.write_text(json.dumps({RUNS: runs}), encoding="utf-8")
    with progress.phase(f"the real run on {ranks} rank{'s' * (ranks > 1)}"):
        run_ranks(RANK, [str(plan)], ranks=ranks, logs=folders[0], timeout_s=timeout_s, use_gpus=False)


def problem_of(updates: Sequence[UpdateErrors], tolerances: Mapping[str, float]) -> str:
    """Return the first error out of tolerance, in words; empty without one."""
    first = off(updates, tolerances)
    if first is None:
        return ""
    update, phase = first
    what = f" of {update.worst}" if phase == "gradient" else ""
    return f"{update.title}: {phase}{what} off by {update.errors[phase]:.2g}, tolerance {tolerances[phase]:g}"


def self_check(folder: Path, *, timeout_s: float) -> Iterator[PlantedFault]:
    """Yield what a lockstep says of each planted fault. Raises RunError where it is off without one."""
    names = list(dict.fromkeys(fault.algorithm for fault in FAULTS))
    configs, traces = [], [folder / "traces" / name for name in names]
    for name, trace in zip(names, traces, strict=True):
        inputs = folder / f"inputs_{name}"
        inputs.mkdir()
        config, _ = write_inputs(algorithm_run({**SHARED, **ALGORITHMS[name]}), inputs, multiple=1)
        configs.append(with_layout(config, REFERENCE, run_dir=trace / "run"))
    record_runs(configs, traces, ranks=1, timeout_s=timeout_s)
    runs = dict(zip(names, zip(configs, traces, strict=True), strict=True))
    for name, (config, trace) in runs.items():
        updates = tuple(follow_config(config, trace))
        if problem := problem_of(updates, TOLERANCES):
            raise RunError(f"{name} is off without a planted fault: {problem}")
    with progress.rounds("fault", len(FAULTS)) as rounds:
        for fault in FAULTS:
            config, trace = runs[fault.algorithm]
            yield find(fault, config, trace)
            rounds.advance()


def find(fault: Fault, config: Config, trace: Path) -> PlantedFault:
    """Follow a trace with a fault until it is found."""
    first = off(follow_config(config, trace, fault))
    if first is None:
        return PlantedFault(fault, "", "", 0.0)
    update, phase = first
    return PlantedFault(fault, phase, update.title, update.errors[phase])
