"""Ranks that are threads of one process, for parts whose collectives are few and small."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class ThreadGroup:
    """Threads that play ranks; a rank that stays away breaks the others' call after `timeout_s`."""

    def __init__(self, size: int, *, timeout_s: float = 10.0) -> None:
        self.size = size
        self.calls = [0] * size  # collectives that each rank took part in
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._sent: dict[int, Tensor] = {}

    def rank(self, rank: int) -> OneRank:
        """The group as this rank sees it."""
        return OneRank(self, rank)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; they must agree in shape and dtype."""
        self.calls[rank] += 1
        self._sent[rank] = tensor
        self._barrier.wait()
        sent = [self._sent[source] for source in range(self.size)]
        self._barrier.wait()
        assert {(one.shape, one.dtype) for one in sent} == {(tensor.shape, tensor.dtype)}
        return sent

    def run(self, function: Callable[[OneRank], Any]) -> list[Any]:
        """Call `function` on each rank; return the results or exceptions."""
        results: list[Any] = [None] * self.size

        def play(rank: int) -> None:
            try:
                results[rank] = function(self.rank(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return results


class OneRank:
    """One of the threads; see `mega_rl.protocols.Ranks`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        return self._group.exchange(self.rank, tensor)[source].clone()

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self.rank, tensor)).sum(0)

    def max(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self.rank, tensor)).amax(0)

    def gather_json(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        longest = int(self.max(torch.tensor(len(text))))
        padded = torch.nn.functional.pad(text, (0, longest - len(text)), value=ord(" "))
        return [json.loads(bytes(one.tolist())) for one in self._group.exchange(self.rank, padded)]

    def gather_rows(self, rows: Any) -> Any:
        raise NotImplementedError

    def exchange_rows(self, rows: Any, destinations: Tensor) -> Any:
        raise NotImplementedError


def on_simulated_ranks(functions: Sequence[Callable[[Callable[[Tensor], Tensor]], Any]]) -> list[Any]:
    """Return what each function gives, one per rank; it gets the sum of a tensor over all of them."""
    results = ThreadGroup(len(functions)).run(lambda rank: functions[rank.rank](rank.sum))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
