"""Matrix products with the arguments of cuBLAS's: A and B are column-major there, so that B comes first here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fake_te.enums import TORCH


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return (op(B) op(A), bias gradient, input of GELU, extra output); a `D` is written, or added to.

    Layouts of Transformer Engine's linear layers, with weights W [out, in], inputs x [..., in], gradients g [..., out]:
    "TN" x W^T + bias, "NN" g W, "NT" g^T x with the sum of g, the gradient of a bias, where there is one.
    """
    unsupported = {"quantizer": quantizer, "gelu": gelu, "comm_overlap": comm_overlap, "extra_output": extra_output}
    assert not any(unsupported.values()), f"GEMM with {unsupported}"
    assert alpha == 1.0, f"GEMM with alpha={alpha}"
    assert beta in (None, float(accumulate)), f"GEMM with beta={beta}"
    assert workspaceSize == len(workspace)
    out, bias_grad = _product(A, transa, B, transb), None
    if bias is not None and not grad:
        out = out + bias
    elif bias is not None and bias.numel():
        bias_grad = B.flatten(0, -2).sum(0)
    if D is None:
        return out.to(TORCH[output_dtype] if output_dtype is not None else A.dtype), bias_grad, None, None
    return _write(D, out, accumulate=accumulate), bias_grad, None, None


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    D: Sequence[Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Sequence[Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """Write each product into its `D`, or with `single_output` below each other into the one; returns `bias`.

    With `grad` biases that are not empty are written: the sums of the gradients. Groups without tokens give zeros.
    """
    outputs = D[0].split(list(m_splits)) if single_output else D
    for a, b, out, its_bias in zip(A, B, outputs, bias, strict=True):
        if grad and its_bias.numel():
            its_bias.copy_(b.flatten(0, -2).sum(0))
        value = _product(a, transa, b, transb)
        _write(out, value if grad or not its_bias.numel() else value + its_bias, accumulate=accumulate)
    return bias


def _product(A: Tensor, transa: bool, B: Tensor, transb: bool) -> Tensor:
    if transb:
        return B.flatten(0, -2).T @ A.flatten(0, -2)
    return B @ (A.T if transa else A)


def _write(out: Tensor, value: Tensor, *, accumulate: bool) -> Tensor:
    with torch.no_grad():
        return out.add_(value) if accumulate else out.copy_(value)
