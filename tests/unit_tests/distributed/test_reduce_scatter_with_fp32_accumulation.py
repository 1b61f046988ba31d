"""bf16 messages, FP32 sums: the collective alone, against others, and through the buckets of DDP."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.config.schema.engine import DdpConfig
from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.test_distributed_data_parallel import Layers, groups_of, own_part, wrapped

TRIALS = 12
SMALL_PIECE = 1024  # bytes: messages go in many pieces


def contribution(rank: int, trial: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` has: signs and magnitudes of 2**-20 to 2**20 mixed, so that every order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * trial + rank)
    mantissa = torch.randn(numel, generator=generator)
    exponent = torch.randint(-20, 20, (numel,), generator=generator)
    near = torch.rand(numel, generator=generator) < 0.5  # half of the elements of one magnitude on all ranks
    return (mantissa * torch.where(near, torch.ones(()), torch.exp2(exponent.float()))).to(dtype)


def sequential_sum(ranks: list[int], trial: int, numel: int, dtype: torch.dtype, *, mean: bool = False) -> Tensor:
    """The reference: FP32, one rank after the other, one rounding at the end."""
    total = torch.zeros(numel)
    for rank in ranks:
        total = total + contribution(rank, trial, numel, dtype).float()
    return (total / len(ranks) if mean else total).to(dtype)


def function_cases(rank: int, size: int, device: torch.device) -> list[str]:
    """What is wrong with `reduce_scatter_fp32` and `all_reduce_fp32`; empty is good."""
    from mega_rl.ddp import reduce_scatter as module

    group = dist.group.WORLD
    assert group is not None
    wrong = []
    draw = random.Random(0)
    scratch = module.Scratch(3000)
    for trial in range(TRIALS):
        shard = draw.choice([1, 3, 64, 333, 1024, 70_001])
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float32])
        mean, in_place, pieces = (draw.random() < 0.5 for _ in range(3))
        what = f"trial {trial}: {shard} x {dtype}, {mean=}, {in_place=}, {pieces=}"
        numel = size * shard
        mine = contribution(rank, trial, numel, dtype).to(device)
        out = mine[rank * shard : (rank + 1) * shard] if in_place else torch.empty(shard, dtype=dtype, device=device)
        module.PIECE_BYTES = SMALL_PIECE if pieces and shard < 10_000 else 256 << 20
        handle = module.reduce_scatter_fp32(
            out, mine, group=group, mean=mean, scratch=scratch if trial % 2 else module.Scratch(mine.nbytes)
        )
        handle.wait()
        handle.wait()  # a second time changes nothing
        expected = sequential_sum(list(range(size)), trial, numel, dtype, mean=mean)
        if not torch.equal(out.cpu(), expected[rank * shard : (rank + 1) * shard]):
            wrong.append(f"{what}: reduce-scatter")
        odd = numel - (size - 1) if shard > 1 else 1  # the last rank's part is shorter, or only the first has one
        whole = contribution(rank, trial, odd, dtype).to(device)
        module.all_reduce_fp32(whole, group=group, mean=mean, scratch=scratch).wait()
        if not torch.equal(whole.cpu(), sequential_sum(list(range(size)), trial, odd, dtype, mean=mean)):
            wrong.append(f"{what}: all-reduce of {odd}")
    module.PIECE_BYTES = 256 << 20
    return wrong


def against_others(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Bit-equality with Megatron-Core's implementation, and elements in which a bf16 reduce-scatter differs."""
    from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import reduce_scatter_with_fp32_accumulation

    from mega_rl.ddp.reduce_scatter import Scratch, reduce_scatter_fp32

    group = dist.group.WORLD
    assert group is not None
    shard = 10_000
    mine = contribution(rank, 0, size * shard, torch.bfloat16).to(device)
    ours, theirs, plain, exact = (mine.new_empty(shard) for _ in range(4))
    reduce_scatter_fp32(ours, mine, group=group, scratch=Scratch(mine.nbytes)).wait()
    reduce_scatter_with_fp32_accumulation(theirs, mine, dist.ReduceOp.SUM, group, False)
    dist.reduce_scatter_tensor(plain, mine, group=group)
    wide = torch.empty(shard, device=device)
    dist.reduce_scatter_tensor(wide, mine.float(), group=group)
    exact.copy_(wide)
    return {
        "same_as_upstream": torch.equal(ours, theirs),
        "off_bf16": int((ours != plain).sum()),
        # An FP32 ring adds in another order: it may round the other way where the sum lies between two bf16 numbers.
        "off_fp32": int((ours != exact).sum()),
    }


def across_instances(rank: int, size: int, device: torch.device) -> list[str]:
    """A sum over two groups: rounded once, to bf16, after both."""
    from mega_rl.ddp.reduce_scatter import Scratch, reduce_scatter_fp32

    half = size // 2
    intra = dist.new_subgroups_by_enumeration([list(range(half)), list(range(half, size))])[0]
    inter = dist.new_subgroups_by_enumeration([[place, half + place] for place in range(half)])[0]
    wrong = []
    for trial, (shard, mean) in enumerate([(501, False), (1, False), (501, True)]):
        mine = contribution(rank, trial, half * shard, torch.bfloat16).to(device)
        out = mine[intra.rank() * shard : (intra.rank() + 1) * shard]
        reduce_scatter_fp32(out, mine, group=intra, across=inter, mean=mean, scratch=Scratch(mine.nbytes)).wait()
        sums = []
        for instance in (range(half), range(half, size)):
            total = torch.zeros(half * shard)
            for member in instance:
                total = total + contribution(member, trial, half * shard, torch.bfloat16).float()
            sums.append(total)
        expected = ((sums[0] + sums[1]) / (size if mean else 1)).bfloat16()
        if not torch.equal(out.cpu(), expected[intra.rank() * shard : (intra.rank() + 1) * shard]):
            wrong.append(f"{shard=} {mean=}")
    return wrong


def through_buckets(rank: int, size: int, groups: Any, device: torch.device, *, overlap: bool, mean: bool) -> list[str]:
    """Random gradients through the buckets of two chunks; the second has one group of buckets of two dtypes."""
    from megatron.core.distributed import param_and_grad_buffer

    from mega_rl.ddp.bucket_groups import SummingBucketGroup, scratches

    upstream = param_and_grad_buffer.dist_reduce_scatter_func
    ddp = DdpConfig(
        grad_reduce_in_fp32=False,
        reduce_scatter_fp32_accumulation=True,
        overlap_grad_reduce=overlap,
        bucket_size=700 if overlap else 0,
        average_in_collective=mean,
    )
    modules = [
        Layers(6, fp32=fp32, shared=shared).to(device).cast(torch.bfloat16)
        for fp32, shared in (((), None), ((1, 2), 3))
    ]
    chunks = wrapped(modules, ddp, collection=groups.collection)
    wrong = []
    made = [[len(group.buckets) for group in chunk.bucket_groups] for chunk in chunks]
    if made != [[1] * (3 if overlap else 1), [4]]:
        wrong.append(f"buckets by group: {made}")
    parameters = [(chunk, parameter) for chunk in chunks for parameter in chunk.parameters()]
    for step in range(3):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for number, (_, parameter) in enumerate(parameters):
            values = contribution(rank, 100 * step + number, parameter.numel(), parameter.main_grad.dtype)
            parameter.main_grad.copy_(values.view_as(parameter))
        for chunk, parameter in reversed(parameters):
            if overlap:
                chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
        for chunk in chunks:
            chunk.finish_grad_sync()
        for number, (chunk, parameter) in enumerate(parameters):
            own = own_part(chunk, parameter, sharded=True)
            expected = sequential_sum(
                list(range(size)), 100 * step + number, parameter.numel(), parameter.main_grad.dtype, mean=mean
            )
            if not torch.equal(parameter.main_grad.flatten()[own].cpu(), expected[own]):
                wrong.append(f"step {step}, parameter {number}")
    (scratch,) = scratches(chunks)
    if scratch.nbytes > 2 * (scratch.largest + 4096):
        wrong.append(f"{scratch.nbytes} bytes of scratch for buckets of at most {scratch.largest}")
    before = scratch.nbytes
    if scratch.release() != before or scratch.nbytes:
        wrong.append("scratch not released")
    if not all(isinstance(group, SummingBucketGroup) for chunk in chunks for group in chunk.bucket_groups):
        wrong.append("groups not replaced")
    if param_and_grad_buffer.dist_reduce_scatter_func is not upstream:
        wrong.append("Megatron-Core's own function was replaced")
    return wrong


def linked_groups(groups: Any, device: torch.device) -> list[str]:
    """What is wrong with the references between replaced groups; empty is good."""
    ddp = DdpConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=700)
    chunk = wrapped([Layers(6).to(device)], ddp, collection=groups.collection)[0]
    wrong = []
    for earlier, later in zip(chunk.bucket_groups[1:], chunk.bucket_groups, strict=False):
        if earlier.next_param_gather_bucket_group is not later:
            wrong.append("gathers are not in the order of the forward")
    if chunk.bucket_groups[0].next_param_gather_bucket_group is not None:
        wrong.append("something follows the last gather")
    for parameter, group in chunk.param_to_bucket_group.items():
        if group not in chunk.bucket_groups or parameter not in group.params:
            wrong.append("a parameter is in another group")
    return wrong


def run_world(rank: int, size: int) -> dict[str, Any]:
    """Everything of one world size in one launch."""
    with groups_of(size) as (groups, device):
        return {
            "function": function_cases(rank, size, device),
            "others": against_others(rank, size, device),
            "instances": across_instances(rank, size, device) if size > 1 else [],
            "buckets": [
                f"{overlap=} {mean=}: {wrong}"
                for overlap, mean in itertools.product((False, True), repeat=2)
                for wrong in through_buckets(rank, size, groups, device, overlap=overlap, mean=mean)
            ],
            "links": linked_groups(groups, device),
        }


pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by world size."""
    return {size: run_ranks(size, run_world, size, timeout_s=120) for size in SIZES}


WRONG = {
    "function": "bits of a sequential fp32 sum: sizes, dtypes, sums, means, in place, in pieces",
    "instances": "fp32 sums of optimizer instances are added before anything is rounded",
    "buckets": "the same bits through DDP, with and without overlap; several buckets in a group; bounded memory",
    "links": "every parameter finds its group, and every group the next one to gather",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wrong(worlds: dict[int, list[dict[str, Any]]], size: int, what: str) -> None:
    assert [rank[what] for rank in worlds[size]] == [[]] * size, WRONG[what]


@pytest.mark.parametrize("size", SIZES)
def test_same_as_upstream(worlds: dict[int, list[dict[str, Any]]], size: int) -> None:
    """Bit-equal to Megatron-Core's own, which adds in rank order too at these sizes."""
    assert all(rank["others"]["same_as_upstream"] for rank in worlds[size])


@pytest.mark.parametrize("size", SIZES)
def test_rounds_once(worlds: dict[int, list[dict[str, Any]]], size: int) -> None:
    """A bf16 reduce-scatter differs once there are two additions; an FP32 one hardly, in the order of its sums."""
    for rank in worlds[size]:
        others = rank["others"]
        assert others["off_fp32"] <= (0 if size == 2 else 10)  # of 10000: sums that end next to a tie
        assert others["off_bf16"] > 500 if size == 4 else others["off_bf16"] == 0


def test_mean_over_one_of_its_terms() -> None:
    """Rounded once, also where the result takes the place of the first term."""
    from mega_rl.ddp.reduce_scatter import sum_rows

    rows = list(torch.randn(2, 100_000, generator=torch.Generator().manual_seed(1)).bfloat16())
    expected = ((rows[0].float() + rows[1].float()) / 2).bfloat16()
    sum_rows(rows, rows[0], divisor=2)
    assert torch.equal(rows[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_sums_on_a_gpu(ranks: int, dtype: torch.dtype) -> None:
    """Within one rounding of `dtype` and an FP32 sum's own error; sums in bf16 are a hundred times beyond it."""
    from mega_rl.ddp.reduce_scatter import sum_rows

    rows = torch.stack([contribution(rank, 0, 100_000, dtype) for rank in range(ranks)])
    finest = torch.finfo(dtype)
    for divisor in (1, ranks):
        out = torch.full((100_000,), torch.nan, dtype=dtype, device="cuda")
        sum_rows(rows.cuda(), out, divisor=divisor)
        expected = rows.double().sum(0) / divisor
        slack = finest.eps / 2 * expected.abs() + 2**-21 * rows.double().abs().sum(0) / divisor + finest.tiny
        inside = expected.abs() <= finest.max  # float16 has no room for some sums
        assert ((out.cpu().double() - expected).abs() <= slack)[inside].all()
