"""What ranks do for test_upstream_issues.py: upstream as it is, beside what this package makes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors import safe_open

from mega_rl.verify.layouts import Layout, resolve
from mega_rl.verify.measure import LONGEST
from mega_rl.verify.plan import Plan

MODELS = "mega_rl.engines.models.build"
BLOCK = 1 << 14  # float32 elements of a message: small enough for memory to be used again, too large to be sent at once


def compared(accelerator: Any, root: str, family: str, name: str) -> dict[str, Any]:
    """How far the gradients of a family's twin on a layout are from one rank's, as `mega_rl.verify` measures them."""
    from mega_rl.config.schema import OptimConfig
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.verify import measure

    folder = Path(root) / family
    layout = resolve(name, read_hf_config(folder / "twin"))
    plan = Plan(str(folder / "twin"), str(folder), (), timeout_s=60.0)
    facts = json.loads(plan.reference_facts.read_text(encoding="utf-8"))
    with (
        safe_open(plan.reference_tensors, framework="pt") as reference,
        measure.engine_of(plan, layout, accelerator, OptimConfig(clip_grad=0.0), distributed=False) as engine,
    ):
        rows = measure.own_rows(measure.reference_batch(plan, engine, reference), engine)
        metrics = engine.train_minibatch(rows, measure.policy_loss(), lr=0.0)
        return {
            "gradients": {
                name: measure.distance(
                    measure.kept(gradient), reference.get_tensor(measure.GRADIENT + name), facts["typical"]
                )
                for name, gradient in measure.exported_gradients(engine)
            },
            "grad_norm": measure.relative(metrics["grad_norm"], facts["grad_norm"]),
        }


def two_ranks(rank: int, root: str) -> dict[str, Any]:
    """Wrong and right, for each fault that shows on two ranks."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    results: dict[str, Any] = {}
    for fault, (family, layout, without) in faults().items():
        results[fault] = {"right": compared(accelerator, root, family, layout)}
        with without():
            results[fault]["wrong"] = compared(accelerator, root, family, layout)
    results["whole weights marked"] = whole_weights_marked(accelerator, root)
    results["strided"] = strided_sums()
    results["freed"] = freed_while_sent(rank)
    results["gathers"] = gathers_of_a_mixture(accelerator, root)
    return results


def faults() -> dict[str, tuple[str, str, Callable[[], Any]]]:
    """Fault -> (family, layout, a context without what this package does about it)."""
    return {
        "interleaved without overlap": ("qwen3", "vpp2", without_overlap),
        "latent attention without sp": ("latent", "tp2", without_sequence_parallelism),
        "shards unmarked": (
            "qwen3",
            "tp2",
            lambda: patch(f"{MODELS}.mark_tensor_parallel", nothing),
        ),
        "experts unmarked": (
            "qwen3_moe",
            "tp2+sp+etp1",
            lambda: patch(f"{MODELS}.mark_experts", nothing),
        ),
    }


def whole_weights_marked(accelerator: Any, root: str) -> dict[str, Any]:
    """Wrong and right where the down projections of latent attention are marked as Transformer Engine's would be."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    construct = Linear.__init__

    def as_transformer_engine(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.parallel_mode = None
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    with patch.object(Linear, "__init__", as_transformer_engine):
        right = compared(accelerator, root, "latent", "tp2+sp")
        with patch("mega_rl.engines.models.build.unmark_whole_weights", nothing):
            return {"right": right, "wrong": compared(accelerator, root, "latent", "tp2+sp")}


def gathers_of_a_mixture(accelerator: Any, root: str) -> dict[str, float]:
    """How often a step gathers each bucket of dense weights, by upstream and by us, where experts have an optimizer."""
    from mega_rl.config.schema import OptimConfig
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.ddp.optimizer import step
    from mega_rl.verify.measure import engine_of
    from tests.helpers.counting import CollectiveRecorder

    twin = Path(root) / "qwen3_moe" / "twin"
    plan = Plan(str(twin), root, (), timeout_s=60.0)
    gathers = {}
    with engine_of(plan, resolve("ep2", read_hf_config(twin)), accelerator, OptimConfig()) as engine:
        buckets = [bucket for chunk in engine.chunks for buffer in chunk.buffers for bucket in buffer.buckets]
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        for who in ("upstream", "ours"):
            engine.optimizer.prepare_grads()
            with CollectiveRecorder() as recorder:
                engine.optimizer.step_with_ready_grads() if who == "upstream" else step(engine.optimizer, engine.chunks)
            group = engine.groups.collection.dp_cp
            sent = recorder.of(group, "all_gather") or recorder.of(group, "broadcast")[:: group.size()]  # as on gloo
            gathers[who] = len(sent) / len(buckets)
    return gathers


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


@contextmanager
def without_overlap() -> Iterator[None]:
    """The interleaved schedule on two ranks with batched sends, past the refusal.

    Micro-batches are padded to one shape: of several, messages that are mixed up would not fit, which is no silence.
    """
    from mega_rl.engines import build

    settings, make = Layout.settings.fget, build.Batching  # type: ignore[attr-defined]

    def batching(**kwargs: Any) -> Any:
        return make(**{**kwargs, "packing": False, "pad_to_multiple": LONGEST})

    with (
        patch.object(Layout, "settings", property(lambda self: {**settings(self), "overlap_p2p": False})),
        patch.object(build, "Batching", batching),
    ):
        yield


@contextmanager
def without_sequence_parallelism() -> Iterator[None]:
    """Latent attention under tensor parallelism alone, past the refusal."""
    from mega_rl.engines.megatron import build

    settings, make = Layout.settings.fget, build.transformer_config  # type: ignore[attr-defined]

    def transformer_config(hf: Any, *, layout: Any, **kwargs: Any) -> Any:
        config = make(hf, layout=dataclasses.replace(layout, sequence_parallel=True), **kwargs)
        config.sequence_parallel = False
        return config

    with (
        patch.object(Layout, "settings", property(lambda self: {**settings(self), "sequence_parallel": False})),
        patch.object(build, "transformer_config", transformer_config),
        patch.object(build, "Routing", nothing),  # the model has no mixture in any layer
    ):
        yield


@contextmanager
def joined() -> Iterator[Any]:
    """The groups of two data-parallel ranks."""
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.accelerator import prepare

    layout = Layout("dp2", dp=2).parallel_layout()
    try:
        yield process_groups.initialize(layout, accelerator=prepare("auto"), timeout_s=60.0)
    finally:
        process_groups.destroy()


def strided_sums() -> dict[str, Any]:
    """The sum of a strided tensor over the ranks, as torch gives it and as `GroupRanks` does."""
    from mega_rl.parallel.comm import GroupRanks

    with joined() as groups:
        backend = dist.get_backend(groups.world)
        values = torch.arange(16.0).view(4, 4)
        ours = GroupRanks(groups.world).sum(values.t()[:, ::2])
        strided = values.clone().t()[:, ::2]
        if backend == "gloo":
            dist.all_reduce(strided, group=groups.world)
        return {"backend": backend, "expected": 2 * values.t()[:, ::2], "torch": strided.contiguous(), "ours": ours}


def freed_while_sent(rank: int) -> dict[str, Any]:
    """What rank 1 receives of a tensor that upstream frees as soon as its asynchronous send has been started."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    from mega_rl.parallel.accelerator import prepare

    received = torch.zeros(BLOCK)
    with joined() as groups:
        backend = dist.get_backend(groups.world)
        if backend != "gloo":
            return {"backend": backend}
        if rank == 0:
            output = torch.ones(BLOCK)
            work = dist.isend(output, 1, group=groups.world)
            deallocate_output_tensor(output, True)
            others = [torch.full((BLOCK,), 7.0) for _ in range(64)]  # somebody uses the memory again
            dist.barrier(group=groups.dp)
            work.wait()
            assert len(others) == 64
        else:
            dist.barrier(group=groups.dp)
            dist.recv(received, 0, group=groups.world)
    overrides = prepare("auto").transformer_config_overrides()
    return {
        "backend": backend,
        "received": float(received.mean()),
        "ours": overrides["deallocate_pipeline_outputs"],
    }


def one_rank(rank: int, root: str, families: list[str]) -> dict[str, Any]:
    """References of the twins; what shows on a single rank: names in checkpoints, step counters after a load, norms."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.measure import write_reference

    for family in families:
        folder = Path(root) / family
        write_reference(Plan(str(folder / "twin"), str(folder), ()), accelerator)
    return {
        "names": expert_norm_names(root),
        "counters": step_counters(accelerator, root),
        "norms": long_norms(accelerator),
    }


def expert_norm_names(root: str) -> dict[str, Any]:
    """What a checkpoint calls the norm in front of a mixture: upstream's local spec, and ours."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.engines.models.specs import decoder_spec

    hf = read_hf_config(Path(root) / "qwen3_moe" / "twin")
    upstream = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    layer = next(i for i in range(hf.num_layers) if hf.is_moe(i))
    ours = decoder_spec("local", hf, layers=range(layer, layer + 1), pg_collection=ProcessGroupCollection())
    return {
        "upstream": upstream.submodules.sharded_state_dict_keys_map.get("pre_mlp_layernorm."),
        "ours": ours.layer_specs[0].submodules.sharded_state_dict_keys_map.get("pre_mlp_layernorm."),
    }


def step_counters(accelerator: Any, root: str) -> dict[str, Any]:
    """(parameters, step counters of their own) of an optimizer that was loaded, by upstream and by us."""
    from mega_rl.config.schema import OptimConfig
    from mega_rl.ddp.optimizer import torch_optimizers
    from mega_rl.verify.measure import engine_of, policy_loss, random_batch
    from mega_rl.verify.plan import REFERENCE

    plan = Plan(str(Path(root) / "qwen3" / "twin"), root, (), timeout_s=60.0)
    actual: dict[str, Any] = {}

    def count(engine: Any) -> list[int]:
        states = [state for optimizer in torch_optimizers(engine.optimizer) for state in optimizer.state.values()]
        return [len(states), len({state["step"].data_ptr() for state in states})]

    with engine_of(plan, REFERENCE, accelerator, OptimConfig()) as engine:
        batch = random_batch(engine.sharding.hf.vocab_size, seed=0)
        engine.train_minibatch(batch, policy_loss(), lr=1e-3)
        load_as_upstream(engine, Path(root) / "saved")
        actual["upstream"] = count(engine)
        engine.resume_from(engine.state().numbers)
        actual["ours"] = count(engine)
    return actual


def load_as_upstream(engine: Any, folder: Path) -> None:
    """Saves and loads the optimizer through Megatron-Core's own state dicts."""
    from megatron.core import dist_checkpointing

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": engine.groups.collection.dp_cp,
    }

    def state(*, is_loading: bool) -> dict[str, Any]:
        actual = {"model": engine.models[0].sharded_state_dict(metadata=metadata)}
        actual["optimizer"] = engine.optimizer.sharded_state_dict(actual, is_loading=is_loading, metadata=metadata)
        return actual

    folder.mkdir()
    dist_checkpointing.save(state(is_loading=False), str(folder))
    engine.optimizer.load_state_dict(dist_checkpointing.load(state(is_loading=True), str(folder))["optimizer"])


def long_norms(accelerator: Any) -> dict[str, Any]:
    """Relative errors of the norm of ten million elements: torch's in float32, and Megatron-Core's as patched."""
    from megatron.core import utils

    values = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().norm())
    actual, _ = utils.local_multi_tensor_l2_norm(65536, None, [[values[:7], values[7:]]], False)
    return {
        "device": accelerator.name,
        "torch": abs(float(torch.norm(values)) / exact - 1),
        "ours": abs(float(actual) / exact - 1),
    }


def write_models(root: Path, configs: dict[str, dict[str, Any]]) -> None:
    """A twin with random weights of each config, without a reference yet."""
    from mega_rl.verify.twin.shrink import write_random_twin

    for family, raw in configs.items():
        bare = root / family / "bare"
        bare.mkdir(parents=True)
        (bare / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        write_random_twin(bare, root / family / "twin", multiple=4)
