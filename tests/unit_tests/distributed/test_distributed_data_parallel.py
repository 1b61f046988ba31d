"""DDP over the groups it is given: default ones or the caller's, and whole engines against one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.config.schema.engine import DdpConfig
from mega_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL, covering

WIDTH = 24
MICRO_BATCHES = 2

RESUMED: dict[str, dict[str, Any]] = {
    "gather": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000},
    "instances": {"overlap_grad_reduce": True, "optimizer_instances": 2, "bucket_size": 2000},
}


class Layers(torch.nn.Module):
    """Linear layers with a tanh between them; `shared` names the layer that is marked as a shared embedding."""

    def __init__(
        self, count: int, width: int = WIDTH, *, bias: bool = True, shared: int | None = None, fp32: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=bias) for _ in range(count))
        self.keeps_fp32 = fp32
        if shared is not None:
            self.layers[shared].weight.shared_embedding = True

    def cast(self, dtype: torch.dtype) -> Layers:
        """Parameters in `dtype`, those of the layers in `fp32` excepted."""
        for number, layer in enumerate(self.layers):
            layer.to(torch.float32 if number in self.keeps_fp32 else dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


@contextmanager
def groups_of(world_size: int, *, optimizer_instances: int = 1) -> Iterator[tuple[Any, torch.device]]:
    """(Groups, device) of a world of data-parallel ranks."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups

    made = groups.initialize(
        ParallelLayout(world_size), accelerator=accelerator, timeout_s=60.0, optimizer_instances=optimizer_instances
    )
    try:
        yield made, accelerator.device
    finally:
        groups.destroy()


def wrapped(
    modules: Sequence[torch.nn.Module], ddp: DdpConfig, *, collection: Any, distributed_optimizer: bool = True
) -> list[Any]:
    """The modules as chunks in DDP."""
    from megatron.core.transformer import TransformerConfig

    from mega_rl.ddp.wrap import wrap_chunks

    per_token = not ddp.average_in_collective
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=per_token
    )
    chunks: Any = modules
    return wrap_chunks(
        chunks, config=config, ddp=ddp, distributed_optimizer=distributed_optimizer, collection=collection
    )


def inputs(rank: int, micro_batch: int, device: torch.device) -> Tensor:
    """[3, WIDTH] of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    return torch.randn(3, WIDTH, generator=generator).to(device)


def train_step(chunk: Any, rank: int, device: torch.device) -> list[Tensor]:
    """Forward and backward of every micro-batch, gradients synchronised; the outputs."""
    outputs = []
    chunk.zero_grad_buffer()
    for micro_batch in range(MICRO_BATCHES):
        if micro_batch == MICRO_BATCHES - 1:
            output = chunk(inputs(rank, micro_batch, device))
            output.float().square().sum().backward()
        else:
            with chunk.no_sync():
                output = chunk(inputs(rank, micro_batch, device))
                output.float().square().sum().backward()
        outputs.append(output.detach().clone())
    chunk.finish_grad_sync()
    return outputs


def callers_groups() -> Any:
    """A collection of groups that owe nothing to Megatron-Core's global state."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    everyone = list(range(dist.get_world_size()))
    alone = dist.new_subgroups(group_size=1)[0]
    collection = ProcessGroupCollection()
    collection.dp = dist.new_group(everyone)
    collection.dp_cp = collection.intra_dp_cp = dist.new_group(everyone)
    collection.expt_dp = collection.intra_expt_dp = dist.new_group(everyone)
    for name in ("tp", "pp", "ep", "cp"):
        setattr(collection, name, alone)
    return collection


CONFIGS: dict[str, tuple[DdpConfig, bool]] = {  # name -> (settings, distributed optimizer)
    "plain": (DdpConfig(), False),
    "sharded": (DdpConfig(), True),
    "overlap": (DdpConfig(overlap_grad_reduce=True, bucket_size=700), False),
    "overlap sharded": (DdpConfig(overlap_grad_reduce=True, bucket_size=700), True),
    "overlap gather": (DdpConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=700), True),
    "average": (DdpConfig(average_in_collective=True, overlap_grad_reduce=True, bucket_size=700), True),
}


def compare_groups(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """By config: how default and explicit groups differ, and how far gradients are from a single process's."""
    actual: dict[str, dict[str, Any]] = {}
    with groups_of(world_size) as (groups, device):
        explicit = callers_groups()
        for name, (ddp, sharded) in CONFIGS.items():
            runs = []
            for collection in (groups.collection, explicit):
                torch.manual_seed(0)
                chunk = wrapped([Layers(6).to(device)], ddp, collection=collection, distributed_optimizer=sharded)[0]
                steps = [train_step(chunk, rank, device) for _ in range(3)]  # overlap begins with the second
                runs.append((chunk, steps, [p.main_grad.clone() for p in chunk.parameters()]))
            (default, outputs, gradients), (other, other_outputs, other_gradients) = runs
            assert default.dp_cp_group is not other.dp_cp_group
            mean = ddp.average_in_collective
            actual[name] = {
                "buckets": len(default.bucket_groups),
                "same_outputs": all(
                    torch.equal(a, b)
                    for x, y in zip(outputs, other_outputs, strict=True)
                    for a, b in zip(x, y, strict=True)
                ),
                "same_gradients": all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True)),
                "error": distance_from_one_process(default, world_size, device, mean=mean, sharded=sharded),
            }
    return actual


def distance_from_one_process(chunk: Any, world_size: int, device: torch.device, *, mean: bool, sharded: bool) -> float:
    """Largest relative error of the gradients that this rank is answerable for, against float64 over all inputs."""
    torch.manual_seed(0)
    reference = Layers(6).to(device).double()
    for rank in range(world_size):
        for micro_batch in range(MICRO_BATCHES):
            output = reference(inputs(rank, micro_batch, device).double())
            output.square().sum().backward()
    worst = 0.0
    for parameter, expected in zip(chunk.parameters(), reference.parameters(), strict=True):
        assert expected.grad is not None
        wanted = (expected.grad / (world_size if mean else 1)).flatten()
        difference = (parameter.main_grad.flatten().double() - wanted).abs()[own_part(chunk, parameter, sharded)]
        if difference.numel():
            worst = max(worst, float(difference.max() / wanted.abs().max()))
    return worst


def own_part(chunk: Any, parameter: torch.nn.Parameter, sharded: bool) -> slice:
    """The elements of a parameter whose reduced gradient this rank has."""
    if not sharded:
        return slice(0, parameter.numel())
    bucket = chunk.param_to_bucket_group[parameter].param_to_bucket[parameter]
    group = chunk.intra_dp_cp_group
    shard = bucket.grad_data.numel() // group.size()
    buffer = next(buffer for buffer in chunk.buffers if parameter in buffer.param_index_map)
    start, end, _ = buffer.param_index_map[parameter]
    low, high = (bucket.offset + shard * (group.rank() + i) for i in (0, 1))
    return slice(max(low, start) - start, max(min(high, end), start) - start)


def run_engine(checkpoint: str, *, parallel: dict[str, Any], ddp: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Three optimizer steps of a whole engine with forwards between; weights in Hugging Face's names."""
    from tests.helpers.engines import exported, make_config, own_rows, replaced, running_engine
    from tests.helpers.models import random_experience
    from tests.unit_tests.distributed.engine_cases import losses, whole

    config = replaced(make_config(Path(checkpoint), dtype=dtype), "engine.megatron", **parallel)
    with running_engine(replaced(config, "engine.megatron.ddp", **ddp)) as engine:
        rows = own_rows(random_experience(), engine)
        first = exported(engine)
        logprobs, steps = [], []
        for _ in range(2):  # overlap begins with the second
            steps.append(engine.train_minibatch(rows, losses("lm"), lr=1e-3))
            logprobs.append(whole(engine.forward(rows).logprobs, engine))
        steps.append(engine.train_minibatch(rows, losses("lm"), lr=1e-3))
        return {
            "start": first,
            "weights": exported(engine),  # with overlap nobody has gathered the parameters of the last step yet
            "logprobs": torch.stack(logprobs),
            "steps": steps,
            "buckets": max(len(chunk.bucket_groups) for chunk in engine.chunks),
        }


def resume(checkpoint: str, folder: str, *, ddp: dict[str, Any]) -> dict[str, bool]:
    """A run with these settings saves after two steps, hands its memory back for a while and goes on.

    A second engine, with the same settings and with default ones, loads what was saved and goes on as well.
    """
    from tests.helpers.engines import exported, load_state, make_config, own_rows, replaced, running_engine, save_state
    from tests.helpers.models import random_experience
    from tests.unit_tests.distributed.engine_cases import losses

    config = make_config(Path(checkpoint))
    batch = random_experience()
    with running_engine(replaced(config, "engine.megatron.ddp", **ddp)) as engine:
        rows = own_rows(batch, engine)
        for _ in range(2):
            engine.train_minibatch(rows, losses("lm"), lr=1e-3)
        save_state(engine, Path(folder))
        saved = exported(engine)
        engine.offload()
        engine.onload()
        engine.train_minibatch(rows, losses("lm"), lr=1e-3)
        continued = exported(engine)
    actual = {}
    for name, settings in (("same", ddp), ("plain", {})):
        with running_engine(replaced(config, "engine.megatron.ddp", **settings)) as engine:
            load_state(engine, Path(folder))
            loaded = exported(engine)
            actual[f"{name} weights"] = all(torch.equal(saved[key], loaded[key]) for key in saved)
            engine.train_minibatch(rows, losses("lm"), lr=1e-3)
            after = exported(engine)
            # Sums over optimizer instances are sums in another order.
            apart = max(float((continued[key] - after[key]).abs().max()) for key in saved)
            actual[f"{name} next step"] = apart == 0.0 if name == "same" else apart < 1e-6
    return actual


def run_engines(rank: int, cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Every case; what rank 0 found, by name."""
    actual = {case["name"]: run_engine(**{k: v for k, v in case.items() if k != "name"}) for case in cases}
    return actual if rank == 0 else None


def run_world(
    rank: int, world_size: int, cases: list[dict[str, Any]], resumed: list[str], folder: str
) -> dict[str, Any]:
    """Everything of one world size in one launch; `resumed` names some of `RESUMED`, `folder` is for checkpoints."""
    actual = {"groups": compare_groups(rank, world_size), "engines": run_engines(rank, cases), "resume": {}}
    for name in resumed:
        actual["resume"][name] = resume(cases[0]["checkpoint"], f"{folder}/{name}", ddp=RESUMED[name])
    return actual


pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
GATHER = {**OVERLAP, "overlap_param_gather": True}
AVERAGE = {"average_in_collective": True}
WIRE = {"grad_reduce_in_fp32": False, "reduce_scatter_fp32_accumulation": True}
INSTANCES = {"optimizer_instances": 2}
# (name, world size, model, parallel sizes, ddp settings, dtype)
ENGINES: list[tuple[str, int, str, dict[str, Any], dict[str, Any], str]] = [
    ("dense", 1, "dense", {}, {}, "fp32"),
    ("experts", 1, "experts", {}, {}, "fp32"),
    ("dense bf16", 1, "dense", {}, {}, "bf16"),
    ("one rank, everything on", 1, "dense", {}, {**GATHER, **AVERAGE}, "fp32"),
    ("one rank, bf16 messages", 1, "dense", {}, {**OVERLAP, **WIRE}, "bf16"),
    *[
        (f"dp{size} {name}", size, "dense", {}, settings, dtype)
        for size in (2, 4)
        for name, settings, dtype in (
            ("overlap", OVERLAP, "fp32"),
            ("gather", GATHER, "fp32"),
            ("average", AVERAGE, "fp32"),
            ("average overlap", {**AVERAGE, **OVERLAP}, "fp32"),
            ("instances", INSTANCES, "fp32"),
            ("instances gather", {**INSTANCES, **GATHER}, "fp32"),
            ("bf16 messages", WIRE, "bf16"),
            ("bf16 messages overlap", {**WIRE, **GATHER}, "bf16"),
        )
    ],
    ("ep2 average gather", 2, "experts", {"ep": 2}, {**AVERAGE, **GATHER}, "fp32"),
    ("cp2 average", 2, "dense", {"cp": 2}, AVERAGE, "fp32"),
    ("ep2 x2 average", 4, "experts", {"ep": 2}, AVERAGE, "fp32"),
    ("ep2 x2 average gather", 4, "experts", {"ep": 2}, {**AVERAGE, **GATHER}, "fp32"),
    ("ep2 x2 instances", 4, "experts", {"ep": 2}, {**INSTANCES, **OVERLAP}, "fp32"),
    ("ep2 x2 instances average", 4, "experts", {"ep": 2}, {**INSTANCES, **AVERAGE}, "fp32"),
    ("pp2 x2 gather", 4, "dense", {"pp": 2}, GATHER, "fp32"),
    ("pp2 vpp2 x2 gather", 4, "dense", {"pp": 2, "vpp": 2}, GATHER, "fp32"),
    ("pp2 vpp2 x2 average gather", 4, "dense", {"pp": 2, "vpp": 2}, {**AVERAGE, **GATHER}, "fp32"),
]
# What two ranks or a neighbour in the list show as well: in `make test-full`.
FULL_ONLY = ("dp4 overlap", "dp4 average", "dp4 average overlap", "dp4 instances", "dp4 bf16 messages", "dp2 overlap")
FULL_ONLY += ("dp2 average", "dp2 instances", "dp2 bf16 messages overlap", "ep2 average gather", "ep2 x2 average")
FULL_ONLY += ("ep2 x2 instances", "pp2 x2 gather", "pp2 vpp2 x2 gather", "dp4 gather", "dp2 bf16 messages")
FULL_ONLY += ("dp2 instances gather", "ep2 x2 instances average")
assert {case[0] for case in ENGINES} >= set(FULL_ONLY)
ENGINES = [case for case in ENGINES if FULL or case[0] not in FULL_ONLY]
RESUMES = covering([(size, settings) for size in (2, 4) for settings in RESUMED])
# Sums in another order, as in test_engine_parity. Three steps of Adam divide gradients by their own size, so a weight
# whose gradient is little more than rounding moves by a share of the learning rate: hence the norm of whole tensors.
GRAD_NORM = 1e-5
WEIGHTS = 1e-4
# bf16: weights have 8 bits, and gradients too where they travel as bf16.
GRAD_NORM_BF16 = 2e-2
WEIGHTS_BF16 = 2e-2


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by world size."""
    models = {
        "dense": write_tiny_checkpoint(tmp_path_factory.mktemp("dense"), family="qwen3"),
        "experts": write_tiny_checkpoint(tmp_path_factory.mktemp("experts"), family="qwen3_moe"),
    }
    actual = {}
    for size in (1, 2, 4):
        cases = [
            {"name": name, "checkpoint": str(models[model]), "parallel": parallel, "ddp": ddp, "dtype": dtype}
            for name, world_size, model, parallel, ddp, dtype in ENGINES
            if world_size == size
        ]
        folder = str(tmp_path_factory.mktemp("checkpoints"))
        resumed = [settings for ranks, settings in RESUMES if ranks == size]
        actual[size] = run_ranks(size, run_world, size, cases, resumed, folder, timeout_s=240)
    return actual


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_explicit_groups_change_nothing(worlds: dict[int, list[dict[str, Any]]], size: int, config: str) -> None:
    """Groups that the caller built give the outputs and gradients of the default groups, bit for bit."""
    for rank in worlds[size]:
        actual = rank["groups"][config]
        assert actual["same_outputs"]
        assert actual["same_gradients"]
        assert actual["buckets"] == (3 if CONFIGS[config][0].bucket_size else 1)  # 6 layers of 600; two exceed 700


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_are_those_of_one_process(worlds: dict[int, list[dict[str, Any]]], size: int, config: str) -> None:
    """Within 1e-6 of float64 over all ranks' inputs: sums of a few dozen terms in fp32."""
    assert max(rank["groups"][config]["error"] for rank in worlds[size]) < 1e-6


@pytest.mark.parametrize("case", [case for case in ENGINES if case[1] > 1 or "," in case[0]], ids=lambda case: case[0])
def test_engine_matches_one_rank(worlds: dict[int, list[dict[str, Any]]], case: tuple[Any, ...]) -> None:
    """Gradient norms, log-probs after each but the last step and weights after three steps."""
    name, size, model, _, ddp, dtype = case
    bf16 = dtype == "bf16"
    actual = worlds[size][0]["engines"][name]
    expected = worlds[1][0]["engines"][f"{model} bf16" if bf16 else model]
    for step, wanted in zip(actual["steps"], expected["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRAD_NORM_BF16 if bf16 else GRAD_NORM)
    if ddp.get("bucket_size"):
        assert actual["buckets"] > 1
    worst, tensor = worst_difference(actual["weights"], expected["weights"])
    assert worst < (WEIGHTS_BF16 if bf16 else WEIGHTS), tensor
    if not bf16:
        torch.testing.assert_close(actual["logprobs"], expected["logprobs"], rtol=0, atol=1e-3)
    moved, _ = worst_difference(actual["weights"], actual["start"])
    assert moved > 1e-3  # three steps did something


@pytest.mark.parametrize(("size", "settings"), RESUMES)
def test_checkpoint_of_several_buckets(worlds: dict[int, list[dict[str, Any]]], size: int, settings: str) -> None:
    """Saved with several buckets, loaded with those and with one: the same weights, and the same next step."""
    for rank in worlds[size]:
        assert all(rank["resume"][settings].values()), rank["resume"][settings]
