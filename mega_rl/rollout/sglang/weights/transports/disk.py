"""Transport through a checkpoint on disk that servers read: slow, and possible with any shared file system."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mega_rl.converters.live.save import SaveOptions, save_hf
from mega_rl.errors import UserError
from mega_rl.rollout.sglang.weights.transport import (
    GRACE_S,
    Meeting,
    Receiver,
    SendReport,
    Server,
    ServerRequests,
    chosen,
)

if TYPE_CHECKING:
    from mega_rl.rollout.sglang.weights.source import TrainerWeights

BUCKET_BYTES = 64 << 20  # that ranks gather at a time; what waits to be written is bounded besides


class DiskTransport:
    """`Transport` through a folder that is complete and flushed before a server reads it, and there until the next.

    Rank 0 writes and asks all servers; a bucket is the whole model.
    """

    name = "disk"

    def __init__(
        self,
        weights: TrainerWeights,
        servers: Sequence[Server],
        *,
        folder: Path,
        source: Path,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """folder: for this transport alone, seen by rank 0 and all servers. source: the model's checkpoint.

        timeout_s: of a server's answer. A server's `receiver` is needed on rank 0.
        """
        self._weights, self._servers = weights, list(servers)
        self._folder, self._source = folder, source
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s + GRACE_S
        self._world: Meeting | None = None
        # Kept until the next update: a server answers when its first tensor-parallel rank has read the checkpoint, and
        # another rank that no longer finds the files goes on with the old weights.
        self._written: Path | None = None

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        """Send a checkpoint as `Transport.send` does; a full disk fails all servers."""
        started = time.perf_counter()
        if self._world is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
            self._world = Meeting(group, timeout_s=self._timeout_s)
        target = (self._folder / f"version-{version}").absolute()
        leads = dist.get_rank() == 0
        if leads and self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
        with ServerRequests(chosen(self._servers, servers) if leads else []) as requests:
            try:
                self._write(target)
            except (UserError, OSError) as error:
                requests.fail_all(f"weights could not be written for it: {error}")
            self._world.barrier("when the weights were written")

            def load(server: Server, receiver: Receiver) -> None:
                receiver.update_from_disk(str(target), version=version)

            requests.start(load)
            requests.wait()
            self._written = target
            slots = [slot for bucket in self._weights.buckets(self._bucket_bytes) for slot in bucket.slots]
            report = SendReport(bytes=sum(slot.end - slot.start for slot in slots), buckets=1, tensors=len(slots))
            return requests.agree(report, self._world, leaders=[0], started=started)

    def close(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._world is not None:
            self._world.close()
            self._world = None

    def _write(self, target: Path) -> None:
        """Write one checkpoint; collective. Raises on rank 0 only, after all ranks have done their part."""
        weights = self._weights
        save_hf(
            weights.chunks(),
            target,
            source=self._source,
            place=replace(weights.engine.place, bucket_bytes=self._bucket_bytes),
            options=SaveOptions(dtype=weights.dtype, mtp="drop", overwrite=True),
        )
