"""Bytes from rank to rank: each arrives at its place, and a failure leaves no rank waiting."""

from __future__ import annotations

from mega_rl.parallel.transfers import FilePart, cut
from tests.helpers.distributed import run_ranks
from tests.unit_tests.parallel.transfers_on_ranks import byte, send_around

SIZES = {"none": 0, "short": 10, "long": 12345}


def test_a_file_is_cut_into_parts_that_cover_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("mega_rl.parallel.transfers.PART_BYTES", 10)
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
