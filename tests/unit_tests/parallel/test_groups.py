"""Groups: who is in them, their timeouts, and that building them again and again leaks nothing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

import mega_rl
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_ranks

LAYOUTS = [
    ParallelLayout(world_size=4, tp=2, pp=2, sequence_parallel=True),
    ParallelLayout(world_size=4, tp=2),
    ParallelLayout(world_size=4, pp=4),
    ParallelLayout(world_size=4, pp=2, vpp=2),
    ParallelLayout(world_size=4, cp=2, tp=2),
    ParallelLayout(world_size=4),
]
TIMEOUT_S = 20.5  # not a whole number of minutes


def members(layout: ParallelLayout, rank: int, *varying: str) -> list[int]:
    """Global ranks that differ from `rank` in the named coordinates only."""
    here = dataclasses.asdict(layout.coordinates(rank))
    fixed = [name for name in here if name not in varying]
    places = [dataclasses.asdict(layout.coordinates(other)) for other in range(layout.world_size)]
    return [other for other, place in enumerate(places) if all(place[name] == here[name] for name in fixed)]


def check_groups(rank: int, layout: ParallelLayout, accelerator: Any) -> None:
    """Members and timeouts of one layout; groups are gone afterwards."""
    from mega_rl.parallel import groups

    built = groups.initialize(layout, accelerator=accelerator, timeout_s=TIMEOUT_S)
    check_members(rank, built, layout, accelerator)
    check_seeds(built, accelerator)
    groups.destroy()


def check_members(rank: int, built: Any, layout: ParallelLayout, accelerator: Any) -> None:
    """Members and timeouts of the groups of one layout."""
    assert built.coordinates == layout.coordinates(rank)
    expected = {
        "tp": members(layout, rank, "tp_rank"),
        "pp": members(layout, rank, "pp_rank"),
        "dp": members(layout, rank, "dp_rank"),
        "replica": members(layout, rank, "tp_rank", "cp_rank", "pp_rank"),
        "world": list(range(4)),
    }
    for name, ranks in expected.items():
        assert dist.get_process_group_ranks(getattr(built, name)) == ranks, (layout, name)
    collection = built.collection
    if rank in (pipeline := members(layout, rank, "pp_rank"))[:: max(1, layout.pp - 1)]:
        ends = sorted({pipeline[0], pipeline[-1]})
        assert dist.get_process_group_ranks(collection.embd) == ends, "tied embeddings need both ends of the pipeline"
    for field in dataclasses.fields(collection):
        group = getattr(collection, field.name)
        if isinstance(group, dist.ProcessGroup):
            timeout = group._get_backend(accelerator.device).options._timeout.total_seconds()
            assert timeout == TIMEOUT_S, (field.name, timeout)
    if accelerator.backend == "gloo":
        assert (built.host_replica, built.host_world) == (built.replica, built.world)
    for group in (built.tp, built.pp, built.dp, built.replica, built.world):
        one = torch.ones(1, device=accelerator.device)
        dist.all_reduce(one, group=group)
        assert one.item() == group.size()


def check_seeds(built: Any, accelerator: Any) -> None:
    """The default stream is common, the model-parallel one differs over tensor-parallel ranks only."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mega_rl.parallel import groups

    for seed in (3, 3, 4):  # again with the same and with another seed
        groups.seed_model_parallel(seed, built)
    common = torch.rand(1, device=accelerator.device)
    with get_cuda_rng_tracker().fork():
        own = torch.rand(1, device=accelerator.device)
    numbers = torch.zeros(4, 3, device=accelerator.device)
    place = built.coordinates
    numbers[built.world.rank()] = torch.tensor([common.item(), own.item(), place.tp_rank], device=accelerator.device)
    dist.all_reduce(numbers, group=built.world)
    assert numbers[:, 0].unique().numel() == 1
    for row in numbers:
        assert torch.equal(numbers[:, 1] == row[1], numbers[:, 2] == row[2])


def threads_and_files(earlier: list[tuple[int, int]]) -> tuple[int, int]:
    """(threads, open files) of this process; a thread more than at first has ten seconds to end."""
    deadline = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/task")) > (earlier or [(1, 0)])[0][0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def build_often(rank: int) -> list[tuple[int, int]]:
    """(threads, open files) after each of many layouts; the last ones repeat."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups

    counts = []
    for layout in [*LAYOUTS, *[LAYOUTS[0]] * 5]:
        check_groups(rank, layout, accelerator)
        counts.append(threads_and_files(counts))
    groups.destroy()  # nothing is left: no error
    return counts


def named_by_upstream() -> list[list[int]]:
    """Ranks of the groups that Megatron-Core's globals name."""
    from megatron.core import parallel_state as upstream

    named = [
        upstream.get_tensor_model_parallel_group(),
        upstream.get_pipeline_model_parallel_group(),
        upstream.get_context_parallel_group(),
        upstream.get_data_parallel_group(),
        upstream.get_expert_model_parallel_group(),
    ]
    return [dist.get_process_group_ranks(group) for group in named]


def two_layouts(rank: int) -> list[tuple[int, int]]:
    """(threads, open files) after each of some pairs of layouts, of which all groups are looked at."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups

    pairs = [(LAYOUTS[0], LAYOUTS[3]), (LAYOUTS[4], LAYOUTS[5])]
    counts = []
    for pair in [*pairs, *[pairs[0]] * 2]:
        check_two(rank, pair, accelerator, groups)
        gc.collect()  # an error's traceback knows the groups of its frames
        counts.append(threads_and_files(counts))
    return counts


def fail_inside(first: Any, second: Any) -> None:
    """Compare what globals name inside of both contexts, then raise ValueError."""
    from mega_rl.parallel.groups import current

    with current(second):
        assert named_by_upstream() == names_of(second) != names_of(first)
        with current(first):
            assert named_by_upstream() == names_of(first)
        assert named_by_upstream() == names_of(second)
        raise ValueError("inside")


def names_of(built: Any) -> list[list[int]]:
    """Ranks of groups, as `named_by_upstream`."""
    named = [built.tp, built.pp, built.cp, built.dp, built.collection.ep]
    return [dist.get_process_group_ranks(group) for group in named]


def check_two(rank: int, pair: tuple[ParallelLayout, ParallelLayout], accelerator: Any, groups: Any) -> None:
    """Groups of both layouts; globals name the first's, and the second's only inside of its context."""
    first = groups.initialize(pair[0], accelerator=accelerator, timeout_s=TIMEOUT_S)
    before = named_by_upstream()
    second = groups.another(pair[1], first, timeout_s=TIMEOUT_S)
    assert named_by_upstream() == before, "the first layout is the one that Megatron-Core reads"
    for built, layout in zip((first, second), pair, strict=True):
        check_members(rank, built, layout, accelerator)
    with pytest.raises(ValueError, match="inside"):
        fail_inside(first, second)
    assert named_by_upstream() == before, "an error leaves the first layout, too"
    groups.destroy()


def test_a_second_layout_of_the_same_ranks_leaves_the_first_as_it_is_and_nothing_behind() -> None:
    for counts in run_ranks(4, two_layouts):
        assert len({threads for threads, _ in counts}) == 1, f"(threads, files) grow: {counts}"
        assert len(set(counts[-2:])) == 1, f"(threads, files) grow: {counts}"


def test_members_timeouts_and_no_leak_over_eleven_layouts() -> None:
    for counts in run_ranks(4, build_often):
        assert len({threads for threads, _ in counts}) == 1, f"(threads, files) grow: {counts}"
        # torch keeps the last group's sockets until the next is made, so only equal layouts leave equal numbers.
        assert len(set(counts[-5:])) == 1, f"(threads, files) grow: {counts}"
        assert counts[-1][1] <= counts[0][1], f"(threads, files) grow: {counts}"


def wait_alone(rank: int) -> float:
    """Seconds until a collective fails that the other rank never joins."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.parallel import groups

    built = groups.initialize(ParallelLayout(world_size=2, tp=2), accelerator=accelerator, timeout_s=1.5)
    start = time.monotonic()
    if rank == 1:
        time.sleep(4)
        return 0.0
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        dist.all_reduce(torch.ones(1), group=built.tp)
    return time.monotonic() - start


def test_a_collective_without_its_peer_fails_in_time() -> None:
    waited, _ = run_ranks(2, wait_alone, device="cpu")
    assert 1.2 < waited < 3.5


def without_torchrun(rank: int) -> list[str]:
    """Errors and the world of one process that torchrun did not start."""
    from mega_rl.parallel.accelerator import prepare

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    accelerator = prepare("auto")
    from mega_rl.parallel import groups

    seen = []
    for layout, timeout_s in ((ParallelLayout(world_size=2), 5.0), (ParallelLayout(), 0.0)):
        with pytest.raises(UserError) as error:
            groups.initialize(layout, accelerator=accelerator, timeout_s=timeout_s)
        seen.append(f"{type(error.value).__name__}: {error.value}")
    for _ in range(2):
        built = groups.initialize(ParallelLayout(), accelerator=accelerator, timeout_s=5)
        dist.barrier(group=built.replica)
        groups.destroy()
    return seen


def with_another_on_its_gpu(rank: int) -> str:
    """The error of a rank whose GPU another one has claimed."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = dataclasses.replace(prepare("cpu"), identity="GPU-a")
    from mega_rl.parallel import groups

    store = HashStore()
    PrefixStore("mega_rl/7", store).set("device/GPU-a", "1")
    groups._generation = itertools.count(7)
    groups._rendezvous = lambda timeout: (store, 0, 2)
    with pytest.raises(UserError) as error:
        groups.initialize(ParallelLayout(world_size=2), accelerator=accelerator, timeout_s=5.0)
    return str(error.value)


def settings_of_the_world(rank: int) -> list[set[str]]:
    """The settings that torch.distributed is given of a rank on a CPU, and of one on a GPU."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.parallel import groups

    given: list[set[str]] = []

    def init_process_group(backend: str, **settings: Any) -> None:
        given.append(set(settings))
        raise UserError("stopped")

    groups._rendezvous = lambda timeout: (HashStore(), 0, 1)
    groups.dist.init_process_group = init_process_group
    for device in ("cpu", "cuda:3"):
        with pytest.raises(UserError, match="stopped"):
            groups.initialize(
                ParallelLayout(),
                accelerator=dataclasses.replace(accelerator, device=torch.device(device)),
                timeout_s=5.0,
            )
    return given


def test_ranks_on_the_same_gpu_are_refused_before_they_connect() -> None:
    (refusal,) = run_ranks(1, with_another_on_its_gpu, device="cpu")
    assert refusal.startswith("ranks 1 and 0 have the same CUDA device (GPU-a)")


def test_world_is_bound_to_no_device() -> None:
    """Each later group would split NCCL's communicator of the world, and gloo's that leave ranks out would hang."""
    (given,) = run_ranks(1, settings_of_the_world, device="cpu")
    assert given == [{"store", "rank", "world_size", "timeout"}] * 2


def test_one_process_needs_no_torchrun() -> None:
    ((too_few, no_time),) = run_ranks(1, without_torchrun, strict=False)
    assert too_few.startswith("UserError: layout tp1-dp2 is for 2 rank(s), but 1 were started")
    assert no_time.startswith("UserError: trainer.timeout_s=0.0")


def build_on_another_backend(rank: int) -> dict[str, tuple[str, list[int]]]:
    """(backend, ranks) of each group of the roles, where the accelerator's backend is not gloo, as on GPUs."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = dataclasses.replace(prepare("cpu"), backend="stand_in")  # type: ignore[type-var]
    from mega_rl.parallel import groups

    def make(store: Any, group_rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, group_rank, size, timeout)

    dist.Backend.register_backend("stand_in", make, devices=["cpu"])
    built = groups.initialize(ParallelLayout(world_size=4, tp=2), accelerator=accelerator, timeout_s=TIMEOUT_S)
    names = ("replica", "world", "host_replica", "host_world")
    kinds = {name: getattr(built, name) for name in names}
    answer = {name: (dist.get_backend(one), dist.get_process_group_ranks(one)) for name, one in kinds.items()}
    groups.destroy()
    return answer


def test_where_engines_have_another_backend_values_on_the_host_travel_by_gloo() -> None:
    for rank, kinds in enumerate(run_ranks(4, build_on_another_backend, device="cpu")):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert kinds == {
            "replica": ("stand_in", pair),
            "world": ("stand_in", [0, 1, 2, 3]),
            "host_replica": ("gloo", pair),
            "host_world": ("gloo", [0, 1, 2, 3]),
        }


def test_roles_wait_for_each_other_on_the_host() -> None:
    """A wait for samples, scores or servers in an NCCL group would keep the GPU from the server that generates."""
    package = Path(mega_rl.__file__).parent
    for folder in ("checkpoint", "rollout", "trainer", "workers"):
        for path in (package / folder).rglob("*.py"):
            assert not re.search(r"groups\.(world|replica)\b", path.read_text(encoding="utf-8")), path
