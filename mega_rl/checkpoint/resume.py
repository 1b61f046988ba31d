"""Resuming from a checkpoint: choosing it, checking its identity, filling engines and rank states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.changes import changes, in_words
from mega_rl.checkpoint.fill import fill
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, Manifest
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.checkpoint.identity import differences
from mega_rl.checkpoint.previous import PREVIOUS
from mega_rl.checkpoint.run_state import RunState, rank_prefix
from mega_rl.config.schema import CheckpointConfig
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.parallel.agreement import broadcast_json, first_failure
from mega_rl.parallel.boxes import whole
from mega_rl.protocols import Ranks
from mega_rl.storage.safetensors_reader import DTYPES
from mega_rl.storage.untrusted import RESUME_HINT
from mega_rl.types import Piece

log = logging.getLogger(__name__)


# Fetches the bytes that the pieces need and this host lacks, before they are read; collective.
Fetch = Callable[[Checkpoint, Sequence[Piece]], None]


class DamagedError(UserError):
    """A damaged checkpoint; an older one may be usable."""


def resume(root: Path, run: RunState, settings: CheckpointConfig) -> tuple[Path, Manifest] | None:
    """Fill engines and rank states from a checkpoint and return it; None to start afresh; collective.

    Raises:
        UserError: on all ranks; the engines are unchanged.
    """
    ranks = run.ranks
    candidates = _candidates(root, settings, ranks)
    first: DamagedError | None = None
    for folder in candidates:
        try:
            manifest = restore_from(folder, run)
        except DamagedError as error:
            first = first or error
            if not settings.fallback:
                break
            if ranks.rank == 0:
                log.warning("FALLING BACK to an older checkpoint: %s is damaged: %s", folder, error)
            continue
        if ranks.rank == 0:
            log.info("restored %s", folder)
            report_changes(manifest, run.config)
        return folder, manifest
    if first is not None:
        raise UserErrors(str(first).split("\n")) from first
    return None


def _candidates(root: Path, settings: CheckpointConfig, ranks: Ranks) -> list[Path]:
    """Return rank 0's list of checkpoints to resume from, best first; collective. Raises UserError on all ranks."""
    candidates: list[str] = []
    message = None
    if ranks.rank == 0:
        try:
            candidates = [str(folder) for folder in _complete_at(root, settings)]
        except UserError as error:
            message = str(error)
    message = first_failure(message, ranks)
    if message is not None:
        raise UserError(message)
    return [Path(folder) for folder in broadcast_json(candidates, ranks)]


def _complete_at(root: Path, settings: CheckpointConfig) -> list[Path]:
    wanted = settings.resume
    if wanted == "never":
        return []
    if wanted == "auto":
        damaged = [f"{folder}: {why}" for folder, why in folders.damaged(root)]
        if damaged and not settings.fallback:
            raise UserError(damaged[-1] if RESUME_HINT in damaged[-1] else f"{damaged[-1]}; {RESUME_HINT}")
        for folder, why in folders.torn(root):
            log.warning("%s is not a complete checkpoint and is ignored: %s", folder, why)
        return folders.complete(root)[::-1]
    path = Path(wanted).absolute()
    if (path / COMMIT_FILE).exists():
        return [path]
    complete = folders.complete(path / "checkpoints") or folders.complete(path)
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
    with checkpoint:
        manifest = checkpoint.manifest
        _check_identity(folder, manifest, run)
        _check_engines(folder, manifest, run)
        engines = run.restorable(manifest.numbers)
        same_layout = (manifest.world_size, manifest.layout) == (ranks.size, run.layout)
        pieces = []
        for name, engine in engines.items():
            pieces += [replace(piece, name=f"{name}/{piece.name}") for piece in engine.state().pieces]
        prefixes = {name: rank_prefix(ranks.rank, name) for name in run.rank_states}
        kept = {name: _own(checkpoint, prefix) if same_layout else {} for name, prefix in prefixes.items()}
        for name, tensors in kept.items():
            for key, tensor in tensors.items():
                shape = tuple(tensor.shape)
                pieces.append(Piece(prefixes[name] + key, shape, whole(shape), tensor, owned=False))
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


def _check_identity(folder: Path, manifest: Manifest, run: RunState) -> None:
    """Raise UserError on all ranks if the checkpoint is of another run, as rank 0 compares; collective."""
    message = None
    if run.ranks.rank == 0:
        differing = differences(manifest.identity, run.identity, stored_config=manifest.config, config=run.config)
        if differing:
            message = (
                f"checkpoint {folder} is of another run ({', '.join(differing)}); set checkpoint.resume=never to start "
                f"anew (what is there is kept, in {PREVIOUS}/) or another trainer.run_dir"
            )
    message = first_failure(message, run.ranks)
    if message is not None:
        raise UserError(message)


def report_changes(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Log which settings are not those of the checkpoint's run."""
    changed = changes(manifest.config, config)
    mattering = [change for change in changed if change.matters]
    others = [change for change in changed if not change.matters]
    if mattering:
        log.warning(
            "settings differ from the checkpoint's: %s; the run goes on with the new ones, so it is not the run that "
            "never stopped",
            in_words(mattering),
        )
    if others:
        log.info("settings differ from the checkpoint's: %s", in_words(others))


def _check_engines(folder: Path, manifest: Manifest, run: RunState) -> None:
    missing, surplus = run.mismatched(manifest.numbers)
    if missing or surplus:
        what = " and ".join([f"no {name}" for name in missing] + [f"a {name} that this run lacks" for name in surplus])
        raise UserError(
            f"checkpoint {folder} has {what}; it is of a run with other models: "
            f"set checkpoint.resume=never to start anew (what is there is kept, in {PREVIOUS}/) or to another "
            "checkpoint"
        )


def _own(checkpoint: Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """Return empty tensors for the checkpoint's tensors with this prefix, by the rest of their names."""
    tensors = checkpoint.manifest.tensors
    return {
        name.removeprefix(prefix): torch.empty(tuple(shape), dtype=DTYPES[dtype])
        for name, (dtype, shape) in tensors.items()
        if name.startswith(prefix)
    }
