"""The recorder sees every collective of a real group, with the bytes that a rank must send."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.distributed import initialized, run_ranks

F32 = "torch.float32"


def collectives(rank: int) -> list[list[Any]]:
    """Each kind of collective once; (op, size, dtype, bytes) as recorded."""
    import torch.distributed as dist

    from tests.helpers.counting import CollectiveRecorder, total_bytes

    groups, accelerator = initialized()
    from mega_rl.parallel import groups as process_groups

    try:
        eight = torch.ones(8, device=accelerator.device)
        four = torch.ones(4, device=accelerator.device)
        dist.all_reduce(eight, group=groups.dp)  # not recorded: before
        with CollectiveRecorder() as recorder:
            dist.all_reduce(eight, group=groups.dp)
            dist.reduce_scatter_tensor(four, eight, group=groups.dp)
            dist.all_gather_into_tensor(eight, four, group=groups.dp)
            splits = [[1, 7], [3, 5]]
            received = eight.new_empty(sum(splits[source][rank] for source in range(2)))
            theirs = [splits[source][rank] for source in range(2)]
            dist.all_to_all_single(received, eight, theirs, splits[rank], group=groups.dp)
            dist.broadcast(eight.bfloat16(), group_src=0, group=groups.dp)
            send, recv = dist.P2POp(dist.isend, eight, 1 - rank), dist.P2POp(dist.irecv, four.repeat(2), 1 - rank)
            for work in dist.batch_isend_irecv([send, recv] if rank == 0 else [recv, send]):
                work.wait()
            dist.barrier(group=groups.dp)
        assert len(recorder.of(groups.world)) + len(recorder.of(groups.dp)) >= len(recorder.collectives)
        assert total_bytes(recorder.of(groups.dp, "all_gather")) == 16
        assert not recorder.of(groups.tp)
        return [[c.op, c.size, str(c.dtype), c.nbytes] for c in recorder.collectives]
    finally:
        process_groups.destroy()


def test_every_collective_is_seen() -> None:
    """Kinds, group sizes, dtypes and bytes, on both ranks; a barrier moves nothing."""
    for rank, actual in enumerate(run_ranks(2, collectives, strict=False)):
        expected = [
            ["all_reduce", 2, F32, 32],
            ["reduce_scatter", 2, F32, 16],
            ["all_gather", 2, F32, 16],
            ["all_to_all", 2, F32, 4 * (7 if rank == 0 else 3)],
            ["broadcast", 2, "torch.bfloat16", 16],
        ]
        assert [c for c in actual if c[0] not in ("send", "recv")] == expected
        assert sorted(c for c in actual if c[0] in ("send", "recv")) == [["recv", 2, F32, 32], ["send", 2, F32, 32]]
