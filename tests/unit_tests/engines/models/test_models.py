"""Norm, value head, the choice of the layer implementation, recomputation and the marks of sharded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LAYERS = 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm(results: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients of input and weight, against the formula in fp64; no worse than transformers' own norm."""
    case = results["norm"][str(dtype)]
    assert max(case["ours"]) <= tolerance
    assert max(case["theirs"]) <= tolerance
    assert all(ours <= 1.1 * theirs + 1e-7 for ours, theirs in zip(case["ours"], case["theirs"], strict=True))
    assert case["dtype"] == str(dtype)


def test_the_mark_of_sequence_parallel_norms(results: dict[str, Any]) -> None:
    """`finalize_model_grads` adds the parts of what is marked."""
    assert results["norm"]["marks"] == [False, True]
    assert (results["head"]["mark False"], results["head"]["mark True"]) == (False, True)


def test_a_fresh_value_head(results: dict[str, Any]) -> None:
    """Predicts exactly 0, in float32, in a bf16 model too; its weight keeps more than bf16's digits."""
    head = results["head"]
    assert (head["dtype"], head["shape"]) == ("torch.float32", [1, 24])
    assert torch.equal(head["values"], torch.zeros(6, 2, 1))
    assert head["values"].dtype == torch.float32
    assert head["third"] < 1e-5  # a bf16 third would be off by 1e-3


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_changes_no_gradient(results: dict[str, Any], how: str) -> None:
    """The same operators on the same numbers: every bit."""
    plain, recomputed = results["recompute"]["none"]["gradients"], results["recompute"][how]["gradients"]
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert all(gradient.abs().max() > 0 for gradient in plain.values())


def test_recomputation_recomputes(results: dict[str, Any]) -> None:
    """Selective runs core attention again in the backward, full everything."""
    runs = {how: case["counts"] for how, case in results["recompute"].items()}
    once = LAYERS * int(results["recompute"]["none"]["micros"])
    assert runs["none"] == {"CoreAttention": once, "MLP": once}
    assert runs["selective"] == {"CoreAttention": 2 * once, "MLP": once}
    assert runs["full"] == {"CoreAttention": 2 * once, "MLP": 2 * once}


def test_sharded_weights_are_marked(results: dict[str, Any]) -> None:
    """Without a mark the gradient norm leaves the shards of tensor-parallel ranks above 0 out."""
    columns, rows = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1"), ("linear_proj", "linear_fc2")
    dims = dict.fromkeys(columns, 0) | dict.fromkeys(rows, 1)
    for name, dim in results["marks"].items():
        module = name.split(".")[-2]
        replicated = "layernorm" in name
        assert dim == (None if replicated else dims[module]), name
    assert len(results["marks"]) == 3 + 7 * LAYERS


def test_whole_weights_lose_the_mark_that_transformer_engine_gives_every_linear_layer() -> None:
    """Experts are cut by Megatron-Core before Transformer Engine sees them, as a whole layer of a smaller size."""
    from mega_rl.engines.models.build import unmark_whole_weights

    model = torch.nn.ModuleDict({"self_attention": torch.nn.ModuleDict(), "mlp": torch.nn.ModuleDict()})
    modes = {"linear_q_down_proj": None, "linear_q_up_proj": "column", "linear_proj": "row"}
    for name, mode in modes.items():
        model["self_attention"][name] = te_linear(mode)
    model["mlp"]["experts"] = torch.nn.ModuleDict({"linear_fc1": te_linear(None)})
    layer = torch.nn.ModuleDict({"0": model})
    unmark_whole_weights(layer)
    marks = {name: getattr(weight, "tensor_model_parallel", None) for name, weight in layer.named_parameters()}
    assert marks == {
        "0.self_attention.linear_q_down_proj.weight": False,
        "0.self_attention.linear_q_up_proj.weight": True,
        "0.self_attention.linear_proj.weight": True,
        "0.mlp.experts.linear_fc1.weight": True,
    }


def te_linear(parallel_mode: str | None) -> torch.nn.Linear:
    """A linear layer with the attributes that Transformer Engine's has."""
    linear = torch.nn.Linear(2, 2, bias=False)
    linear.parallel_mode = parallel_mode  # type: ignore[assignment]
    linear.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    return linear


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", ["zero-centred", "latent", "joint"])
def test_norms_of_single_families(results: dict[str, Any], name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients of input and weight against transformers; the latent norm takes no other's epsilon."""
    differences = results["family norms"][f"{name} {dtype}"]
    assert len(differences) == 3
    assert max(differences) <= tolerance, differences


def test_layers_of_transformer_engine(results: dict[str, Any]) -> None:
    """Upstream's function is asked per layer: a dense first layer, then grouped experts, with latent attention."""
    asked = results["te layers"]["deepseek_v3"]["asked"]
    assert [layer["num_experts"] for layer in asked] == [None, 8, 8, 8]
    assert all(layer["multi_latent_attention"] and layer["qk_layernorm"] for layer in asked)
    assert all(layer["moe_grouped_gemm"] for layer in asked)
    assert results["te layers"]["deepseek_v3"]["ours"] == [(False, True), (True, True), (True, True), (True, True)]
    dense = results["te layers"]["qwen3"]["asked"]
    assert all(layer["qk_layernorm"] and not layer["multi_latent_attention"] for layer in dense)


def test_what_only_the_local_layers_can(results: dict[str, Any]) -> None:
    """Post-norms, a second rotary base, joint norms, an epsilon of its own."""
    lacking = {family: len(case["lacking"]) for family, case in results["te layers"].items()}
    assert lacking == {"qwen3": 0, "deepseek_v3": 1, "gemma3_text": 2, "glm4": 1, "olmoe": 1}
