"""Checkpoint arguments of commands that may be names on the Hub, as callbacks of typer."""

from __future__ import annotations

from pathlib import Path

import typer

from mega_rl.hub.resolve import checkpoint_folder


def checkpoint(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the folder of a checkpoint, downloaded whole where the value is a name on the Hub. Raises UserError."""
    return _folder(context, parameter, value, weights=True)


def description(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the folder of a checkpoint, downloaded but for its weights. Raises UserError."""
    return _folder(context, parameter, value, weights=False)


def _folder(
    context: typer.Context, parameter: typer.CallbackParam, value: Path | None, *, weights: bool
) -> Path | None:
    if value is None or context.resilient_parsing:  # of completion, which runs nothing
        return value
    option = next((name for name in parameter.opts if name.startswith("-")), None)
    label = option or (parameter.metavar or str(parameter.name).upper()).strip("[]")
    return checkpoint_folder(value, label=label, weights=weights)
