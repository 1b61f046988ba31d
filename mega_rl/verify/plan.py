"""Tasks for the ranks of a verification, and their answers, as JSON files of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_rl.verify.layouts import Layout

REFERENCE = Layout("1")
PHASE = "phase"  # file next to a task: rank 0's present phase, in words


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

    @property
    def reference_tensors(self) -> Path:
        """Return the file of the reference's tensors and log-probs."""
        return Path(self.folder) / "reference.safetensors"

    @property
    def reference_facts(self) -> Path:
        """Return the file of the reference's loss and norms."""
        return Path(self.folder) / "reference.json"

    def answer(self, layout: Layout) -> Path:
        """Return the file of a layout's result."""
        return Path(self.folder) / f"{layout.name}.json"


@dataclass(frozen=True)
class LayoutErrors:
    """Measurements of one layout, and their distance from one rank; tensors by name, the worst first."""

    logprob_error: float  # nats, the largest of any token
    loss: float
    loss_error: float  # relative
    grad_norm: float
    grad_norm_error: float  # relative, the largest of all steps of the two optimizers
    gradients: Mapping[str, float]  # relative, by Hugging Face name
    weights: Mapping[str, float]  # relative, by Hugging Face name
    copies: Mapping[str, float]  # gradients that differ between ranks with the same weight, by Megatron-Core's name
    num_tensors: int
    num_microbatches: int
    seconds: float

    @staticmethod
    def read(path: Path) -> LayoutErrors:
        """Read a result from its file."""
        return LayoutErrors(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ReplayPlan:
    """A record, the weights of its step, and the layout to compute it under."""

    record: str  # folder
    target: str  # folder that gets the step as the replay computes it
    models: Mapping[str, str]  # Hugging Face folder of each role: "actor", "critic", "reference"
    layout: Layout
    timeout_s: float
