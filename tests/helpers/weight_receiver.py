"""A server's side of weight transports, in this process: what SGLang's own code does with what it is sent."""

from __future__ import annotations

import base64
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mega_rl.rollout.sglang.control import Endpoint, Keys, ServerError


class FakeReceiver:
    """`control.Control` that keeps what it gets: `weights` by Hugging Face name, as copies.

    `fail(number of the call, from 1)` may raise, sleep, or do what else a broken server does.
    """

    def __init__(self, index: int = 0, *, tp: int = 1, fail: Callable[[int], None] = lambda number: None) -> None:
        self.endpoint = Endpoint(index, f"http://127.0.0.1:{31000 + index}", Keys("api", "admin"))
        self.tp = tp
        self.weights: dict[str, Tensor] = {}
        self.versions: list[int | None] = []  # of each update
        self.calls: list[str] = []
        self.received = 0  # bytes
        self.messages: dict[str, int] = {}  # process group -> bytes of each rank over it
        self._fail = fail
        self._groups: dict[str, Any] = {}

    def error(self, what: str, *, status: int | None = 400) -> ServerError:
        """The answer of a server that fails; status None: it gave none."""
        return ServerError(self.endpoint, "/update", what, status=status)

    def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None = None, version: int | None = None
    ) -> None:
        self._begin("tensor")
        assert load_format == "flattened_bucket"
        assert len(payloads) == self.tp
        # What is admitted is tested with SGLang's own unpickler; see test_transports.py.
        contents = [pickle.loads(base64.b64decode(payload, validate=True)) for payload in payloads]
        flats = [one["flattened_tensor"] for one in contents]  # each rank of a server opens its own
        content, flat = contents[-1], flats[-1]
        # Only the bucket's own bytes: shared memory holds its neighbour too, which is being written meanwhile.
        places = [slice(meta.start_idx, meta.end_idx) for meta in content["metadata"]]
        assert all(torch.equal(other[place], flat[place]) for other in flats for place in places)
        assert flat.dtype == torch.uint8
        for meta in content["metadata"]:
            tensor = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            self._load(meta.name, tensor)
        self.versions.append(version)

    def init_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        self._begin("init")
        assert 1 <= rank_offset <= world_size - self.tp
        assert backend == "gloo"
        timeout = timedelta(seconds=30)
        # init_custom_process_group and torch's _new_process_group_helper each put the group's name before the keys.
        members: list[Any] = [None] * self.tp

        def join(rank: int) -> None:
            try:
                store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
                named = PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store)))
                members[rank] = dist.ProcessGroupGloo(named, rank_offset + rank, world_size, timeout)
            except RuntimeError as error:
                members[rank] = error

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(self.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for member in members:
            if isinstance(member, RuntimeError):
                raise self.error(f"Failed to initialize custom process group: {member}.")
        self._groups[group] = members

    def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        load_format: str | None = None,
        version: int | None = None,
    ) -> None:
        self._begin("distributed")
        assert load_format == "flattened_bucket"
        kinds = [getattr(torch, name) for name in dtypes]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flats = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in range(self.tp)]
        works = [
            member.broadcast([flat], _from_rank_0()) for member, flat in zip(self._groups[group], flats, strict=True)
        ]
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.error(f"Failed to update parameter online: {error}. Please discard the whole weights.") from None
        self.messages[group] = self.messages.get(group, 0) + sum(sizes)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        for name, kind, shape, part in zip(names, kinds, shapes, flats[0].split(sizes), strict=True):
            self._load(name, part.view(kind).reshape(shape))
        self.versions.append(version)

    def destroy_group(self, group: str) -> None:
        self._begin("destroy")
        if self._groups.pop(group, None) is None:
            raise self.error("The group to be destroyed does not exist.")

    def _begin(self, what: str) -> None:
        self.calls.append(what)
        self._fail(len(self.calls))

    def _load(self, name: str, tensor: Tensor) -> None:
        self.received += tensor.nbytes
        self.weights[name] = tensor.clone()


class SpanningReceiver(FakeReceiver):
    """A receiver whose `makers` has the processes that made what each of its ranks is sent, by call."""

    def __init__(self, index: int, *, tp: int) -> None:
        super().__init__(index, tp=tp)
        self.makers: list[list[int]] = []

    def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None = None, version: int | None = None
    ) -> None:
        contents = [base64.b64decode(payload, validate=True) for payload in payloads]
        self.makers.append([int(re.findall(rb"/proc/(\d+)/fd", content)[0]) for content in contents])
        super().update_from_tensor(payloads, load_format=load_format, version=version)


def _from_rank_0() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options
