"""Gradients of experts are added over the ranks that hold the same expert, those of everything else over dp x cp."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import make_config, replaced
from tests.helpers.models import write_tiny_checkpoint

# Experts' layout -> (parallel settings, ranks over which an expert's gradient is a sum); four ranks in all.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "ep1-etp1": ({}, 4),
    "ep2-etp1": ({"ep": 2}, 2),
    "ep1-etp2": ({"etp": 2}, 2),
    "ep2-etp2": ({"ep": 2, "etp": 2}, 1),
    "ep1-etp1-tp2-sp": ({"tp": 2, "sequence_parallel": True, "etp": 1}, 4),
}


def combinations(layout: str) -> list[dict[str, Any]]:
    """Distributed optimizer x overlap x average x instances, as far as they go together."""
    chosen = []
    for sharded, overlap, average, instances in itertools.product((False, True), (False, True), (False, True), (1, 2)):
        if instances == 1 or (sharded and LAYOUTS[layout][1] > 1 and LAYOUTS[layout][0].get("tp", 1) == 1):
            chosen.append({"sharded": sharded, "overlap": overlap, "average": average, "instances": instances})
    return chosen


def name_of(layout: str, case: dict[str, Any]) -> str:
    """A case's name."""
    return f"{layout} " + " ".join(f"{key}={value:d}" for key, value in case.items())


def synced(engine: Any, groups: Any, *, average: bool) -> dict[str, Any]:
    """How far every synchronised gradient of two rounds is from the sum (or average) over its group.

    Rank r fills parameter i with (r + 1) (i + 1): whole numbers, so every sum is exact. The first round starts its
    communication at the end, the second, with overlap, as the last parameter of a bucket is ready.
    """
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    chunk = engine.chunks[0]
    numbers = {parameter: i + 1 for i, (_, parameter) in enumerate(chunk.module.named_parameters())}
    experts = {parameter for name, parameter in chunk.module.named_parameters() if ".mlp.experts." in name}
    dense_ranks = dist.get_process_group_ranks(groups.dp_cp)
    expert_ranks = dist.get_process_group_ranks(groups.collection.expt_dp)
    apart = {parameter for buffer in chunk.expert_parallel_buffers for parameter in buffer.params}
    actual: dict[str, Any] = {
        "experts": len(experts),
        "experts apart": apart == experts,
        "dense group": len(dense_ranks),
        "expert group": len(expert_ranks),
        "buckets": sum(len(group.buckets) for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)),
        "wrong": 0.0,
        "checked": 0,
    }
    for _ in range(2):
        chunk.zero_grad_buffer()
        for parameter, number in numbers.items():
            parameter.main_grad.fill_((dist.get_rank() + 1) * number)
        bucket_groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        if chunk.ddp_config.overlap_grad_reduce:
            for bucket_group in bucket_groups:
                for bucket in bucket_group.buckets:
                    for parameter in bucket.params_list:
                        bucket_group.register_grad_ready(parameter)
        chunk.finish_grad_sync()
        for bucket_group, bucket in ((group, bucket) for group in bucket_groups for bucket in group.buckets):
            expected = bucket.grad_data.clone()
            for parameter in bucket.params_list:
                ranks = expert_ranks if parameter in experts else dense_ranks
                # Not `bucket.param_to_index`, which takes no account of the alignment under the distributed optimizer.
                start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                stop = start + parameter.numel()
                total = numbers[parameter] * sum(rank + 1 for rank in ranks)
                expected[start:stop] = total / len(dense_ranks) if average else total
            kept, wanted = bucket.grad_data, expected
            if chunk.ddp_config.use_distributed_optimizer:
                size = bucket_group.intra_distributed_optimizer_instance_size
                rank = bucket_group.intra_distributed_optimizer_instance_rank
                kept, wanted = (shard_buffer(tensor, size)[rank] for tensor in (kept, wanted))
            actual["wrong"] = max(actual["wrong"], float((kept - wanted).abs().max()))
            actual["checked"] += kept.numel()
    return actual


def run(rank: int, checkpoint: str) -> dict[str, Any]:
    """Every layout and combination, one set of groups for each number of optimizer instances."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_actor, session

    actual = {}
    for layout in LAYOUTS:
        for instances in (1, 2):
            cases = [case for case in combinations(layout) if case["instances"] == instances]
            if not cases:
                continue
            base = replaced(make_config(Path(checkpoint)), "engine.megatron", **LAYOUTS[layout][0])
            with session(replaced(base, "engine.megatron.ddp", optimizer_instances=instances), accelerator) as groups:
                for case in cases:
                    config = replaced(base, "engine.megatron.optimizer", distributed=case["sharded"])
                    config = replaced(
                        config,
                        "engine.megatron.ddp",
                        optimizer_instances=instances,
                        overlap_grad_reduce=case["overlap"],
                        average_in_collective=case["average"],
                        bucket_size=4000,
                    )
                    engine = build_actor(config, groups, accelerator)
                    actual[name_of(layout, case)] = synced(engine, groups, average=case["average"])
    return actual


pytestmark = pytest.mark.timeout(600)  # the first test pays for the launch

CASES = {name_of(layout, case): (layout, case) for layout in LAYOUTS for case in combinations(layout)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, by case."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="mixtral", num_hidden_layers=2)
    return run_ranks(4, run, str(checkpoint), timeout_s=240)


@pytest.mark.parametrize("name", list(CASES))
def test_every_gradient_is_the_sum_over_its_group(results: list[dict[str, Any]], name: str) -> None:
    """Exactly, in the part of each bucket that a rank keeps, twice in a row; or the average over dp x cp."""
    layout, case = CASES[name]
    settings, expert_ranks = LAYOUTS[layout]
    for rank in results:
        answer = rank[name]
        assert answer["wrong"] == 0.0
        assert answer["dense group"] == 4 // settings.get("tp", 1)
        assert answer["expert group"] == expert_ranks
        if case["overlap"]:
            assert answer["buckets"] >= 2
    # Two layers of 4 experts with 2 weights each.
    held = 16 // settings.get("ep", 1)
    assert {rank[name]["experts"] for rank in results} == {held}
    assert all(rank[name]["experts apart"] for rank in results)


def test_sharding_keeps_a_part(results: list[dict[str, Any]]) -> None:
    """What is compared is a quarter of the dense buckets with one instance of the optimizer, half with two."""

    def checked(**changes: Any) -> int:
        case = {"sharded": True, "overlap": False, "average": False, "instances": 1, **changes}
        return int(results[0][name_of("ep1-etp1", case)]["checked"])

    assert 2 * checked() == checked(instances=2)
    assert checked(sharded=False) > 3 * checked()


def test_overlap_cuts_buckets(results: list[dict[str, Any]]) -> None:
    """With overlap there are several, so that communication starts before the backward ends."""
    names = [name_of("ep1-etp1", case) for case in combinations("ep1-etp1") if case["overlap"]]
    assert all(results[0][name]["buckets"] > 3 for name in names)
