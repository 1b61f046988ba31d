"""The stand-ins for Transformer Engine's kernels, by values and gradients, against torch's own operators in FP64."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.fake_te import attention, enums, gemm, norms, optimizers, package, permutation, rope

# FP32 sums of at most a hundred terms, against FP64.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BOUNDS = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
LENGTHS = [5, 1, 7]


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare an FP32 result with its FP64 reference."""
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCE)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that FP32 holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def product(a: Tensor, transa: bool, b: Tensor, transb: bool, **changes: Any) -> tuple[Any, ...]:
    """`generic_gemm` of FP32 copies."""
    arguments: dict[str, Any] = {
        "D": None,
        "quantizer": None,
        "output_dtype": enums.DType.kFloat32,
        "bias": None,
        "bias_type": enums.DType.kFloat32,
        "gelu": False,
        "gelu_in": None,
        "grad": False,
        "workspace": torch.empty(8),
        "workspaceSize": 8,
        "accumulate": False,
        "use_split_accumulator": False,
        **changes,
    }
    return gemm.generic_gemm(a.float(), transa, b.float(), transb, **arguments)


def test_products_of_a_linear_layer() -> None:
    """Output, and the gradients of input, weight and bias, of inputs [S, B, in]; added to what `D` holds."""
    x, weight, bias = (normal(*shape).requires_grad_() for shape in ((7, 2, 6), (5, 6), (5,)))
    y = torch.nn.functional.linear(x, weight, bias)
    grad = normal(7, 2, 5, seed=1)
    y.backward(grad)
    close(product(weight.detach(), True, x.detach(), False, bias=bias.detach().float())[0], y.detach())
    close(product(weight.detach(), False, grad, False, grad=True)[0], x.grad)
    held = normal(5, 6, seed=2).float()
    main, of_bias, _, _ = product(
        x.detach(), False, grad, True, grad=True, bias=bias.detach().float(), D=held.clone(), accumulate=True
    )
    close(main - held, weight.grad)
    close(of_bias, bias.grad)
    assert product(x.detach(), False, grad, True, grad=True, D=held)[0] is held
    close(held, weight.grad)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_grouped_products_are_those_of_each_group(layout: str) -> None:
    """With a group without tokens, whose gradient is zero, or stays what it was where others are added."""
    splits = [3, 0, 4]
    weights, x, grads = [normal(5, 6, seed=i).float() for i in range(3)], normal(7, 6).float(), normal(7, 5).float()
    if layout == "TN":
        a, b, expected = (
            weights,
            x.split(splits),
            [part @ w.T for part, w in zip(x.split(splits), weights, strict=True)],
        )
    elif layout == "NN":
        a, b = weights, grads.split(splits)
        expected = [part @ w for part, w in zip(b, weights, strict=True)]
    else:
        a, b = x.split(splits), grads.split(splits)
        expected = [g.T @ part for g, part in zip(b, a, strict=True)]
    for accumulate in (False, True):
        single = layout != "NT"
        out = [torch.ones(7, expected[0].size(1))] if single else [torch.ones(5, 6) for _ in splits]
        empty = [torch.empty(0)] * 3
        gemm.te_general_grouped_gemm(
            a, layout[0] == "T", b, layout[1] == "T", out, None, splits, empty, None, single, empty,
            layout != "TN", [], 0, accumulate, False, 0,
        )  # fmt: skip
        values = list(out[0].split(splits)) if single else out
        for value, right in zip(values, expected, strict=True):
            close(value - float(accumulate), right)


def test_biases_of_grouped_products() -> None:
    """Added in the forward, their gradients written in the backward."""
    splits, x, grads = [3, 4], normal(7, 6).float(), normal(7, 5).float()
    weights, biases = [normal(5, 6, seed=i).float() for i in range(2)], [normal(5, seed=i).float() for i in range(2)]
    out, of_biases = torch.empty(7, 5), [torch.empty(5), torch.empty(5)]
    common = (None, [torch.empty(0)] * 2)
    gemm.te_general_grouped_gemm(
        weights, True, x.split(splits), False, [out], None, splits, biases, None, True, common[1], False, [], 0, False,
        False, 0,
    )  # fmt: skip
    parts = zip(x.split(splits), weights, biases, strict=True)
    close(out, torch.cat([part @ w.T + bias for part, w, bias in parts]))
    gemm.te_general_grouped_gemm(
        x.split(splits), False, grads.split(splits), True, [torch.empty(5, 6) for _ in splits], None, splits, of_biases,
        None, False, common[1], True, [], 0, False, False, 0,
    )  # fmt: skip
    close(torch.stack(of_biases), torch.stack([part.sum(0) for part in grads.split(splits)]))


@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_norm(zero_centred: bool) -> None:
    """Output and the gradients of input and weight."""
    x, weight = normal(6, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    y = rms_norm(x, (8,), weight + zero_centred, 1e-3)
    grad = normal(6, 8, seed=2)
    y.backward(grad)
    out, _, rsigma = norms.rmsnorm_fwd(
        x.detach().float(), weight.detach().float(), 1e-3, None, None, enums.DType.kFloat32, 0, zero_centred
    )
    close(out, y.detach())
    dx, dw = norms.rmsnorm_bwd(grad.float(), x.detach().float(), rsigma, weight.detach().float(), 0, zero_centred)
    close(dx, x.grad)
    close(dw, weight.grad)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """`x` [T, heads, D] as complex numbers times e^(i angle), pair by pair; the rest beyond the angles as it is."""
    size = angles.size(-1)
    head, rest = x[..., :size], x[..., size:]
    first, second = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    per_pair = angles[..., ::2] if interleaved else angles[..., : size // 2]
    product_ = torch.complex(first, second) * torch.polar(torch.ones_like(per_pair), per_pair)[:, None]
    parts = (product_.real, product_.imag)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_rotary_embedding_of_packed_sequences(interleaved: bool, cp_size: int) -> None:
    """Positions begin anew in each sequence; a context-parallel rank has the first and the last chunk of each."""
    frequencies = normal(3, seed=5).abs()
    angles = torch.arange(16)[:, None] * frequencies
    angles = torch.stack([angles, angles], -1).flatten(-2) if interleaved else torch.cat([angles, angles], -1)
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    for rank in range(cp_size):
        held = [torch.arange(n).chunk(2 * cp_size) for n in bounds.diff().tolist()]
        positions = torch.cat([torch.cat([each[rank], each[-1 - rank]]) for each in held])
        if cp_size == 1:
            positions = torch.cat([torch.arange(n) for n in bounds.diff().tolist()])
        x = normal(len(positions), 2, 8).requires_grad_()
        y = turned(x, angles[positions], interleaved)
        grad = normal(*x.shape, seed=3)
        y.backward(grad)
        settings = (angles.float()[:, None, None], None, enums.NVTE_QKV_Format.NVTE_THD, interleaved, bounds)
        close(rope.fused_rope_forward(x.detach().float(), *settings, cp_size, rank), y.detach())
        close(rope.fused_rope_backward(grad.float(), *settings, cp_size, rank), x.grad)


def test_rotary_embedding_of_one_row() -> None:
    """[S, B, heads, D]: the position is the first index."""
    angles = normal(7, 8).repeat(1, 1)
    angles[:, 4:] = angles[:, :4]
    x = normal(7, 2, 3, 8)
    out = rope.fused_rope_forward(
        x.float(), angles.float()[:, None, None], None, enums.NVTE_QKV_Format.NVTE_SBHD, False, None, 1, 0
    )
    close(out, torch.stack([turned(x[:, i], angles, False) for i in range(2)], 1))


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
@pytest.mark.parametrize("sizes", [(4, 2, 8, 8), (4, 4, 8, 6)], ids=["grouped", "latent"])
def test_attention_of_packed_sequences(sizes: tuple[int, int, int, int], window: tuple[int, int]) -> None:
    """Context and the gradients of queries, keys and values, with groups, windows and narrower values."""
    heads, groups, size, of_values = sizes
    q, k = normal(13, heads, size).requires_grad_(), normal(13, groups, size, seed=1).requires_grad_()
    v, scale = normal(13, groups, of_values, seed=2).requires_grad_(), 0.3
    parts = []
    for query, key, value in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (behind >= 0) & (behind <= (window[0] if window[0] >= 0 else len(query)))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[None].transpose(1, 2), key[None].transpose(1, 2), value[None].transpose(1, 2),
                attn_mask=seen, scale=scale, enable_gqa=True,
            )[0].transpose(0, 1)
        )  # fmt: skip
    context, grad = torch.cat(parts), normal(13, heads, of_values, seed=3)
    context.backward(grad)
    kinds = (
        enums.NVTE_QKV_Layout.NVTE_THD_THD_THD,
        enums.NVTE_Bias_Type.NVTE_NO_BIAS,
        enums.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
        enums.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        window,
    )
    tensors = [x.detach().float() for x in (q, k, v)]
    out, *kept = attention.fused_attn_fwd(
        7, 7, True, scale, 0.0, True, *kinds, BOUNDS, BOUNDS, *tensors, None, None, None, None, None, None, None, None,
        None, None, 16, False, False,
    )  # fmt: skip
    close(out, context.detach())
    grads = attention.fused_attn_bwd(
        7, 7, scale, 0.0, True, *kinds, False, BOUNDS, BOUNDS, *tensors, out, grad.float(), None, None, kept, None,
        None, None, None, None, False,
    )  # fmt: skip
    for actual, expected in zip(grads, (q.grad, k.grad, v.grad), strict=False):
        close(actual, expected)  # type: ignore[arg-type]


def test_only_numbers_of_16_bits_have_a_fused_attention() -> None:
    kinds = {name: attention.get_fused_attn_backend(True, enums.DType[name], enums.DType[name]) for name in
             ("kFloat32", "kFloat16", "kBFloat16")}  # fmt: skip
    names = {name: backend.name for name, backend in kinds.items()}
    assert names == {
        "kFloat32": "NVTE_No_Backend",
        "kFloat16": "NVTE_F16_arbitrary_seqlen",
        "kBFloat16": "NVTE_F16_arbitrary_seqlen",
    }


def test_packed_sequences_as_padded_rows_and_back() -> None:
    packed = normal(13, 2, 3)
    rows = attention.convert_thd_to_bshd(packed, BOUNDS, 3, 7)
    assert torch.equal(rows[0, :5], packed[:5])
    assert torch.equal(rows[1, 1:], torch.zeros(6, 2, 3))
    assert torch.equal(attention.convert_bshd_to_thd(rows, BOUNDS, 13), packed)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("main", [False, True])
def test_steps_of_adam(weight_decay: float, main: bool) -> None:
    """Against torch's AdamW; with main parameters, those of bf16 ones, which are rounded copies."""
    start = [normal(3, 4, seed=i) for i in range(2)]
    reference = [torch.nn.Parameter(x.clone()) for x in start]
    theirs = torch.optim.AdamW(reference, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    ours = [x.float() for x in start]
    rounded = [x.bfloat16() for x in ours]
    moments = [[torch.zeros(3, 4) for _ in start] for _ in range(2)]
    for step in (1, 2, 3):
        grads = [normal(3, 4, seed=10 * step + i) for i in range(2)]
        for parameter, grad in zip(reference, grads, strict=True):
            parameter.grad = grad
        theirs.step()
        lists = [[g.float() for g in grads], rounded if main else ours, *moments, *([ours] if main else [])]
        flag = torch.zeros(1, dtype=torch.int)
        optimizers.multi_tensor_adam(2048, flag, lists, 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, weight_decay)
    for actual, expected in zip(ours, reference, strict=True):
        close(actual, expected.detach())
    if main:
        assert all(torch.equal(low, high.bfloat16()) for low, high in zip(rounded, ours, strict=True))


def test_norm_and_scaling_of_lists() -> None:
    tensors, flag = [normal(5), normal(2, 3)], torch.zeros(1, dtype=torch.int)
    norm, each = optimizers.multi_tensor_l2norm(2048, flag, [[x.float() for x in tensors]], True)
    close(norm, torch.cat([x.flatten() for x in tensors]).norm().view(1))
    close(each, torch.stack([x.norm() for x in tensors]))
    targets = [torch.empty(5), torch.empty(2, 3)]
    optimizers.multi_tensor_scale(2048, flag, [[x.float() for x in tensors], targets], 0.5)
    close(torch.cat([x.flatten() for x in targets]), torch.cat([x.flatten() for x in tensors]) / 2)
    assert not flag
    optimizers.multi_tensor_scale(2048, flag, [[torch.tensor([torch.inf])], [torch.empty(1)]], 0.5)
    assert flag


def test_tokens_on_their_way_to_experts_and_back() -> None:
    """A token has a row for each of its experts; back, its rows are added, weighted or not; with gradients."""
    chosen = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    tokens, weights = normal(4, 5), normal(4, 3, seed=1)
    order = [(token, expert) for expert in range(3) for token in range(4) if chosen[token, expert]]
    rows = permutation.make_row_id_map(chosen, 4, 3)
    assert rows.shape == (4, 7)
    sent, _, their_weights = permutation.permute_with_mask_map(tokens, rows, weights, None, 4, 3, len(order), 5, None)
    assert torch.equal(sent, torch.stack([tokens[token] for token, _ in order]))
    assert torch.equal(their_weights, torch.stack([weights[place] for place in order]))  # type: ignore[arg-type]
    back, back_weights = permutation.unpermute_with_mask_map(sent.float(), rows, None, their_weights, 4, 3, 5)
    close(back, tokens * chosen.sum(1, keepdim=True))
    assert torch.equal(back_weights, weights * chosen)  # type: ignore[arg-type]
    x, p = sent.clone().requires_grad_(), weights.clone().requires_grad_()
    out = torch.zeros(4, 5, dtype=torch.float64)
    for row, (token, expert) in enumerate(order):
        out = out.index_add(0, torch.tensor([token]), x[row : row + 1] * p[token, expert])
    grad = normal(4, 5, seed=2)
    out.backward(grad)
    merged, _ = permutation.unpermute_with_mask_map(sent.float(), rows, weights.float(), None, 4, 3, 5)
    close(merged, out.detach())
    of_rows, of_weights = permutation.unpermute_with_mask_map_bwd_with_merging_probs(
        grad.float(), rows, sent.float(), weights.float(), 4, 3, len(order), 5
    )
    close(of_rows, x.grad)
    close(of_weights, p.grad)


def test_chunks_in_another_order_and_back() -> None:
    tokens, weights = normal(6, 2), normal(6)
    rows = permutation.make_chunk_sort_map(torch.tensor([2, 0, 3, 1]), torch.tensor([2, 3, 0, 1]), 6, 4)
    there, their_weights = permutation.sort_chunks_by_map(tokens, rows, weights, 6, 2, True)
    assert torch.equal(there, torch.cat([tokens[2:5], tokens[5:], tokens[:2]]))
    back, back_weights = permutation.sort_chunks_by_map(there, rows, their_weights, 6, 2, False)
    assert torch.equal(back, tokens)
    assert torch.equal(back_weights, weights)  # type: ignore[arg-type]


@pytest.mark.skipif(package.missing() is not None, reason=str(package.missing()))
def test_triton_s_functions_have_the_arguments_of_transformer_engine_s() -> None:
    """Those of the module that the stand-in takes the place of, read without importing it."""
    path = package.FOLDER / "transformer_engine/pytorch/triton/permutation.py"
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    theirs = {node.name: [a.arg for a in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, arguments in theirs.items():
        assert list(inspect.signature(getattr(permutation, name)).parameters) == arguments, name
