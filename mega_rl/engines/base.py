"""What the parts of a run below the trainer ask of an engine, beyond `mega_rl.protocols.Engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from mega_rl.config.attention import Role
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Engine


class ModelEngine(Engine, Protocol):
    """An engine over a model of a known Hugging Face architecture, on either backend."""

    @property
    def name(self) -> Role:
        """Return the role that the model has."""
        ...

    @property
    def sharding(self) -> Sharding:
        """The model and how it is cut: where each Hugging Face tensor is in `whole_chunks`."""
        ...

    @property
    def groups(self) -> Groups:
        """The ranks of the run, as this model's layout arranges them."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        ...

    @property
    def attention(self) -> str:
        """The attention that the model runs: "sdpa", or with Transformer Engine "te: flash"."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are spread over data parallelism, so that reading one is collective over those ranks."""
        ...

    def whole_chunks(self) -> list[torch.nn.Module]:
        """The model's chunks with up-to-date parameters that data parallelism has not cut, as exporters read them.

        Collective, and so is reading a parameter where `is_sharded`.
        """
        ...

    def is_offloaded(self, part: str) -> bool:
        """Whether the memory of "parameters", "gradients" or "optimizer" has been given back."""
        ...

    def save_hf(self, directory: Path, *, source: Path) -> None:
        """Write the weights as a Hugging Face checkpoint with config and tokenizer of `source`; collective.

        One that is there is replaced as a whole. Raises UserError: see `converters.save.save_hf`.
        """
        ...
