"""Conversion without a model: Hugging Face folders, rank files and distributed checkpoints into each other.

Tensors stream from file to file one at a time, so one process needs no more memory than the largest tensor and a fixed
buffer. Under torchrun the ranks share the tensors of the output between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mega_rl.converters.plan import Head, Spec
from mega_rl.parallel.layout import ParallelLayout

Format = Literal["torch_dist", "ranks"]


class Progress(Protocol):
    """Told how far a conversion is; called on rank 0 only, about what this rank does."""

    def start(self, total_bytes: int, label: str) -> None:
        """Before the first tensor: bytes that will be written, and what for."""

    def advance(self, num_bytes: int) -> None:
        """After each tensor: bytes written since the last call."""


@dataclass(frozen=True)
class Report:
    """What a conversion did, over all ranks."""

    num_tensors: int  # written
    num_files: int
    num_bytes: int  # of tensors written
    seconds: float
    ignored: tuple[str, ...] = ()  # tensors of the source left aside
    absent: tuple[str, ...] = ()  # parameters or tensors of the model that the source has nothing for
    kept: tuple[str, ...] = ()  # tensors taken over from the reference


def import_hf(
    source: Path,
    target: Path,
    *,
    layout: ParallelLayout,
    format: Format,
    spec: Spec = "local",
    head: Head = "lm",
    mtp: Literal["drop", "load"] = "drop",
    dtype: str | None = None,
    padded_vocab: int | None = None,
    allow_missing: Sequence[str] = (),
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes `target` as rank files or as a distributed checkpoint from the Hugging Face checkpoint `source`."""
    raise NotImplementedError


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    reference: Path | None = None,
    shard_bytes: int = 5 << 30,
    experts: Literal["per_expert", "fused"] | None = None,
    dtype: str | None = None,
    mtp: Literal["keep", "drop"] = "keep",
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes `target` as a Hugging Face checkpoint from rank files or a distributed checkpoint `source`."""
    raise NotImplementedError


def reshard(
    source: Path,
    target: Path,
    *,
    layout: ParallelLayout,
    format: Format | None = None,
    reference: Path | None = None,
    spec: Spec | None = None,
    padded_vocab: int | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes `target` with another layout, or the other format, from rank files or a distributed checkpoint."""
    raise NotImplementedError
