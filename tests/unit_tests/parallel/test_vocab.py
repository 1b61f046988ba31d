"""Vocab-parallel log-probs and entropy against full float64 logits: values, gradients, memory, collectives.

Tolerances: float32 sums over a vocabulary of up to a few hundred entries round at about 1e-7 relative; 1e-5 leaves room
for the subtraction of logits near 1e4, whose float32 spacing is 1e-3 and which both sides share. bfloat16 gradients are
rounded once when stored (2^-9 relative).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mega_rl.parallel.vocab import hide, vocab_parallel_logprobs_entropy
from tests.helpers.distributed import device_for, initialized, run_ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "padded": {"vocab_size": 90},
    "whole ranks of padding": {"vocab_size": 20},
    "one chunk": {"chunk_rows": 1000},
    "one row": {"chunk_rows": 1},
    "extreme": {"spread": 1e4},
    "extreme cold": {"spread": 1e4, "temperature": 0.3, "vocab_size": 61},
    "bf16": {"dtype": torch.bfloat16},
    "no entropy": {"with_entropy": False},
    "own gradient": {"inplace_backward": False},
    "no tokens": {"tokens": 0},
    "hidden": {"hidden": ((0, 1), (40, 75), (90, 1 << 40)), "temperature": 0.7},
    "hidden bf16": {"hidden": ((0, 30), (95, 96)), "dtype": torch.bfloat16},
}
VOCAB = 96  # columns over all ranks
ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".venv" / "triton"  # `make triton`
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mega_rl.parallel.vocab_kernels import BLOCK, _differentiate_rows, _sum_rows

ROW = {"stride": "i32", "targets": "*i64", "maxima": "*fp32", "columns": "i32", "scale": "fp32"}
SUM = ROW | {"sums": "*fp32", "tokens": "i32"}
GRADIENT = ROW | {"log_sums": "*fp32", "entropies": "*fp32", "width": "i32"}
GRADIENT |= {"of_logprobs": "*fp32", "of_entropies": "*fp32"}
for logits in ("*bf16", "*fp32"):
    for entropy in (False, True):
        for kernel, types in ((_sum_rows, SUM), (_differentiate_rows, GRADIENT)):
            types = types | {"logits": logits, "WITH_ENTROPY": "constexpr", "BLOCK": "constexpr"}
            signature = {name: types[name] for name in kernel.arg_names}
            values = {(list(signature).index("WITH_ENTROPY"),): entropy, (list(signature).index("BLOCK"),): BLOCK}
            compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
            assert compiled.asm["cubin"]
            print(kernel.__name__, logits, entropy)
"""


def reference(
    logits: Tensor, targets: Tensor, weights: Tensor, *, vocab_size: int, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, gradient) in float64 from the whole vocabulary."""
    full = logits.double().requires_grad_()
    logp = torch.log_softmax(full[:, :vocab_size] / temperature, dim=-1).clamp(min=-1e9)  # hidden ones are -inf
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(dim=-1)
    objective = (weights[0].double() * logprobs).sum()
    if with_entropy:
        objective = objective + (weights[1].double() * entropy).sum()
    (gradient,) = torch.autograd.grad(objective, full)
    return logprobs.detach(), entropy.detach(), gradient


def check(name: str, group: dist.ProcessGroup | None, device: str, *, bf16_rtol: float = 2**-8) -> None:
    """Compare one case; raises AssertionError."""
    case = dict(CASES[name])
    dtype, spread, tokens = case.pop("dtype", torch.float32), case.pop("spread", 3.0), case.pop("tokens", 37)
    vocab_size, temperature = case.get("vocab_size", VOCAB), case.get("temperature", 1.0)
    with_entropy = case.get("with_entropy", True)
    generator = torch.Generator().manual_seed(len(name))
    logits = (torch.randn(tokens, VOCAB, generator=generator) * spread).to(dtype)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator)
    hidden = case.pop("hidden", ())
    is_hidden = torch.zeros(VOCAB, dtype=torch.bool)
    for first, end in hidden:
        is_hidden[first:end] = True
    targets = torch.where(is_hidden[targets], 39, targets)
    shown = logits.masked_fill(is_hidden, -torch.inf)
    expected = reference(
        shown, targets, weights, vocab_size=vocab_size, temperature=temperature, with_entropy=with_entropy
    )
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCAB // size, (rank + 1) * VOCAB // size)
    leaf = logits[:, columns].clone().to(device).requires_grad_()
    given = hide(
        leaf * 1, hidden, first=columns.start
    )  # as from an output layer: its storage may become the gradient's
    before = given.detach().clone()
    logprobs, entropy = vocab_parallel_logprobs_entropy(
        given, targets.to(device), group=group, **{"chunk_rows": 5, **case}
    )
    assert torch.equal(given, before), "the forward changed its input"
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.cpu().double(), expected[0], rtol=1e-5, atol=1e-5)
    objective = (weights[0].to(device) * logprobs).sum()
    if with_entropy:
        assert entropy is not None
        assert entropy.dtype == torch.float32
        torch.testing.assert_close(entropy.cpu().double(), expected[1], rtol=1e-5, atol=1e-5)
        objective = objective + (weights[1].to(device) * entropy).sum()
    else:
        assert entropy is None
    objective.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": bf16_rtol, "atol": 2**-12}
    torch.testing.assert_close(leaf.grad.cpu().double(), expected[2][:, columns], **tolerance)
    assert not leaf.grad[:, max(0, vocab_size - columns.start) :].any(), "padding has a gradient"
    assert not leaf.grad[:, is_hidden[columns]].any(), "a hidden token has a gradient"


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_float64(name: str) -> None:
    check(name, None, device_for(1))


def count_all_reduces(group: dist.ProcessGroup, device: str) -> tuple[list[int], int]:
    """(elements of each all-reduce of a forward, number of them in the backward)."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        logits = torch.randn(8, 4, device=device, requires_grad=True)
        targets = torch.arange(8, device=device) % 4
        logprobs, entropy = vocab_parallel_logprobs_entropy(logits * 1, targets, group=group)
        forward = list(sizes)
        assert entropy is not None
        (logprobs + entropy).sum().backward()
    finally:
        dist.all_reduce = original
    return forward, len(sizes) - len(forward)


def ranks_check_every_case(rank: int) -> tuple[list[int], int]:
    size = int(os.environ["WORLD_SIZE"])
    built, accelerator = initialized(tp=size)
    for name in CASES:
        try:
            check(name, built.tp, accelerator.name)
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from error
    return count_all_reduces(built.tp, accelerator.name)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_equals_float64_with_two_all_reduces(size: int) -> None:
    for forward, backward in run_ranks(size, ranks_check_every_case):
        assert forward == [8, 3 * 8], "one maximum and one packed sum, 4 floats per token"
        assert backward == 0


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest storage that appears while it is active."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = {known.untyped_storage().data_ptr()}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [True, False])
def test_nothing_of_the_logits_size_is_allocated(dtype: torch.dtype, inplace: bool) -> None:
    tokens, vocab, chunk_rows = 256, 512, 4
    logits = torch.randn(tokens, vocab).to(dtype).requires_grad_() * 1
    targets = torch.randint(vocab, (tokens,))
    chunk_bytes = chunk_rows * vocab * 4
    with LargestAllocation(logits) as forward:
        logprobs, entropy = vocab_parallel_logprobs_entropy(
            logits, targets, group=None, chunk_rows=chunk_rows, inplace_backward=inplace
        )
    assert forward.largest <= chunk_bytes
    assert entropy is not None
    objective = (logprobs + entropy).sum()
    with LargestAllocation(logits) as backward:
        (gradient,) = torch.autograd.grad(objective, logits)
    if inplace:
        assert backward.largest <= chunk_bytes
        assert gradient.data_ptr() == logits.data_ptr()
    else:
        assert backward.largest == gradient.untyped_storage().nbytes()
        assert gradient.data_ptr() != logits.data_ptr()


def test_overwritten_logits_are_not_used_twice() -> None:
    logits = torch.randn(4, 8, requires_grad=True) * 1
    logprobs, _ = vocab_parallel_logprobs_entropy(logits, torch.arange(4), group=None)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.gpu
def test_peak_memory_on_a_gpu() -> None:
    tokens, vocab = 4096, 151_936
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    given = logits * 1
    targets = torch.randint(vocab, (tokens,), device="cuda")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = vocab_parallel_logprobs_entropy(given, targets, group=None)
    assert entropy is not None
    torch.autograd.grad((logprobs + entropy).sum(), given)
    extra = torch.cuda.max_memory_allocated() - base
    assert extra < 0.3 * given.numel() * given.element_size(), f"{extra} bytes beside the logits"


@pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed apart: make triton")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """With Triton's own compiler, which needs no GPU and takes less of Python than its interpreter."""
    environment = {**os.environ, "PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8
