"""Changes of weights to servers on other hosts, over HTTP: for links slower than the comparison of all weights.

Each pipeline stage's source keeps the bytes that it sent last in host memory, compares each bucket with them and posts
the changes to every server's `WeightStore`. A server that lacks the base, or finds another digest, gets the whole
bucket; so do all where changes would be larger. Then rank 0 lets the servers load.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor, rebuild_typed_storage

from mega_rl.parallel.agreement import broadcast_json
from mega_rl.rollout.sglang.control import Control, ServerError
from mega_rl.rollout.sglang.server.store import BUCKETS, CONFLICT, READY, Words, digest_of, encode
from mega_rl.rollout.sglang.weights.cuda_ipc import Handle, payload
from mega_rl.rollout.sglang.weights.reshard import first_ranks
from mega_rl.rollout.sglang.weights.transport import (
    FORMAT,
    GRACE_S,
    Server,
    ServerRequests,
    Transport,
    filled,
    open_ranks,
)
from mega_rl.types import Metrics


@dataclass
class _Sent:
    """The bucket as it was sent last."""

    words: Words
    count: int
    digest: str


class DeltaTransport(Transport):
    """`Transport` of changes to servers started by our launcher, each on one host."""

    _by_stage = True
    _session = 0
    _is_source = False

    def _open(self) -> None:
        self._world = self._part = open_ranks(timeout_s=3 * self._timeout_s + GRACE_S)
        self._session = broadcast_json(time.time_ns(), self._world)  # later than any before
        self._is_source = self._world.rank in first_ranks(self._weights.engine.sharding.layout)
        self._sent: dict[int, _Sent] = {}

    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        counts: Counter[str] = Counter()
        with ServerRequests(servers if self._is_source else ()) as posts:
            if self._weights.engine.place.gathers_first_copy:
                stream = self._weights.export(bucket_bytes=self._bucket_bytes, own_stage=True)
                if self._is_source:
                    self._post_all(posts, stream, counts)
                deque(stream, maxlen=0)  # gathering takes all ranks
            failed = posts.agree(self._world)
        own = {number: [self._session, sent.count, sent.digest] for number, sent in self._sent.items()}
        of_ranks = self._world.gather_json([own, counts])
        versions = {number: held for one, _ in of_ranks for number, held in one.items()}
        total = Counter[str]()
        for _, one in of_ranks:
            total.update(one)
        changed, words = total.pop("changed"), total.pop("words")
        self.report: Metrics = {
            "sync/bytes": float(max(total.values(), default=0)),  # to the server that got most
            "sync/changed_share": changed / words,
        }
        requests.failed |= {server.index: failed[server.index] for server in requests.servers if server.index in failed}
        requests.start(lambda server, receiver: self._load(server, receiver, versions, version))
        requests.wait()

    def _post_all(self, posts: ServerRequests, stream: Iterator[tuple[str, Tensor]], counts: Counter[str]) -> None:
        stage = self._weights.engine.place.coordinates.pp_rank
        own = {number: bucket for number, bucket in enumerate(self.buckets) if bucket.pp_rank == stage}
        staged = torch.empty(max(bucket.nbytes for bucket in own.values()), dtype=torch.uint8)
        tensors = filled(stream, list(own.values()), lambda _, n: staged[:n], self._weights.dtype)
        for number, (_, data) in zip(own, tensors, strict=True):
            message = self._compare(number, data.view(torch.int16).numpy(), counts)
            posts.wait()
            posts.start(message)
        posts.wait()

    def _compare(self, number: int, words: Words, counts: Counter[str]) -> Callable[[Server, Control], None]:
        """Keep a bucket's words, and return the request that brings a server to them."""
        sent, digest = self._sent.get(number), digest_of(words)
        head: dict[str, Any] = {"bucket": number, "digest": digest}
        changes = None
        counts["words"] += words.size
        if sent is None:
            sent = self._sent[number] = _Sent(words.copy(), 1, digest)
            counts["changed"] += words.size
        else:
            changes, changed = encode(sent.words, words)
            head["base"] = [self._session, sent.count]
            counts["changed"] += changed
            sent.words[:] = words
            sent.count, sent.digest = sent.count + (digest != sent.digest), digest
        head["version"] = [self._session, sent.count]
        whole = sent.words.data.cast("B")

        def post(server: Server, receiver: Control) -> None:
            def send(head: dict[str, Any], content: bytes | memoryview) -> None:
                message = json.dumps(head).encode() + b"\n" + content
                counts[str(server.index)] += len(message)
                receiver.call("POST", BUCKETS, content=message)

            if changes is not None and len(changes) < len(whole):
                try:
                    send(head, changes)
                    return
                except ServerError as error:
                    if error.status != CONFLICT:
                        raise
            send({**head, "base": None}, whole)

        return post

    def _load(self, server: Server, receiver: Control, versions: dict[str, Any], version: int) -> None:
        """Let a server whose buckets all have these versions load them."""
        handles = receiver.object("POST", READY, {"versions": versions, "tp": server.tp})
        for number, bucket in enumerate(self.buckets):
            text = payload(_opened(handles[str(number)]), bucket, self._weights.dtype)
            last = version if bucket is self.buckets[-1] else None
            receiver.update_from_tensor([text] * server.tp, load_format=FORMAT, version=last)


def _opened(handle: Sequence[Any]) -> Handle:
    """Return an object that unpickles to the uint8 tensor of a store's handle, on the store's host."""
    manager, name, nbytes = base64.b64decode(handle[0]), base64.b64decode(handle[1]), handle[2]
    storage = Handle((rebuild_storage_filename, (torch.UntypedStorage, manager, name, nbytes)))
    typed = Handle((rebuild_typed_storage, (storage, torch.uint8)))
    return Handle((rebuild_tensor, (Tensor, typed, (0, (nbytes,), (1,), False))))
