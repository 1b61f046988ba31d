"""Random states of a rank, saved to and restored from a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.groups import random_tracker

TRACKED = "tracked/"  # before the names of Megatron-Core's states


class Tracker(Protocol):
    """Interface of Megatron-Core's CudaRNGStatesTracker: the random states of its layers, by name."""

    def get_states(self) -> dict[str, Any]:
        """Return the states by name: tensors, or generators where CUDA graphs need them."""
        ...

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace all random states of this process."""
        ...


def seed_python(seed: int, rank: int) -> None:
    """Seed Python's `random` and NumPy's, which a user's own code may draw from; each rank has numbers of its own.

    Without it they begin with the operating system's, and a run of the same seed has other rewards.
    """
    random.seed(f"{seed}/{rank}")
    np.random.seed([seed, rank])


class RandomState:
    """`protocols.RankState` of torch's generators, of Megatron-Core's states, of Python's `random` and of NumPy's."""

    def __init__(self, tracker: Callable[[], Tracker] = random_tracker) -> None:
        self._tracker = tracker

    def state(self) -> dict[str, Tensor]:
        """Return the random states by name, each [bytes] uint8."""
        tensors = {
            "torch": torch.get_rng_state(),
            "python": _encoded(random.getstate()),
            "numpy": _encoded(np.random.get_state(legacy=False)),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        for name, state in self._tracker().get_states().items():
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
        self._tracker().set_states({name: self._tracked(name, tensors) for name in self._tracker().get_states()})

    def _tracked(self, name: str, tensors: Mapping[str, Tensor]) -> Any:
        """Return a state in the tracker's form: the tensor, or its own generator set to it."""
        now, state = self._tracker().get_states()[name], tensors[TRACKED + name].clone()
        if isinstance(now, torch.Generator):
            now.set_state(state)
            return now
        return state


def _encoded(value: Any) -> Tensor:
    """Return the value's JSON as [bytes] uint8; floats round-trip to the bit."""
    return torch.frombuffer(bytearray(json.dumps(value, default=_plain).encode()), dtype=torch.uint8)


def _decoded(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray | np.generic), type(value)
    return value.tolist()
