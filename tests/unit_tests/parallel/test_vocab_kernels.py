"""Triton's kernels of log-probs and entropy against float64 and against the loops that they replace.

On a CUDA device they run compiled, elsewhere in Triton's interpreter (`make test-triton`), which needs TRITON_INTERPRET
before Triton is imported. Tolerances are those of test_vocab.py, but that the interpreter cuts float32 numbers to bf16
where a device rounds them, and loses twice as much. Between kernels and loops only the order of float32 sums differs,
and bf16 gradients that lie between two numbers may become the other one.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.parallel import vocab
from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy
from tests.helpers.distributed import device_for, initialized, run_ranks
from tests.unit_tests.parallel.test_vocab import CASES, check

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-triton"),
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton's kernels run on a CUDA device or with TRITON_INTERPRET=1: make test-triton",
    ),
]

BF16_RTOL = 2**-7 if os.environ.get("TRITON_INTERPRET") == "1" else 2**-8
BLOCK = 32  # columns at a time: three of them in the cases of test_vocab.py


def use_kernels(patch: pytest.MonkeyPatch, block: int = BLOCK) -> list[str]:
    """Have the kernels compute on every device; returns a list that names each use of them."""
    kernels = vocab.vocab_kernels
    assert kernels is not None
    used: list[str] = []

    def named(name: str) -> Any:
        original = getattr(kernels, name)
        return lambda *args, **kwargs: (used.append(name), original(*args, **kwargs))[1]

    patch.setattr(kernels, "BLOCK", block)
    for name in ("local_sums", "write_gradient"):
        patch.setattr(kernels, name, named(name))
    patch.setattr(vocab, "_kernels", lambda logits: kernels)
    return used


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = use_kernels(monkeypatch)
    check(name, None, device_for(1), bf16_rtol=BF16_RTOL)
    assert used == ["local_sums", "write_gradient"]


def ranks_check_every_case(rank: int) -> None:
    built, accelerator = initialized(tp=2)
    with pytest.MonkeyPatch.context() as patch:
        used = use_kernels(patch)
        for name in CASES:
            check(name, built.tp, accelerator.name, bf16_rtol=BF16_RTOL)
    assert len(used) == 2 * len(CASES)


@pytest.mark.skipif(
    torch.cuda.device_count() == 1 and os.environ.get("TRITON_INTERPRET") != "1",
    reason="two ranks on one GPU run on the CPU, where only the interpreter has the kernels",
)
def test_two_ranks_equal_float64() -> None:
    run_ranks(2, ranks_check_every_case)


def results(logits: Tensor, targets: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and gradient of weighted sums of both."""
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs_entropy(leaf * 1, targets, group=None, **how)
    assert entropy is not None
    weights = torch.linspace(-1, 2, len(targets), device=targets.device)
    ((weights * logprobs).sum() + (entropy * weights.flip(0)).sum()).backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 4095, 4096, 5003])
def test_kernels_equal_the_loops(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own block, whole and torn, at a temperature, and padding behind an odd vocabulary."""
    generator = torch.Generator().manual_seed(columns)
    width = columns + columns % 2
    logits = (5 * torch.randn(6, width, generator=generator)).to(dtype).to(device_for(1))
    targets = torch.randint(columns, (6,), generator=generator).to(device_for(1))
    targets[0] = columns - 1
    how: dict[str, Any] = {"vocab_size": columns, "temperature": 0.7}
    with monkeypatch.context() as patch:
        patch.setattr(vocab, "_kernels", lambda logits: None)
        expected = results(logits, targets, **how)
    use_kernels(monkeypatch, block=4096)
    for value, reference in zip(results(logits, targets, **how), expected, strict=True):
        bits = {"rtol": 2**-7, "atol": 1e-6} if value.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(value, reference, **bits)


def test_rows_of_a_wider_tensor_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits whose rows have a distance, which become their gradient, and nothing beside them changes."""
    use_kernels(monkeypatch)
    whole = torch.randn(5, 70, device=device_for(1))
    before, targets = whole.clone(), torch.arange(5, device=device_for(1))
    leaf = torch.zeros(5, 41, device=device_for(1), requires_grad=True)
    logits = whole[:, 3:44].add_(leaf)
    logprobs, _ = vocab_parallel_logprobs_entropy(logits, targets, group=None)
    logprobs.sum().backward()
    expected = torch.nn.functional.one_hot(targets, 41) - before[:, 3:44].softmax(-1)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 44:], before[:, 44:])


def test_only_a_cuda_device_chooses_kernels() -> None:
    assert vocab._kernels(torch.zeros(2, 3)) is None
    if torch.cuda.is_available():
        assert vocab._kernels(torch.zeros(2, 3, device="cuda")) is vocab.vocab_kernels
        assert vocab._kernels(torch.zeros(3, 2, device="cuda").T) is None
