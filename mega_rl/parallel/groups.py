"""Process groups of layouts: built once, passed on as arguments, destroyed completely.

The only file that reads `megatron.core.parallel_state`, whose globals name the groups of one layout at a time: those of
`initialize`, and inside of `current` those of another one.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator, prepare
from mega_rl.parallel.accelerator.base import claim
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

prepare()  # before the first import of Megatron-Core
from megatron.core import parallel_state  # noqa: E402 - as above
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402 - as above
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding  # noqa: E402 - as above
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402 - as above
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed  # noqa: E402 - as above


def _upstream() -> dict[str, object]:
    """Return Megatron-Core's globals: groups, ranks, sizes and buffers of one layout."""
    names = (name for name in vars(parallel_state) if name.startswith("_"))
    return {name: vars(parallel_state)[name] for name in names if name.isupper() or name == _GROUP_LIST}


_GROUP_LIST = "_global_process_group_list"
_BLANK = _upstream()  # without a layout


@contextmanager
def _upstream_is(state: Mapping[str, object]) -> Iterator[None]:
    """Set Megatron-Core's globals to `state` inside, and back afterwards, also after an error."""
    before = _upstream()
    vars(parallel_state).update(state)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


@dataclass(frozen=True)
class Groups:
    """The groups this rank belongs to, every one with the timeout given to `initialize`."""

    layout: ParallelLayout
    coordinates: RankCoordinates
    collection: ProcessGroupCollection  # Megatron-Core's models, DDP, optimizer and schedules take it
    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup  # the replicas' ranks that hold the same part of the model and of the sequences
    cp: ProcessGroup  # the ranks that hold the same part of the model and share each sequence
    dp_cp: ProcessGroup  # dp x cp: the ranks that hold the same part of the model; gradients are summed over them
    experts: ProcessGroup  # ep x etp, etp fastest: the ranks of a pipeline rank that hold all experts between them
    replica: ProcessGroup  # tp x cp x pp: the ranks that hold one copy of the model, tp fastest and pp slowest
    world: ProcessGroup
    # The same ranks over gloo, for values on the host: a rank that waits in an NCCL collective keeps its GPU busy, when
    # a server may need it. The groups themselves where they are gloo's.
    host_replica: ProcessGroup
    host_world: ProcessGroup
    upstream: Mapping[str, object] = field(repr=False)  # Megatron-Core's globals of this layout


def current(groups: Groups) -> AbstractContextManager[None]:
    """Let Megatron-Core's globals name these groups inside, and afterwards again the groups before.

    For building a model on groups of `another`, and for each of its passes.
    """
    return _upstream_is(groups.upstream)


_generation = itertools.count()


@cache
def _rendezvous(timeout: timedelta) -> tuple[Store, int, int]:
    """Return torchrun's (store, rank, world size), or a private store for a process without torchrun.

    Kept for the life of the process: a second TCP store on the same port would race with the first one's end.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return HashStore(), 0, 1
    return next(rendezvous("env://", timeout=timeout))


def initialize(
    layout: ParallelLayout, *, accelerator: Accelerator, timeout_s: float, optimizer_instances: int = 1
) -> Groups:
    """Build the groups of this rank; collective over the world, once until `destroy`.

    Joins the world first unless somebody has. Every group fails a collective that does not end within `timeout_s`
    seconds. `optimizer_instances` sharded copies of the optimizer state split each data-parallel group.

    Raises UserError: the world has not `layout.world_size` ranks, the timeout is not positive, or ranks share a GPU.
    """
    assert not parallel_state.model_parallel_is_initialized(), "groups exist already: destroy() them first"
    if timeout_s <= 0:
        raise UserError(f"trainer.timeout_s={timeout_s}: must be above 0 seconds")
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        _join_world(layout, accelerator=accelerator, timeout=timeout)
    _check_world(layout, dist.get_world_size())
    world = dist.group.WORLD
    assert world is not None
    dist.distributed_c10d._set_pg_timeout(timeout, world)  # somebody else may have made it with another
    host_world = _on_host(world, [list(range(layout.world_size))], timeout=timeout)
    return _build(layout, world, host_world, timeout=timeout, optimizer_instances=optimizer_instances)


def another(layout: ParallelLayout, groups: Groups, *, timeout_s: float) -> Groups:
    """Build the groups of another layout over the world of `groups`; collective, until `destroy`.

    Megatron-Core's globals go on to name `groups`; see `current`. Every group fails a collective that does not
    end within `timeout_s` seconds.

    Raises UserError: the world has not `layout.world_size` ranks.
    """
    _check_world(layout, groups.world.size())
    # Models take no pass at the same time, so one scratch buffer serves them all.
    buffers = {name: value for name, value in _upstream().items() if name.endswith("_MEMORY_BUFFER")}
    with _upstream_is(_BLANK):
        built = _build(layout, groups.world, groups.host_world, timeout=timedelta(seconds=timeout_s))
    return replace(built, upstream={**built.upstream, **buffers})


def _build(
    layout: ParallelLayout,
    world: ProcessGroup,
    host_world: ProcessGroup,
    *,
    timeout: timedelta,
    optimizer_instances: int = 1,
) -> Groups:
    """Build the groups of a layout with Megatron-Core, whose globals name them when it returns; collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=optimizer_instances,
        distributed_timeout_minutes=timeout.total_seconds() / 60,  # a timedelta is made of it: fractions are welcome
        create_gloo_process_groups=False,  # Megatron-Core refuses them next to a ProcessGroupCollection
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    replica = _replica_group(layout, collection, timeout=timeout)
    return Groups(
        layout=layout,
        coordinates=layout.coordinates(dist.get_rank()),
        collection=collection,
        tp=collection.tp,
        pp=collection.pp,
        dp=collection.dp,
        cp=collection.cp,
        dp_cp=collection.dp_cp,
        experts=collection.tp_ep,
        replica=replica,
        world=world,
        host_replica=_on_host(replica, _replicas(layout), timeout=timeout),
        host_world=host_world,
        upstream=_upstream(),
    )


def destroy() -> None:
    """Destroy all layouts' groups and the world, with threads, sockets and memory, if there are any.

    `initialize` may follow. Megatron-Core's own `destroy_model_parallel` only forgets its groups.
    """
    parallel_state.destroy_model_parallel()
    # Rotary embeddings, which know their context-parallel group, stay in a cache of their class; a global is not reset.
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    _clear_sharding_prop_cache()  # it would hand out meshes of these groups, whose names the next ones get
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group's threads and sockets live as long as an object that knows it, and models are full of cycles.
    gc.collect()


def seed_model_parallel(seed: int, groups: Groups) -> None:
    """Seed Megatron-Core's random states: one shared by the tensor-parallel ranks, one of each rank's own.

    Data-parallel ranks get the same states, so replicas start from the same weights; ranks with other experts differ in
    the state that experts draw from.
    """
    at = groups.coordinates
    model_parallel_cuda_manual_seed(
        seed, tp_rank=at.tp_rank, ep_rank=at.ep_rank, etp_rank=at.etp_rank, force_reset_rng=True
    )


def random_tracker() -> Any:
    """Return Megatron-Core's tracker of random states."""
    return get_cuda_rng_tracker()


def _join_world(layout: ParallelLayout, *, accelerator: Accelerator, timeout: timedelta) -> None:
    store, rank, world_size = _rendezvous(timeout)
    _check_world(layout, world_size)
    # A fresh key space each time: gloo would find the addresses of a destroyed world under the old keys.
    store = PrefixStore(f"mega_rl/{next(_generation)}", store)
    claim(accelerator.identity, store=store, rank=rank, timeout=timeout)
    # No `device_id`: with one, each later group, of any backend, splits NCCL's communicator of the whole world, for
    # which ranks wait for each other, and each rank keeps every communicator. NCCL takes the current GPU, which
    # `accelerator.prepare` has set, and connects a group's ranks when they first use it.
    dist.init_process_group(accelerator.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _check_world(layout: ParallelLayout, world_size: int) -> None:
    if world_size != layout.world_size:
        raise UserError(
            f"layout {layout} is for {layout.world_size} rank(s), but {world_size} were started; "
            f"use torchrun --nproc-per-node {layout.world_size} on one node, or change the parallel sizes"
        )


def _replica_group(layout: ParallelLayout, collection: ProcessGroupCollection, *, timeout: timedelta) -> ProcessGroup:
    """Return the replica's group: Megatron-Core's `mp`, or a new one under context parallelism, which `mp` omits."""
    if layout.cp == 1:
        return collection.mp
    group, _ = dist.new_subgroups_by_enumeration(_replicas(layout), timeout=timeout, group_desc="replica")
    return group


def _replicas(layout: ParallelLayout) -> list[list[int]]:
    """Return the ranks of each replica."""
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    return [[rank for rank, place in enumerate(places) if place.dp_rank == dp] for dp in range(layout.dp)]


def _on_host(group: ProcessGroup, ranks: list[list[int]], *, timeout: timedelta) -> ProcessGroup:
    """Return a group, one of those of `ranks`, as a gloo group; collective over the world."""
    if dist.get_backend(group) == "gloo":
        return group
    twin, _ = dist.new_subgroups_by_enumeration(
        ranks, timeout=timeout, backend="gloo", group_desc=f"host {group.group_desc}"
    )
    return twin
