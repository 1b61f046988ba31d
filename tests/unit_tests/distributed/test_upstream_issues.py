"""Each fault of docs/known_upstream_issues.md: upstream is wrong, in silence, and this package is right or refuses."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.megatron_core import installed_series
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.verify.layouts import FP32, Layout, Plan, resolve
from mega_rl.verify.measure import LONGEST
from tests.helpers.distributed import run_ranks
from tests.unit_tests.converters.tiny_configs import TINY

BUILD = "mega_rl.engines.models.build"
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
    floor = measure.FLOOR * facts["typical"]
    with (
        safe_open(plan.reference_tensors, framework="pt") as reference,
        measure.engine_of(plan, layout, accelerator, OptimConfig(clip_grad=0.0), distributed=False) as engine,
    ):
        batch = measure.random_batch(engine.sharding.hf.vocab_size, seed=plan.seed)
        batch.old_logprobs, batch.ref_logprobs = map(reference.get_tensor, ("old_logprobs", "ref_logprobs"))
        ranks, count = engine.data_parallel, len(batch.tokens)
        rows: Any = batch[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size]
        metrics = engine.train_minibatch(rows, measure.policy_loss(), lr=0.0)
        return {
            "gradients": {
                name: measure.distance(
                    measure.kept(gradient), reference.get_tensor(measure.GRADIENT + name), floor=floor
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
            lambda: patch(f"{BUILD}.mark_tensor_parallel", nothing),
        ),
        "experts unmarked": (
            "qwen3_moe",
            "tp2+sp+etp1",
            lambda: patch(f"{BUILD}.mark_experts", nothing),
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
    """The interleaved schedule on two ranks with batched sends.

    Micro-batches are padded to one shape: of several, messages that are mixed up would not fit, which is no silence.
    """
    from mega_rl.engines import build

    make, make_config = build.Batching, build.transformer_config

    def batching(**kwargs: Any) -> Any:
        return make(**{**kwargs, "packing": False, "pad_to_multiple": LONGEST})

    def transformer_config(*args: Any, **kwargs: Any) -> Any:
        config = make_config(*args, **kwargs)
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
        return config

    with patch.object(build, "transformer_config", transformer_config), patch.object(build, "Batching", batching):
        yield


@contextmanager
def without_sequence_parallelism() -> Iterator[None]:
    """Latent attention under tensor parallelism alone, past the refusal."""
    from mega_rl.engines import build

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

    from mega_rl.converters.architecture import is_moe
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.engines.models.specs import decoder_spec

    hf = read_hf_config(Path(root) / "qwen3_moe" / "twin")
    upstream = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    layer = next(i for i in range(hf.num_layers) if is_moe(hf, i))
    ours = decoder_spec("local", hf, layers=range(layer, layer + 1), pg_collection=ProcessGroupCollection())
    return {
        "upstream": upstream.submodules.sharded_state_dict_keys_map.get("pre_mlp_layernorm."),
        "ours": ours.layer_specs[0].submodules.sharded_state_dict_keys_map.get("pre_mlp_layernorm."),
    }


def step_counters(accelerator: Any, root: str) -> dict[str, Any]:
    """(parameters, step counters of their own) of an optimizer that was loaded, by upstream and by us."""
    from mega_rl.config.schema import OptimConfig
    from mega_rl.ddp.optimizer import torch_optimizers
    from mega_rl.verify.layouts import REFERENCE
    from mega_rl.verify.measure import engine_of, policy_loss, random_batch

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
    """Saves and loads the optimizer through Megatron-Core's own state dicts.

    On a CPU it would ask its checkpoint for the step of torch's Adam, and write into views that require grad.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        with torch.no_grad():
            set_states(self, model_param, {"step": self.optimizer.state[main_param]["step"], **tensors})

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step)
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
    from mega_rl.verify.twin import write_random_twin

    for family, raw in configs.items():
        bare = root / family / "bare"
        bare.mkdir(parents=True)
        (bare / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        write_random_twin(bare, root / family / "twin", multiple=4)


pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

ROOT = Path(__file__).parents[3]
MODELS = {
    "qwen3": TINY["qwen3"],
    "qwen3_moe": TINY["qwen3_moe"],
    "latent": {**TINY["deepseek_v3"], "first_k_dense_replace": TINY["deepseek_v3"]["num_hidden_layers"]},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twins of a dense model, one with experts and one with latent attention."""
    root = tmp_path_factory.mktemp("upstream")
    write_models(root, MODELS)
    return str(root)


@pytest.fixture(scope="module")
def alone(root: str) -> dict[str, Any]:
    """What one rank found; it writes the references."""
    return run_ranks(1, one_rank, root, list(MODELS), strict=False)[0]


@pytest.fixture(scope="module")
def ranks(root: str, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """What two ranks found."""
    return run_ranks(2, two_ranks, root, timeout_s=240, strict=False)  # upstream's own calls, on gloo


def gradients(ranks: list[dict[str, Any]], fault: str, side: str) -> dict[str, float]:
    """Errors against one rank, by name."""
    return ranks[0][fault][side]["gradients"]


@pytest.mark.parametrize(
    "fault",
    [
        "interleaved without overlap",
        "latent attention without sp",
        "shards unmarked",
        "experts unmarked",
        "whole weights marked",
    ],
)
def test_we_are_right(ranks: list[dict[str, Any]], fault: str) -> None:
    """Every gradient and their norm are one rank's."""
    assert max(gradients(ranks, fault, "right").values()) <= FP32["gradient"]
    assert ranks[0][fault]["right"]["grad_norm"] <= FP32["grad_norm"]


def test_interleaved_schedule_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    """Without overlapped sends upstream computes other gradients."""
    assert max(gradients(ranks, "interleaved without overlap", "wrong").values()) > 0.1


def test_latent_norms_without_sequence_parallelism(ranks: list[dict[str, Any]]) -> None:
    """Upstream doubles the gradient of the queries' latent norm and does not add up that of the keys' rotary part."""
    wrong = gradients(ranks, "latent attention without sp", "wrong")
    last = "model.layers.3.self_attn"
    assert wrong[f"{last}.q_a_layernorm.weight"] == pytest.approx(1.0, abs=1e-3)
    assert wrong[f"{last}.kv_a_proj_with_mqa.weight"] > 0.01
    assert wrong[f"{last}.q_a_proj.weight"] <= FP32["gradient"]  # not because of anything above it


def test_latent_attention_without_sequence_parallelism_is_refused(root: str) -> None:
    """By the builder, whatever came before it."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config.schema import MegatronConfig, ModelConfig
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.engines.models.build import transformer_config

    with pytest.raises(UserError, match="sequence_parallel=true"):
        transformer_config(
            read_hf_config(Path(root) / "latent" / "twin"),
            layout=ParallelLayout(world_size=2, tp=2, etp=2),
            model=ModelConfig(),
            megatron=MegatronConfig(),
            deterministic=False,
            device_overrides=accelerator.transformer_config_overrides(),
            attention="sdpa",
        )


def mended_in(series: str) -> bool:
    """Whether the release under test is the one in which a fault was mended, or a later one."""
    return installed_series() >= series


def test_shards_that_are_not_initialised(ranks: list[dict[str, Any]]) -> None:
    """0.16 marks shards while it initialises them only: else the gradient norm leaves most of them out."""
    wrong = ranks[0]["shards unmarked"]["wrong"]
    assert (wrong["grad_norm"] <= FP32["grad_norm"]) if mended_in("0.18") else (wrong["grad_norm"] > 0.01)
    assert max(wrong["gradients"].values()) <= FP32["gradient"]


def test_weights_that_are_whole_and_marked(ranks: list[dict[str, Any]]) -> None:
    """Transformer Engine marks every linear layer: the norm counts the down projections of latent attention twice."""
    wrong = ranks[0]["whole weights marked"]["wrong"]
    assert wrong["grad_norm"] > 100 * FP32["grad_norm"]
    assert max(wrong["gradients"].values()) <= FP32["gradient"]


def test_experts_that_are_whole_under_tensor_parallelism(ranks: list[dict[str, Any]]) -> None:
    """With tp above etp and ep=1 upstream adds up nothing over the ranks that hold the same expert, before 0.19."""
    wrong = gradients(ranks, "experts unmarked", "wrong")
    expected = set() if mended_in("0.19") else {name for name in wrong if ".experts." in name}
    assert {name for name, error in wrong.items() if error > 0.01} == expected


def test_strided_tensors_on_gloo(ranks: list[dict[str, Any]]) -> None:
    """An all-reduce of a strided tensor gives other values, no error; ours makes it contiguous."""
    actual = ranks[0]["strided"]
    assert actual["ours"].equal(actual["expected"])
    if actual["backend"] == "gloo":
        assert not actual["torch"].equal(actual["expected"])


def test_outputs_freed_while_gloo_sends_them(ranks: list[dict[str, Any]]) -> None:
    """The receiver gets what the memory holds by then; on a CPU outputs are kept."""
    actual = ranks[1]["freed"]
    if actual["backend"] != "gloo":
        pytest.skip("NCCL copies on its stream before the memory is used again")
    assert actual["received"] != 1.0  # 7 where the memory has been used again
    assert actual["ours"] is False


def test_parameters_of_mixtures_are_gathered_once(ranks: list[dict[str, Any]]) -> None:
    """Upstream's optimizers of dense weights and of experts each start the gathering of all buckets."""
    assert ranks[0]["gathers"] == {"upstream": 2, "ours": 1}


def test_checkpoint_names_of_norms_in_front_of_experts(alone: dict[str, Any]) -> None:
    """Upstream's local spec names them as if they were part of a dense MLP, its Transformer Engine spec does not."""
    assert alone["names"] == {"upstream": "mlp.linear_fc1.layer_norm_", "ours": None}


def test_step_counters_after_a_load(alone: dict[str, Any]) -> None:
    """Upstream loads one tensor as the counter of all parameters, which torch's Adam raises once for each."""
    parameters, counters = alone["counters"]["upstream"]
    assert parameters > 1
    assert counters == 1
    assert alone["counters"]["ours"] == [parameters, parameters]


def test_norms_of_long_tensors(alone: dict[str, Any]) -> None:
    """torch's float32 norm of ten million elements is off by more than 1e-4 on a CPU; the patched one is exact."""
    actual = alone["norms"]
    assert actual["ours"] <= 1e-6
    if actual["device"] == "cpu":
        assert actual["torch"] > 1e-5


def test_every_issue_has_its_test() -> None:
    """The page's rows name a symbol, a consequence, and tests that exist."""
    page = (ROOT / "docs" / "known_upstream_issues.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    issues = [section for section in sections if not section.startswith("How")]
    assert len(issues) >= 8
    for issue in issues:
        title = issue.splitlines()[0]
        for label in ("**Where:**", "**Consequence:**", "**Here:**", "**Test:**"):
            assert label in issue, f"{title}: {label} is missing"
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", issue)
        assert named, f"{title}: names no test"
        for path, function in named:
            assert (ROOT / path).is_file(), f"{title}: {path} does not exist"
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            actual = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in actual, f"{title}: {path} has no {function}"
