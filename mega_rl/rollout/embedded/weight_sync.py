"""Weight sync to a rollout engine in the same process, with proof that the weights arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from mega_rl.tracking import progress
from mega_rl.types import Metrics

if TYPE_CHECKING:
    from mega_rl.rollout.embedded.engine import HFRolloutEngine


def checksum(tensor: Tensor, dtype: torch.dtype) -> str:
    """ "float32[4, 8]:<16 hex digits>" of a tensor after the cast to `dtype`.

    The digits are xxh3_64 over type, shape and the contiguous bytes, so that a transposed square matrix differs from
    its original and the same bits in another type differ too.
    """
    data = tensor.detach().to(device="cpu", dtype=dtype)
    header = f"{str(dtype).removeprefix('torch.')}{list(data.shape)}"
    digest = xxhash.xxh3_64(header.encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return f"{header}:{digest.hexdigest()}"


def buckets(weights: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield runs of weights of at most `max_bytes` together; a larger single weight has a bucket to itself."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class EmbeddedWeightSync:
    """`protocols.WeightSync` for an engine object in this process.

    `export` is called once per publish and yields (Hugging Face name, full tensor); a tensor must stay unchanged until
    its bucket is full. On a publish that verifies, the sender's tensor in the receiver's dtype and the
    receiver's tensor after the last bucket must have one checksum.
    """

    def __init__(
        self,
        export: Callable[[], Iterator[tuple[str, Tensor]]],
        engine: HFRolloutEngine,
        *,
        bucket_bytes: int,
        verify_interval: int,
    ) -> None:
        self._export, self._engine = export, engine
        self._bucket_bytes, self._verify_interval = bucket_bytes, verify_interval
        self._num_publishes = 0
        self._num_bytes = 0  # in the last publish
        self._weight_version = 0
        self._receiver_dtypes: dict[str, torch.dtype] = {}

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engine holds; 0 before the first publish."""
        return self._weight_version

    def resume_at(self, version: int) -> None:
        """Let the next publish stamp `version`, so that a resumed run counts on."""
        self._weight_version = version - 1

    def publish(self) -> Metrics:
        """Send every weight, verify when due, raise the version; returns metrics.

        Raises RuntimeError naming the weights that arrived damaged or never arrived; the version then stays.
        """
        verify = self._num_publishes % self._verify_interval == 0
        sent: dict[str, str] = {}
        num_bytes = num_buckets = num_tensors = 0
        for bucket in buckets(self._export(), max_bytes=self._bucket_bytes):
            self._engine.load_weights(bucket)
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            progress.report(num_bytes, self._num_bytes or None, unit="B")
            num_buckets += 1
            num_tensors += len(bucket)
            if verify:
                unknown = [name for name, _ in bucket if name not in self._receiver_dtypes]
                for name, total in self._engine.checksums(unknown).items():
                    self._receiver_dtypes[name] = getattr(torch, total.partition("[")[0])  # a checksum begins with it
                sent.update({name: checksum(tensor, self._receiver_dtypes[name]) for name, tensor in bucket})
        if verify:
            self._compare(sent)
        self._engine.finish_update(self._weight_version + 1)
        self._weight_version += 1
        self._num_publishes += 1
        self._num_bytes = num_bytes
        return {
            "rollout/weight_version": float(self._weight_version),
            "sync/bytes": float(num_bytes),
            "sync/buckets": float(num_buckets),
            "sync/tensors": float(num_tensors),
            "sync/verified": float(verify),
        }

    def _compare(self, sent: dict[str, str]) -> None:
        """Raise for the weights whose sum at the receiver differs from the sender's."""
        received = self._engine.checksums(sent)
        damaged = [
            f"{name}: sent {total}, received {received[name]}"
            for name, total in sent.items()
            if received[name] != total
        ]
        if damaged:
            raise RuntimeError(
                f"{len(damaged)} of {len(sent)} weights arrived damaged in the update to version "
                f"{self._weight_version + 1}:\n" + "\n".join(damaged)
            )
