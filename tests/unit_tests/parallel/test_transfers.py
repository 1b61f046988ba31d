"""Bytes from rank to rank: each arrives at its place, and a failure leaves no rank waiting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mega_rl.parallel.comm import FilePart, cut
from tests.helpers.distributed import run_ranks


def send_around(rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Every rank sends a file to both others, in parts of 1000 bytes; then again where reads or writes fail."""
    import torch.distributed as dist

    from mega_rl.errors import RunError
    from mega_rl.parallel import comm
    from mega_rl.parallel.comm import GroupRanks

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    group = dist.group.WORLD
    assert group is not None
    ranks = GroupRanks(group)
    comm.PART_BYTES = 1000
    parts: list[comm.FilePart] = []
    for source in range(3):
        for target in range(3):
            if source != target:
                for name, size in sizes.items():
                    parts += comm.cut(source, target, f"{name}{source}{target}", 7, size)
    received: dict[str, bytearray] = {}

    def read(part: comm.FilePart, buffer: memoryview) -> None:
        for i in range(part.nbytes):
            buffer[i] = byte(part.source, part.start + i)

    def write(part: comm.FilePart, buffer: memoryview) -> None:
        received.setdefault(part.file, bytearray(max(sizes.values()) + 7))[part.start : part.start + part.nbytes] = (
            buffer
        )

    def fail(part: comm.FilePart, buffer: memoryview) -> None:
        raise RunError(f"no {part.file}")

    failure = comm.transfer(parts, ranks, read=read, write=write)
    on_read = comm.transfer(parts, ranks, read=fail if rank == 1 else read, write=lambda *_: None)
    on_write = comm.transfer(parts, ranks, read=read, write=fail if rank == 2 else lambda *_: None)
    dist.destroy_process_group()
    return {"received": received, "failure": failure, "on read": on_read, "on write": on_write}


def byte(rank: int, at: int) -> int:
    """The byte at a place of a file that a rank sends."""
    return (37 * rank + at * at) % 251


SIZES = {"none": 0, "short": 10, "long": 12345}


def test_a_file_is_cut_into_parts_that_cover_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("mega_rl.parallel.comm.PART_BYTES", 10)
    assert cut(1, 2, "f", 5, 25) == [
        FilePart(1, 2, "f", 5, 10),
        FilePart(1, 2, "f", 15, 10),
        FilePart(1, 2, "f", 25, 5),
    ]
    assert cut(1, 2, "f", 5, 0) == []


def test_every_byte_arrives_and_failures_end() -> None:
    """More parts than are in flight at a time, of all pairs at once."""
    results = run_ranks(3, send_around, SIZES, timeout_s=60, device="cpu")
    for rank, actual in enumerate(results):
        assert actual["failure"] is None
        names = {f"{name}{source}{rank}" for name in ("short", "long") for source in range(3) if source != rank}
        assert set(actual["received"]) == names
        for name, data in actual["received"].items():
            source, size = int(name[-2]), SIZES[name[:-2]]
            assert bytes(data[7 : 7 + size]) == bytes(byte(source, 7 + i) for i in range(size))
            assert not any(data[:7])
    assert [bool(actual["on read"]) for actual in results] == [False, True, False]
    assert [bool(actual["on write"]) for actual in results] == [False, False, True]
