"""Resuming from a checkpoint: choosing it, checking its identity, filling engines and rank states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.fill import fill
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, Manifest
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.checkpoint.identity import changes, differences, in_words
from mega_rl.checkpoint.previous import PREVIOUS
from mega_rl.checkpoint.run_state import RunState, rank_prefix
from mega_rl.config.schema import CheckpointConfig
from mega_rl.converters.safetensors.reader import DTYPES
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.parallel.agreement import first_failure, run_on_one
from mega_rl.parallel.boxes import whole
from mega_rl.types import Piece

log = logging.getLogger(__name__)

RESUME_HINT = "set checkpoint.fallback=true to resume from an older checkpoint, or checkpoint.resume to another one"
NEW_RUN_HINT = f"set checkpoint.resume=never to start anew (old files are kept, in {PREVIOUS}/)"

# Fetches the bytes that the pieces need and this host lacks, before they are read; collective.
Fetch = Callable[[Checkpoint, Sequence[Piece]], None]


class DamagedError(UserError):
    """A damaged checkpoint; an older one may be usable."""


def resume(root: Path, run: RunState, settings: CheckpointConfig) -> tuple[Path, Manifest] | None:
    """Fill engines and rank states from a checkpoint and return it; None to start afresh; collective.

    Raises:
        UserError: on all ranks; the engines are unchanged.
    """
    first: DamagedError | None = None
    for name in run_on_one(lambda: [str(folder) for folder in _candidates(root, settings)], run.ranks):
        folder = Path(name)
        try:
            manifest = restore_from(folder, run)
        except DamagedError as error:
            first = first or error
            if not settings.fallback:
                break
            if run.ranks.rank == 0:
                log.warning("FALLING BACK to an older checkpoint: %s is damaged: %s", folder, error)
            continue
        if run.ranks.rank == 0:
            log.info("restored %s", folder)
            report_changes(manifest, run.config)
        return folder, manifest
    if first is not None:
        message = str(first) if "checkpoint.resume" in str(first) else f"{first}; {RESUME_HINT}"
        raise UserErrors(message.split("\n")) from first
    return None


def _candidates(root: Path, settings: CheckpointConfig) -> list[Path]:
    """Return the checkpoints to resume from, best first. Raises UserError."""
    wanted = settings.resume
    if wanted == "never":
        return []
    if wanted == "auto":
        damaged = [f"{folder}: {why}" for folder, why in folders.damaged(root)]
        if damaged and not settings.fallback:
            raise UserError(f"{damaged[-1]}; {RESUME_HINT}")
        for folder, why in folders.torn(root):
            log.warning("%s is not a complete checkpoint and is ignored: %s", folder, why)
        return folders.complete(root)[::-1]
    path = Path(wanted).absolute()
    if (path / COMMIT_FILE).exists():
        return [path]
    complete = folders.complete(path / folders.CHECKPOINTS) or folders.complete(path)
    if not complete:
        raise UserError(f"checkpoint.resume={wanted}: no complete checkpoint there ({COMMIT_FILE} is missing)")
    return complete[::-1]


def restore_from(folder: Path, run: RunState, *, fetch: Fetch | None = None) -> Manifest:
    """Fill engines and rank states from one checkpoint; collective.

    Raises:
        DamagedError: on all ranks; another checkpoint may be usable. The engines are unchanged.
        UserError: on all ranks; it is of another run.
    """
    ranks = run.ranks
    checkpoint, message = None, None
    try:
        checkpoint = Checkpoint.open(folder)
    except UserError as error:
        message = str(error)
    message = first_failure(message, ranks)
    if message is not None:
        raise DamagedError(message)
    assert checkpoint is not None
    manifest = checkpoint.manifest
    _check_run(folder, manifest, run)
    engines = run.restorable(manifest.numbers)
    same_layout = (manifest.world_size, manifest.layout) == (ranks.size, run.layout)
    pieces = []
    for name, engine in engines.items():
        pieces += [replace(piece, name=f"{name}/{piece.name}") for piece in engine.state().pieces]
    kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in run.rank_states}
    for name in run.rank_states if same_layout else ():
        prefix = rank_prefix(ranks.rank, name)
        for key in (key for key in manifest.tensors if key.startswith(prefix)):
            dtype, shape = manifest.tensors[key]
            tensor = kept[name][key.removeprefix(prefix)] = torch.empty(shape, dtype=DTYPES[dtype])
            pieces.append(Piece(key, shape, whole(shape), tensor, owned=False))
    try:
        if fetch is not None:
            fetch(checkpoint, pieces)
        fill(checkpoint, pieces, ranks=ranks, whole=True)
    except (UserError, RunError) as error:
        raise DamagedError(str(error)) from error
    if not same_layout and ranks.rank == 0:
        log.info("%s is of the layout %s: ranks draw fresh random numbers", folder, manifest.layout)
    for name, engine in engines.items():
        engine.resume_from(manifest.numbers[name])
    for name, rank_state in run.rank_states.items():
        rank_state.restore(kept[name] or None)
    return manifest


def _check_run(folder: Path, manifest: Manifest, run: RunState) -> None:
    """Raise UserError on all ranks if the checkpoint is of another run, as rank 0 compares; collective."""
    message = None
    if run.ranks.rank == 0:
        differing = differences(manifest.identity, run.identity, stored_config=manifest.config, config=run.config)
        missing, surplus = run.mismatched(manifest.numbers)
        if differing:
            message = f"is of another run ({', '.join(differing)}); {NEW_RUN_HINT} or another trainer.run_dir"
        elif missing or surplus:
            what = [f"no {name}" for name in missing] + [f"a {name} that this run lacks" for name in surplus]
            message = f"has {' and '.join(what)}; it is of a run with other models: {NEW_RUN_HINT}"
    message = first_failure(message, run.ranks)
    if message is not None:
        raise UserError(f"checkpoint {folder} {message}")


def report_changes(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Log the settings that differ from those of the checkpoint's run."""
    changed = changes(manifest.config, config)
    mattering = [change for change in changed if change.matters]
    others = [change for change in changed if not change.matters]
    if mattering:
        log.warning(
            "settings differ from the checkpoint's: %s; the run continues with the new ones, so it is not the run that "
            "never stopped",
            in_words(mattering),
        )
    if others:
        log.info("settings differ from the checkpoint's: %s", in_words(others))
