"""Plan of a verification for its ranks, and their answers, as JSON files of a folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mega_rl.verify.layouts import Layout

REFERENCE = Layout("1")
PHASE = "phase"  # file next to a plan
RUNS = "runs"  # key of a plan of another kind: runs to record
REPLAY = "replay"  # key of a third kind: a recorded step to compute again


@dataclass(frozen=True)
class Plan:
    """One model, and layouts to measure in one world."""

    model: str  # Hugging Face folder
    folder: str  # holds the reference and the answers
    layouts: tuple[Layout, ...]  # all of one world size; the reference is measured before all others
    dtype: str = "fp32"  # "fp32" or "bf16"
    transformer_impl: str = "auto"
    packing: bool = True
    steps: int = 1  # optimizer steps before weights are compared
    seed: int = 0
    timeout_s: float = 600.0  # deadline of each collective

    def write(self, path: Path) -> None:
        """Write the plan for the ranks."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Plan:
        """Read a plan."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        layouts = tuple(Layout(**{**entry, "implied": tuple(entry["implied"])}) for entry in raw.pop("layouts"))
        return Plan(**raw, layouts=layouts)

    @property
    def reference_tensors(self) -> Path:
        """Return the file of the reference's tensors and log-probs."""
        return Path(self.folder) / "reference.safetensors"

    @property
    def reference_facts(self) -> Path:
        """Return the file of the reference's loss and norms."""
        return Path(self.folder) / "reference.json"

    @property
    def phase(self) -> Path:
        """Return the file with rank 0's present phase, in words."""
        return Path(self.folder) / PHASE

    def answer(self, layout: Layout) -> Path:
        """Return the file of a layout's result."""
        return Path(self.folder) / f"{layout.name}.json"


@dataclass(frozen=True)
class TensorError:
    """Relative distance of one tensor from that of one rank."""

    name: str  # Hugging Face's
    error: float


@dataclass(frozen=True)
class LayoutErrors:
    """Measurements of one layout, and their distance from one rank."""

    logprob_error: float  # nats, the largest of any token
    loss: float
    loss_error: float  # relative
    grad_norm: float
    grad_norm_error: float  # relative, the largest of all steps of the two optimizers
    gradients: tuple[TensorError, ...]  # worst first
    weights: tuple[TensorError, ...]  # worst first
    copies: tuple[TensorError, ...]  # gradients on which ranks that hold the same weight disagree, worst first
    num_tensors: int
    num_microbatches: int
    seconds: float

    @staticmethod
    def read(path: Path) -> LayoutErrors:
        """Read a result from its file."""
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for field in fields(LayoutErrors):
            if field.name in ("gradients", "weights", "copies"):
                raw[field.name] = tuple(TensorError(**entry) for entry in raw[field.name])
        return LayoutErrors(**raw)
