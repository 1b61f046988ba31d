"""Follow a run on each layout: record the real trainer, then train the independent one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega_rl.config.keys import flat
from mega_rl.config.schema import Config
from mega_rl.errors import RunError, UserError
from mega_rl.tracking import progress
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import REFERENCE, TOLERANCES, Layout, resolve_all, stages
from mega_rl.verify.rl.compare import UpdateErrors, follow, off
from mega_rl.verify.rl.faults import FAULTS, SHARED, Fault
from mega_rl.verify.rl.independent.formulas import Formulas
from mega_rl.verify.rl.inputs import LockstepRun, algorithm_run, with_layout
from mega_rl.verify.rl.model import read_architecture, write_inputs
from mega_rl.verify.rl.rewards import ALGORITHMS, lockstep_settings, reward_rule


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


class PlantedFault(NamedTuple):
    """A fault and how it was named; `phase` is empty where it was not found."""

    fault: Fault
    phase: str = ""
    where: str = ""  # update
    error: float = 0.0

    @property
    def good(self) -> bool:
        """Return whether the fault is named by its phase."""
        return self.phase == self.fault.phase


def prepare_run(run: LockstepRun, names: str, folder: Path) -> tuple[Config, list[Layout]]:
    """Write the inputs of a run; return its config and the layouts of a list."""
    lockstep_settings(run.config)
    layouts = resolve_all(names, read_architecture(run), runs=True)
    with progress.phase("making the model"):
        config, small = write_inputs(run, folder, multiple=stages(layouts))
    return config, resolve_all(names, small, runs=True)


def follow_layouts(
    config: Config, layouts: Sequence[Layout], folder: Path, *, timeout_s: float, tolerances: Mapping[str, float]
) -> Iterator[Lockstep]:
    """Yield the lockstep of each layout; the config names the small model and the prompts."""
    for layout in layouts:
        target = folder / layout.name
        real = with_layout(config, layout, run_dir=target / "run")
        try:
            record_runs({target: real}, label=f"the real run on {layout.name}", ranks=layout.ranks, timeout_s=timeout_s)
        except UserError as mistake:
            raise UserError(f"{layout.name}: {mistake}") from None
        except RanksFailed as failure:
            yield Lockstep(layout, (), str(failure))
            continue
        with progress.phase(f"following {layout.name}"):
            updates = tuple(follow_config(config, target))
        yield Lockstep(layout, updates, problem_of(updates, tolerances))


def follow_config(config: Config, trace: Path, fault: Fault | None = None) -> Iterator[UpdateErrors]:
    """Follow a run's trace, with a fault in the independent trainer; yields each update's errors."""
    trial = lockstep_settings(config), Formulas(), reward_rule(config)
    reference = Path(config.model.ref_path) if config.model.ref_path else None
    yield from follow(trace, Path(config.model.path), *(fault.plant(trial) if fault else trial), reference=reference)


def record_runs(runs: Mapping[Path, Config], *, label: str, ranks: int, timeout_s: float) -> None:
    """Run the real trainer of each config, with a trace in its folder. Raises as `run_task`."""
    for folder in runs:
        folder.mkdir(parents=True)
    given = [(flat(config), str(folder)) for folder, config in runs.items()]
    run_task("rl.record", given, next(iter(runs)), label=label, ranks=ranks, timeout_s=timeout_s)


def problem_of(updates: Sequence[UpdateErrors], tolerances: Mapping[str, float]) -> str:
    """Return the first error out of tolerance, in words; empty without one."""
    first = off(updates, tolerances)
    if first is None:
        return ""
    update, phase = first
    what = f" of {update.worst}" if phase == "gradient" else ""
    return f"{update.title}: {phase}{what} off by {update.errors[phase]:.2g}, tolerance {tolerances[phase]:g}"


def self_check(folder: Path, *, timeout_s: float) -> Iterator[PlantedFault]:
    """Yield how the lockstep named each planted fault. Raises RunError if it is off without one."""
    runs: dict[str, tuple[Config, Path]] = {}
    for name in dict.fromkeys(fault.algorithm for fault in FAULTS):
        inputs, trace = folder / f"inputs_{name}", folder / "traces" / name
        inputs.mkdir()
        config, _ = write_inputs(algorithm_run({**SHARED, **ALGORITHMS[name]}), inputs, multiple=1)
        runs[name] = with_layout(config, REFERENCE, run_dir=trace / "run"), trace
    record_runs({trace: config for config, trace in runs.values()}, label="real runs", ranks=1, timeout_s=timeout_s)
    for name, (config, trace) in runs.items():
        if problem := problem_of(tuple(follow_config(config, trace)), TOLERANCES):
            raise RunError(f"{name} is off without a planted fault: {problem}")
    with progress.rounds("fault", len(FAULTS)) as rounds:
        for fault in FAULTS:
            yield find(fault, *runs[fault.algorithm])
            rounds.advance()


def find(fault: Fault, config: Config, trace: Path) -> PlantedFault:
    """Follow a trace with a fault until it is found."""
    first = off(follow_config(config, trace, fault))
    if first is None:
        return PlantedFault(fault)
    update, phase = first
    return PlantedFault(fault, phase, update.title, update.errors[phase])
