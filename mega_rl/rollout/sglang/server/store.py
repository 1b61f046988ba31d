"""Weights of a server in its host's memory, to which a trainer sends changes; the part inside the server's process.

The launcher serves it under `/mega_rl/`. A bucket is bytes with a version and a digest. A message changes one bucket
once, from the version that it names to the next, and the digest must then be the trainer's. Nothing reaches SGLang
before every bucket has the version that the trainer asks for. Then SGLang's ranks open the same memory and load it all.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mega_rl.rollout.sglang.control import Receive, Scope, Send

if TYPE_CHECKING:
    from torch import UntypedStorage

BUCKETS, READY = "/mega_rl/weights", "/mega_rl/weights/ready"
CONFLICT = 409  # status of a message that comes too late, or whose base is missing
_GAPS = {1: np.uint8, 2: np.uint16}  # by bytes: words that stay between two that change

Words = NDArray[np.int16]
Version = tuple[int, int]  # (number of the trainer's session, count of the bucket's changes in it)


def digest_of(words: Words) -> str:
    """Return 64 bits of the SHA-256 of all words."""
    return hashlib.sha256(words.data).hexdigest()[:16]


def encode(old: Words, new: Words) -> tuple[bytes, int]:
    """Return (changes from `old` to `new`, both [n]; number of changed words); `apply` is the inverse.

    A change is a gap and a difference. Most differences of bf16 are 1 or -1, which compress to a few bits. A gap too
    wide for its field is cut by words that change by 0.
    """
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    width = min(_GAPS, key=lambda width: (2 + width) * (len(gaps) + int((gaps >> 8 * width).sum())))
    cuts = gaps >> 8 * width
    at = np.cumsum(cuts + 1) - 1
    size = int(at[-1]) + 1 if len(at) else 0
    fields = np.full(size, -1, dtype=np.int64).astype(_GAPS[width])
    fields[at] = gaps & ((1 << 8 * width) - 1)
    differences = np.zeros(size, dtype=np.int16)
    differences[at] = new[places] - old[places]
    planes = differences.view(np.uint8).reshape(-1, 2).T  # high bytes apart from low ones compress better
    return bytes([width]) + zlib.compress(fields.tobytes() + planes.tobytes(), 1), len(places)


def apply(words: Words, changes: bytes) -> None:
    """Add changes that `encode` made to `words` in place. Raises ValueError where they are not of these words."""
    width = changes[0] if changes else 0
    try:
        content = zlib.decompress(changes[1:])
        fields, planes = np.split(np.frombuffer(content, dtype=np.uint8), [len(content) // (width + 2) * width])
        gaps = fields.view(_GAPS[width]).astype(np.int64)
    except (KeyError, zlib.error) as error:
        raise ValueError(f"not changes: {error}") from None
    places = np.cumsum(gaps + 1) - 1
    if len(planes) != 2 * len(gaps) or (len(places) and places[-1] >= len(words)):
        raise ValueError(f"{len(gaps)} gaps and {len(planes)} bytes of differences for {len(words)} words")
    words[places] += np.ascontiguousarray(planes.reshape(2, -1).T).view(np.int16).reshape(-1)


class Refused(Exception):
    """A message that the store does not take; the message says why."""


@dataclass
class _Bucket:
    storage: UntypedStorage
    words: Words  # the storage's
    version: Version = (0, 0)
    digest: str = ""  # empty: the words are not those of any version


class WeightStore:
    """Buckets by number. Methods raise Refused, and may be called from several threads."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._lock = threading.Lock()

    def take(self, message: bytes) -> None:
        """Take a message: a line of JSON (`bucket`, `version`, `digest`, `base`) and the content.

        base: version to which the content is changes; null: the content is all words of the bucket.
        """
        end = message.index(b"\n")
        head, content = json.loads(message[:end]), memoryview(message)[end + 1 :]
        if not head:
            return  # the trainer measures the link
        version, number = tuple(head["version"]), head["bucket"]
        with self._lock:
            held = self._buckets.get(number)
            if held is not None and held.digest and version <= held.version:
                if (version, head["digest"]) == (held.version, held.digest):
                    return  # it came twice
                raise Refused(f"bucket {number} has version {held.version}, and {version} comes too late")
            if head["base"] is None:
                if held is None or held.words.nbytes != len(content):
                    held = self._buckets[number] = _new_bucket(len(content))
                held.digest = ""
                held.words[:] = np.frombuffer(content, dtype=np.int16)
            elif held is None or not held.digest or tuple(head["base"]) != held.version:
                raise Refused(f"bucket {number} has no version {head['base']}")
            else:
                held.digest = ""
                try:
                    apply(held.words, bytes(content))
                except ValueError as error:
                    raise Refused(f"bucket {number}: {error}") from None
            if digest_of(held.words) != head["digest"]:
                raise Refused(f"bucket {number} has another digest than the trainer's after version {version}")
            held.version, held.digest = version, head["digest"]

    def ready(self, versions: Mapping[str, list[Any]], *, tp: int) -> dict[str, list[Any]]:
        """Return by bucket a handle that each of `tp` processes opens once, if all have these versions.

        versions: [session, count, digest] of all buckets; the store forgets others.
        """
        with self._lock:
            for number, (session, count, digest) in versions.items():
                held = self._buckets.get(int(number))
                if held is None or (held.version, held.digest) != ((session, count), digest):
                    state = "missing" if held is None else f"of version {held.version}, digest {held.digest or 'wrong'}"
                    raise Refused(f"bucket {number} is {state}, not ({session}, {count}), digest {digest}")
            self._buckets = {int(number): self._buckets[int(number)] for number in versions}
            return {number: _handle(self._buckets[int(number)].storage, tp) for number in versions}


def _new_bucket(nbytes: int) -> _Bucket:
    import torch

    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    except RuntimeError as error:
        raise Refused(f"no {nbytes} bytes of shared memory: {error}") from None
    return _Bucket(storage, torch.empty(0, dtype=torch.int16).set_(storage).numpy())


def _handle(storage: UntypedStorage, openings: int) -> list[Any]:
    manager, name, nbytes = storage._share_filename_cpu_()
    for _ in range(openings):
        storage._shared_incref()
    return [base64.b64encode(part).decode("ascii") for part in (manager, name)] + [nbytes]


class StoreEndpoints:
    """ASGI middleware: the store's two endpoints, and a GET of the first, which tells a trainer that they are there."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any], *, store: WeightStore) -> None:
        self._app, self._store = app, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (BUCKETS, READY):
            await self._app(scope, receive, send)
            return
        content, more = bytearray(), True
        while more:
            event = await receive()
            content += event.get("body", b"")
            more = event.get("more_body", False)
        status = 200
        answer: dict[str, object] = {}
        try:
            if scope["path"] == READY:
                asked = json.loads(content)
                answer |= self._store.ready(asked["versions"], tp=asked["tp"])
            elif scope["method"] == "POST":
                await asyncio.to_thread(self._store.take, bytes(content))
        except Refused as error:
            status, answer = CONFLICT, {"message": str(error)}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
