"""What each rank does in the tests of sharded data parallelism: the same two steps under every implementation."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mega_rl.config.schema import Config, MegatronConfig, OptimConfig
from mega_rl.config.schema.engine import DdpConfig
from tests.helpers.engines import exported, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses, whole

# A large eps keeps Adam from blowing rounding up where a gradient is small, so weights can be compared sharply. The
# norms are above 0.4: every step is clipped.
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, clip_grad=0.3)
STEPS = 2  # the second one's gradients are those of weights that the first one has moved, and moments add up
# bf16 rounds weights to 8 bits: one more or less in the last of them at weights of up to 1.
BF16_WEIGHT_TOLERANCE = 2**-8
# fp32 sums in another order; Adam's large eps keeps what rounding does to a step at its own size.
LOGPROB_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-6
Results = dict[str, dict[str, list[Any]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """An implementation of data parallelism on a layout."""

    ddp: DdpConfig = dataclasses.field(default_factory=DdpConfig)
    parallel: MegatronConfig = dataclasses.field(default_factory=MegatronConfig)
    model: str = "tied"
    head: str = "lm"
    dtype: str = "fp32"
    frozen: tuple[str, ...] = ()
    groups: str = "engine"  # whose process groups: the engine's collection, "default" (upstream's own) or "new" ones
    offload: bool = False  # between steps
    export: str = ""  # folder under the root that the weights are written to, as a Hugging Face checkpoint
    upstream: str = ""  # what of upstream to let through: "unchecked" settings, or its "no_sync" as well

    def config(self, root: Path) -> Config:
        """Everything an engine needs; several micro-batches make a step."""
        config = make_config(root / self.model, dtype=self.dtype, optim=OPTIM, megatron=self.parallel, ddp=self.ddp)
        config = replaced(config, "trainer.microbatch", max_tokens=48)
        return replaced(config, "model", frozen=list(self.frozen))


def train(case: Case, root: Path) -> dict[str, Any]:
    """Outputs, norms, losses and weights of two steps; outputs once more after them."""
    name, loss = ("values", "critic/loss") if case.head == "value" else ("logprobs", "actor/loss")
    with changed(case), running_engine(case.config(root), head=case.head) as engine:
        rows = own_rows(random_experience(), engine)
        actual: dict[str, Any] = {"start": exported(engine)}
        if case.ddp.name == "torch_fsdp2":
            actual["modules"] = sharded_modules(engine)
        actual["before"] = whole(getattr(engine.forward(rows), name), engine)
        metrics = []
        for _ in range(STEPS):
            metrics.append(engine.train_minibatch(rows, losses(case.head), lr=OPTIM.lr))
            if case.offload:
                actual["freed"], actual["left"] = engine.offload(), storage_bytes(engine)
                engine.onload()
        actual["norms"] = [step["grad_norm"] for step in metrics]
        actual["losses"] = [step[loss] for step in metrics]
        actual["microbatches"] = metrics[0]["num_microbatches"]
        actual["weights"] = exported(engine)
        if case.export:
            engine.save_hf(root / case.export, source=root / case.model)
        actual["after"] = whole(getattr(engine.forward(rows), name), engine)
        actual["moments"] = moments(engine)
    return actual


@contextmanager
def changed(case: Case) -> Iterator[None]:
    """Other process groups, or upstream without what stands before it, while the engine is built and runs."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    from mega_rl.ddp import megatron_fsdp, torch_fsdp2

    kept = megatron_fsdp.MegatronFsdp, megatron_fsdp.no_sync_of, torch_fsdp2.shard_chunks

    def with_new_group(collection: Any) -> Any:
        ranks = torch.distributed.get_process_group_ranks(collection.dp_cp)
        collection = copy.copy(collection)
        collection.dp_cp = torch.distributed.new_group(ranks)
        return collection

    def build(*args: Any, pg_collection: Any, **kwargs: Any) -> Any:
        return kept[0](
            *args, pg_collection=None if case.groups == "default" else with_new_group(pg_collection), **kwargs
        )

    def shard(*args: Any, collection: Any, **kwargs: Any) -> Any:
        return kept[2](*args, collection=with_new_group(collection), **kwargs)

    if case.groups != "engine":
        megatron_fsdp.MegatronFsdp = build
        torch_fsdp2.shard_chunks = shard
    if case.upstream == "no_sync":
        megatron_fsdp.no_sync_of = lambda chunk, ddp: chunk.no_sync
    try:
        yield
    finally:
        megatron_fsdp.MegatronFsdp, megatron_fsdp.no_sync_of, torch_fsdp2.shard_chunks = kept


def moments(engine: Any) -> int:
    """Elements of Adam's first moments on this rank."""
    from torch.distributed.tensor import DTensor

    from mega_rl.ddp.optimizer import torch_optimizers

    actual = [s["exp_avg"] for o in torch_optimizers(engine.optimizer) for s in o.state.values()]
    return sum((m.to_local() if isinstance(m, DTensor) else m).numel() for m in actual)


def storage_bytes(engine: Any) -> int:
    """Memory of parameters, gradients and optimizer state on this rank."""
    from mega_rl.ddp.access import gradient_tensors, optimizer_tensors, parameter_tensors
    from mega_rl.ddp.optimizer import torch_optimizers

    tensors = [*parameter_tensors(engine.chunks), *gradient_tensors(engine.chunks)]
    tensors += [t for optimizer in torch_optimizers(engine.optimizer) for t in optimizer_tensors(optimizer)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def sharded_modules(engine: Any) -> dict[str, Any]:
    """Names and types of the modules that FSDP2 gathers one by one, and what the parameters are."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    chunk = engine.models[0]
    return {
        "units": sorted(name for name, module in chunk.named_modules() if isinstance(module, FSDPModule)),
        "sharded": all(isinstance(parameter, DTensor) for parameter in chunk.parameters()),
        "group": engine.chunks[0].process_group is engine.groups.dp_cp,
    }


def train_all(rank: int, root: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Every case; what this rank found."""
    return {name: train(case, Path(root)) for name, case in cases.items()}


def train_worlds(launch: Callable[..., list[Any]], root: Path, worlds: dict[int, dict[str, Case]]) -> Results:
    """What every rank found, by world size and case."""
    for name, tied in {"tied": True, "untied": False}.items():
        write_tiny_checkpoint(root / name, family="qwen3", tied=tied)
    actual = {}
    for world_size, cases in worlds.items():
        answers = launch(world_size, train_all, str(root), cases, timeout_s=300)
        actual[str(world_size)] = {name: [answer[name] for answer in answers] for name in cases}
    return actual


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether every bit is."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_like_one_rank(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Outputs, losses, norms before clipping (sums, not means), and the weights after two steps, on every rank."""
    for many in ranks:
        assert many["microbatches"] > 1 or len(ranks) == 4
        assert (many["before"] - one["before"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["after"] - one["after"]).abs().max() <= LOGPROB_TOLERANCE
        assert many["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE)
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
        for key, expected in one["weights"].items():
            assert (many["weights"][key] - expected).abs().max() <= WEIGHT_TOLERANCE, key
    assert max(float((one["weights"][key] - one["start"][key]).abs().max()) for key in one["start"]) > 1e-3


def assert_offloaded(stayed: list[dict[str, Any]], moved: list[dict[str, Any]]) -> None:
    """Memory comes back as it was: every bit of the run is that of one that never gave it away."""
    for one, other in zip(stayed, moved, strict=True):
        assert other["freed"] > 4 * 3 * 51_000 / 2  # two ranks share FP32 parameters, gradients and moments at least
        assert other["left"] == 0
        assert other["norms"] == one["norms"]
        assert equal(other["weights"], one["weights"])


def assert_exported(folder: Path, results: list[dict[str, Any]]) -> None:
    """The Hugging Face checkpoint in `folder` holds every bit of the weights, and transformers reads it."""
    from transformers import AutoModelForCausalLM

    on_disk = load_file(folder / "model.safetensors")
    for actual in results:
        assert on_disk.keys() == actual["weights"].keys()
        assert all(torch.equal(on_disk[name], tensor) for name, tensor in actual["weights"].items())
        assert any(not torch.equal(on_disk[name], tensor) for name, tensor in actual["start"].items())
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in on_disk.items())


def assert_bf16_like_ddp(results: dict[str, list[dict[str, Any]]]) -> None:
    """Norms and weights of the case "bf16" are those of "ddp bf16" on every rank, as far as bf16 says."""
    for ddp, sharded in zip(results["ddp bf16"], results["bf16"], strict=True):
        steps = zip(sharded["norms"], ddp["norms"], strict=True)
        assert all(math.isclose(actual, expected, rel_tol=1e-2) for actual, expected in steps)
        for key, expected in ddp["weights"].items():
            assert sharded["weights"][key].dtype == torch.bfloat16
            difference = (sharded["weights"][key].float() - expected.float()).abs().max()
            assert difference <= BF16_WEIGHT_TOLERANCE * expected.float().abs().max().clamp(min=1), key
