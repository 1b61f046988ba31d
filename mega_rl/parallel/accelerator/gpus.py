"""Binding of ranks to the GPUs of their machine: one each, or none for any of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from mega_rl.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = {VISIBLE: ""}  # environment of a rank that runs on the CPU of a machine with GPUs


def gpu_for_each(ranks: int) -> bool:
    """Return whether this machine shows that many GPUs, so that every one of its ranks can have its own."""
    return torch.cuda.device_count() >= ranks


def environment_of_ranks(ranks: int) -> Mapping[str, str]:
    """Return the variables for ranks that run on GPUs if each can have one, and all on the CPU if not."""
    return {} if gpu_for_each(ranks) else HIDDEN


def device_index(environment: Mapping[str, str], *, count: int) -> int:
    """Return the index of this rank's GPU among the `count` visible ones: LOCAL_RANK, 0 without a launcher.

    A launcher that shows each process only its own GPU (Ray, Slurm with --gpus-per-task=1) leaves a single index, 0,
    for every local rank. It has set CUDA_VISIBLE_DEVICES to one device then, as a user may have who starts several
    ranks on that device; `claim` finds those when the ranks meet.

    Raises UserError: more local ranks than visible GPUs.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank < count:
        return local_rank
    if count == 1 and len([name for name in environment.get(VISIBLE, "").split(",") if name.strip()]) == 1:
        return 0
    raise UserError(
        f"LOCAL_RANK={local_rank}: only {count} CUDA device(s) are visible, and each rank needs its own; start at most "
        f"{count} rank(s) per node, or set {VISIBLE}= (empty) to train on the CPU"
    )


def claim(identity: str, *, store: Store, rank: int, timeout: timedelta) -> None:
    """Enter this rank as the only user of its device into the store that all ranks share.

    identity: a name of the device that is unique among all machines; empty for a CPU, which ranks may share.

    Raises UserError: another rank uses the same device.
    """
    if not identity:
        return
    store.set_timeout(timeout)
    owner = int(store.compare_set(f"device/{identity}", "", str(rank)))
    if owner != rank:
        raise UserError(
            f"ranks {owner} and {rank} have the same CUDA device ({identity}), and each needs its own; start one rank "
            f"per device, let {VISIBLE} show every rank's device or each rank its own, or set {VISIBLE}= (empty) to "
            "train on the CPU"
        )
