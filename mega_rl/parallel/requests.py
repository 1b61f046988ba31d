"""Rows of matrices by request: each rank asks others for rows that they hold, and answers what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RowRequests:
    """Rows of `width` elements that the ranks of a group hold between them.

    Of a row travel its number, 8 bytes, and its elements, from one owner to each rank that asks.
    """

    group: ProcessGroup
    width: int
    dtype: torch.dtype

    def fetch(self, numbers: Tensor, owners: Tensor, serve: Callable[[Tensor], Tensor]) -> Tensor:
        """Return row `numbers[i]` of rank `owners[i]`, [n, width], where the group's tensors travel; collective.

        numbers and owners: [n] int64 on the host; n may differ between ranks and be 0. serve: gets the numbers that
        others ask this rank for, [m] int64 on the host, m may be 0, and returns the rows, [m, width] on any device.
        """
        assert numbers.shape == owners.shape, f"{tuple(numbers.shape)} rows of {tuple(owners.shape)} owners"
        on_gpu = dist.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        order = owners.argsort(stable=True)
        sent = torch.bincount(owners, minlength=self.group.size())
        received = torch.empty_like(sent).to(device)
        dist.all_to_all_single(received, sent.to(device), group=self.group)
        ours, theirs = sent.tolist(), received.tolist()
        asked = torch.empty(sum(theirs), dtype=torch.int64, device=device)
        dist.all_to_all_single(asked, numbers[order].to(device), theirs, ours, group=self.group)
        rows = serve(asked.cpu())
        expected = (len(asked), self.width)
        assert (rows.shape, rows.dtype) == (expected, self.dtype), f"{tuple(rows.shape)} {rows.dtype} for {expected}"
        # As bytes: not every backend carries every dtype.
        answer = rows.to(device).contiguous().view(torch.uint8)
        arrived = torch.empty(len(numbers), self.width * self.dtype.itemsize, dtype=torch.uint8, device=device)
        dist.all_to_all_single(arrived, answer, ours, theirs, group=self.group)
        result = torch.empty(len(numbers), self.width, dtype=self.dtype, device=device)
        result[order.to(device)] = arrived.view(self.dtype)
        return result
