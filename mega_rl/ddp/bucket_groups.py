"""Bucket groups of Megatron-Core with other collectives: FP32 sums, and ones that are fast on gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup, shard_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.ddp.reduce_scatter import Reduction, Scratch, Works, all_reduce_fp32, broadcast_shards, reduce_scatter_fp32


class SummingBucketGroup(_ParamAndGradBucketGroup):
    """Bucket group whose gradients are summed in FP32 and rank order, whatever its buckets' dtype.

    Megatron-Core has this for one bucket per group, sums, and one optimizer instance, by replacing a function of the
    process; here it belongs to the group. Sums or means; several buckets; several optimizer instances; on gloo also
    for FP32 buckets and for the gathering of parameters, where its own collectives are slow.
    """

    def __init__(self, replaced: _ParamAndGradBucketGroup, *, scratch: Scratch) -> None:
        config = replaced.ddp_config
        sharded = config.use_distributed_optimizer
        group: ProcessGroup = (
            replaced.intra_distributed_optimizer_instance_group if sharded else replaced.data_parallel_group
        )
        super().__init__(replaced.buckets, config, group, group.size())
        self.group = group
        self.across: ProcessGroup | None = None
        if config.num_distributed_optimizer_instances > 1:
            self.across = replaced.inter_distributed_optimizer_instance_group
            self.inter_distributed_optimizer_instance_group = self.across
        self.scratch = scratch
        self.fast_gather = dist.get_backend(group) == "gloo"
        self.grad_reduce_handle: Works | None = None
        self.param_gather_handle: Any = None

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start (without overlap: do) the reduction of every bucket."""
        if self.grad_reduce_handle is not None:
            assert self.is_first_batch, "gradients are still travelling: finish_grad_sync comes first"
            return  # until the first step is over, both the schedule and finish_grad_sync ask for it
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        whole = bool(force_all_reduce) or not config.use_distributed_optimizer
        reductions = Works([self._reduce(bucket, whole=whole) for bucket in self.buckets])
        if config.overlap_grad_reduce:
            self.grad_reduce_handle = reductions
        else:
            reductions.wait()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Return when every bucket is reduced; with overlap, all its gradients must have been ready."""
        self.param_gather_dispatched = False
        if not self.ddp_config.overlap_grad_reduce:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
        assert self.grad_reduce_handle is not None, (
            f"the reduction of a bucket has not started: {len(self.per_param_grad_ready_counts)} of "
            f"{len(self.params)} parameters have their gradient"
        )
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather every bucket's parameters from the ranks that updated them."""
        if not self.fast_gather:
            super().start_param_sync(force_sync=force_sync)
            return
        if self.param_gather_handle is not None:
            assert force_sync, "parameters are still travelling: finish_param_sync comes first"
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            return
        size = self.group.size()
        works = Works([broadcast_shards(shard_buffer(one.param_data, size), group=self.group) for one in self.buckets])
        self.param_gather_dispatched = True
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = works
        else:
            works.wait()

    def _reduce(self, bucket: _ParamAndGradBucket, *, whole: bool) -> Reduction:
        """Scale a bucket and start its reduction: to this rank's shard, or `whole` to every rank."""
        gradients: Tensor = bucket.grad_data
        if bucket.gradient_scaling_factor != 1.0:
            gradients *= bucket.gradient_scaling_factor
        mean = self.ddp_config.average_in_collective
        if whole:
            return all_reduce_fp32(gradients, group=self.group, across=self.across, mean=mean, scratch=self.scratch)
        own = shard_buffer(gradients, self.group.size())[self.group.rank()]
        return reduce_scatter_fp32(
            own, gradients, group=self.group, across=self.across, mean=mean, scratch=self.scratch
        )


def use_summing_groups(ddp: DistributedDataParallel, *, scratch: Scratch) -> None:
    """Replace a fresh DDP's bucket groups by `SummingBucketGroup`s of the same buckets.

    Backward and forward hooks look their group up in `param_to_bucket_group` whenever they run, and groups find the
    next to gather in `next_param_gather_bucket_group`: those are the only two references to groups besides the lists.
    """
    replacements = {group: SummingBucketGroup(group, scratch=scratch) for group in bucket_groups(ddp)}
    for group, replacement in replacements.items():
        following = group.next_param_gather_bucket_group
        replacement.next_param_gather_bucket_group = None if following is None else replacements[following]
    ddp.bucket_groups = [replacements[group] for group in ddp.bucket_groups]
    ddp.expert_parallel_bucket_groups = [replacements[group] for group in ddp.expert_parallel_bucket_groups]
    ddp.param_to_bucket_group = {p: replacements[group] for p, group in ddp.param_to_bucket_group.items()}


def bucket_groups(ddp: DistributedDataParallel) -> Iterator[_ParamAndGradBucketGroup]:
    """Yield the dense groups, then those of experts."""
    yield from ddp.bucket_groups
    yield from ddp.expert_parallel_bucket_groups


def gather_outdated(ddp: DistributedDataParallel, *_: object) -> None:
    """Start to gather parameters that are updated but not yet gathered; for `param_sync_func`."""
    for group in bucket_groups(ddp):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def finish_param_sync(chunks: Sequence[object]) -> None:
    """Complete the parameters on every rank of data parallel; collective.

    With `overlap_param_gather` a step leaves each rank with its own shard updated, and the modules gather the rest
    when they next run: whatever else reads parameters calls this first. Chunks that are not in DDP are complete.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.overlap_param_gather:
            continue
        for group in bucket_groups(chunk):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def scratches(chunks: Sequence[object]) -> list[Scratch]:
    """Return the message buffers of these chunks."""
    groups = [group for chunk in chunks if isinstance(chunk, DistributedDataParallel) for group in bucket_groups(chunk)]
    distinct = {id(group.scratch): group.scratch for group in groups if isinstance(group, SummingBucketGroup)}
    return list(distinct.values())


def finalize_sums(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Run Megatron-Core's `finalize_model_grads` without division by a token count: loss weights are global already."""
    kwargs: dict[str, Any] = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    finalize_model_grads(model, None, **kwargs)
