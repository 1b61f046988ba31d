"""Restoring of the newest checkpoint that memory has whole; what is torn, damaged or of another run is ignored."""

from __future__ import annotations

import logging

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import Manifest
from mega_rl.checkpoint.identity import differences
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.memory.hosts import MemoryPlace
from mega_rl.checkpoint.memory.recovery import VIEW, Remnant, View, candidates, read_candidate, survey
from mega_rl.checkpoint.resume import DamagedError, report_changes, restore_from
from mega_rl.checkpoint.run_state import RunState
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import all_succeed, broadcast_json, failure_of, run_on_all
from mega_rl.parallel.comm import GroupRanks
from mega_rl.protocols import Ranks
from mega_rl.storage import disk
from mega_rl.storage.untrusted import RESUME_HINT

log = logging.getLogger(__name__)


def restore_newest(here: MemoryPlace, run: RunState, *, newer_than: int) -> Manifest | None:
    """Fill engines and rank states from the newest whole checkpoint of a later step than `newer_than`; collective.

    Logs a line for everything that is ignored. None leaves the engines as they are.
    """
    folder, hosts = here.folder, here.hosts
    fault = place.unusable(folder)
    nothing = {"steps": [], "faults": [fault] if fault and hosts.is_first else []}
    report = run_on_all(lambda: nothing if fault else survey(folder, hosts, newer_than=newer_than), run.ranks)
    reports = run.ranks.gather_json(report)
    for each in reports:
        for line in each["faults"]:
            _ignore(line, run.ranks)
    for candidate in candidates(reports, hosts):
        manifest = _tried(here, run, candidate)
        if manifest is not None:
            return manifest
    return None


def _tried(here: MemoryPlace, run: RunState, candidate: Remnant) -> Manifest | None:
    """Restore a candidate; None, with a line, where it cannot be."""
    where = f"the checkpoint of step {candidate.step} in memory"
    if candidate.missing:
        _ignore([*candidate.faults, f"{where} lacks {', '.join(candidate.missing)}"][0], run.ranks)
        return None
    for fault in candidate.faults:
        _ignore(f"{fault}; its copy on another host is taken", run.ranks)
    try:
        text, manifest = read_candidate(here.folder, candidate, here.hosts, run.ranks)
        if why := _of_another_run(manifest, run):
            _ignore(f"{where} is of another run ({why})", run.ranks)
            return None
        if here.hosts.count == 1:
            manifest = restore_from(folders.final(here.folder, candidate.step), run)
        else:
            manifest = _restore_through_view(here, run, candidate, text, manifest)
    except (DamagedError, RunError, UserError) as error:
        first, *_ = str(error).split("\n")
        _ignore(f"{where}: {first}", run.ranks)
        return None
    if run.ranks.rank == 0:
        log.info("restored the checkpoint of step %d from memory", manifest.step)
        report_changes(manifest, run.config)
    return manifest


def _restore_through_view(
    here: MemoryPlace, run: RunState, candidate: Remnant, text: str, manifest: Manifest
) -> Manifest:
    """Restore a candidate over several hosts. text: of the manifest.

    Raises RunError or UserError on all ranks alike.
    """
    folder, hosts = here.folder, here.hosts
    assert isinstance(run.ranks, GroupRanks), "several hosts have several ranks"

    def make_folder() -> None:
        if hosts.is_first:
            place.make(folder, here.run_dir)

    def remove_view() -> None:
        if hosts.is_first:
            disk.remove_tree(folder / VIEW)

    all_succeed(make_folder, run.ranks)
    view = View(folder, candidate, text, manifest, hosts, run.ranks)
    try:
        view.make()
        return restore_from(view.folder, run, fetch=view.fetch)
    finally:
        failure_of(remove_view, run.ranks)


def _of_another_run(manifest: Manifest, run: RunState) -> str:
    """Return in words why a checkpoint is of another run, "" if it is of this one; collective."""
    words: list[str] = []
    if run.ranks.rank == 0:
        words = differences(manifest.identity, run.identity, stored_config=manifest.config, config=run.config)
        if any(run.mismatched(manifest.numbers)):
            words.append(f"models: {', '.join(manifest.numbers)} -> {', '.join(run.engines)}")
    return ", ".join(broadcast_json(words, run.ranks))


def _ignore(line: str, ranks: Ranks) -> None:
    """Say on rank 0 what is not loaded; the hint of the reader is about checkpoints on disk."""
    if ranks.rank == 0:
        log.warning("ignored: %s", line.replace(f"; {RESUME_HINT}", "").replace(f": {RESUME_HINT}", ""))
