"""Random states of a rank, saved to and restored from a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.groups import random_tracker

TRACKED = "tracked/"  # prefix of the names of Megatron-Core's states


def seed_python(seed: int, rank: int) -> None:
    """Seed Python's `random` and NumPy's, which a user's code may draw from, differently on each rank."""
    random.seed(f"{seed}/{rank}")
    np.random.seed([seed, rank])


class RandomState:
    """`protocols.RankState` of the generators of torch, Megatron-Core, Python's `random` and NumPy."""

    def state(self) -> dict[str, Tensor]:
        """Return the random states by name, each [bytes] uint8."""
        tensors = {
            "torch": torch.get_rng_state(),
            "python": _encoded(random.getstate()),
            "numpy": _encoded(np.random.get_state(legacy=False)),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        for name, state in random_tracker().get_states().items():
            tensor = state.get_state() if isinstance(state, torch.Generator) else state
            tensors[TRACKED + name] = tensor.cpu().clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Set the random states; None keeps those that the run's seed has set.

        Raises:
            UserError: the states are of other generators than this run has.
        """
        if tensors is None:
            return
        expected, stored = self.state().keys(), tensors.keys()
        if expected != stored:
            raise UserError(
                f"random states of the checkpoint: {', '.join(sorted(expected ^ stored))} on one side only; resume on "
                "the same kind of device, or on another layout, where random numbers start afresh"
            )
        torch.set_rng_state(tensors["torch"])
        version, words, gauss = _decoded(tensors["python"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(_decoded(tensors["numpy"]))
        if "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"])
        tracked = dict(random_tracker().get_states())
        for name, now in tracked.items():
            state = tensors[TRACKED + name].clone()
            tracked[name] = now.set_state(state) if isinstance(now, torch.Generator) else state
        random_tracker().set_states(tracked)


def _encoded(value: Any) -> Tensor:
    """Return the value's JSON as [bytes] uint8; floats round-trip to the bit."""
    return torch.frombuffer(bytearray(json.dumps(value, default=_plain).encode()), dtype=torch.uint8)


def _decoded(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray | np.generic), type(value)
    return value.tolist()
