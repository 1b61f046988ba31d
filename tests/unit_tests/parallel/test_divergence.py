"""Divergence from a teacher over the whole vocabulary, against float64 of plain torch: values, gradients, memory.

Tolerances as in test_vocab: float32 sums over a hundred entries, and 2^-8 where a bfloat16 gradient is stored.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from mega_rl.parallel.divergence import TeacherHead, vocab_parallel_divergence
from mega_rl.parallel.vocab import VocabColumns
from tests.helpers.distributed import device_for, initialized, run_ranks
from tests.unit_tests.parallel.test_vocab import LargestAllocation

VOCAB, HIDDEN = 96, 24  # columns over all ranks, width of the teacher
CASES: dict[str, dict[str, Any]] = {
    "reverse": {},
    "forward": {"beta": 0.0},
    "half": {"beta": 0.5},
    "mostly student": {"beta": 0.1, "temperature": 0.7},
    "temperature": {"temperature": 0.7},
    "padded": {"vocab_size": 90, "beta": 0.3},
    "whole ranks of padding": {"vocab_size": 20},
    "one chunk": {"chunk_rows": 1000},
    "one row": {"chunk_rows": 1},
    "far apart": {"spread": 40.0},
    "bf16": {"dtype": torch.bfloat16},
    "alone": {"others": False},
    "alone and forward": {"others": False, "beta": 0.0},
    "no tokens": {"tokens": 0},
}


def jensen_shannon(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Eq. 1 of arXiv:2306.13649 by torch's own KL, [T] of log-probs [T, V] of student p and teacher q."""
    if beta == 0.0:
        return kl_div(logp, logq, reduction="none", log_target=True).sum(dim=1)
    if beta == 1.0:
        return kl_div(logq, logp, reduction="none", log_target=True).sum(dim=1)
    logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    of_teacher = kl_div(logm, logq, reduction="none", log_target=True).sum(dim=1)
    return beta * of_teacher + (1 - beta) * kl_div(logm, logp, reduction="none", log_target=True).sum(dim=1)


def reference(inputs: dict[str, Tensor], case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy and divergence [3, T], gradient of their weighted sum) in float64."""
    vocab_size, temperature = case.get("vocab_size", VOCAB), case.get("temperature", 1.0)
    full = inputs["logits"].double().requires_grad_()
    logp = torch.log_softmax(full[:, :vocab_size] / temperature, dim=-1)
    teacher = inputs["hidden"].double() @ inputs["weight"].double().t()
    logq = torch.log_softmax(teacher[:, :vocab_size] / temperature, dim=-1)
    logprobs = logp.gather(1, inputs["targets"][:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(dim=-1)
    outputs = torch.stack([logprobs, entropy, jensen_shannon(logp, logq, case.get("beta", 1.0))])
    weights = inputs["weights"].double() * torch.tensor([[1.0 * case.get("others", True)]] * 2 + [[1.0]])
    (gradient,) = torch.autograd.grad((weights * outputs).sum(), full)
    return outputs.detach(), gradient


def check(name: str, group: Any, device: str) -> None:
    """Compare one case; raises AssertionError."""
    case = CASES[name]
    dtype, tokens, spread = case.get("dtype", torch.float32), case.get("tokens", 37), case.get("spread", 2.0)
    vocab_size = case.get("vocab_size", VOCAB)
    generator = torch.Generator().manual_seed(len(name))
    inputs = {
        "logits": (spread * torch.randn(tokens, VOCAB, generator=generator)).to(dtype),
        "hidden": torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        "weight": (spread * torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype),
        "targets": torch.randint(vocab_size, (tokens,), generator=generator),
        "weights": torch.randn(3, tokens, generator=generator),
    }
    expected, gradient = reference(inputs, case)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    own = slice(rank * VOCAB // size, (rank + 1) * VOCAB // size)
    leaf = inputs["logits"][:, own].clone().to(device).requires_grad_()
    targets, weights = inputs["targets"].to(device), inputs["weights"].to(device)
    given, temperature = leaf * 1, case.get("temperature", 1.0)
    columns = VocabColumns.of(
        given,
        targets,
        group=group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_rows=case.get("chunk_rows", 5),
    )
    teacher = TeacherHead(inputs["hidden"].to(device), inputs["weight"][own].to(device), case.get("beta", 1.0))
    outputs = vocab_parallel_divergence(given, targets, teacher, columns=columns, with_entropy=True)
    assert outputs.entropy is not None
    actual = torch.stack(list(outputs))
    # A divergence is a difference of numbers of the size of `spread`.
    tolerance = {"rtol": 1e-5, "atol": 5e-6 * max(1.0, spread)}
    torch.testing.assert_close(actual.detach().cpu().double(), expected, **tolerance)
    ((weights * actual).sum() if case.get("others", True) else (weights[2] * outputs.divergence).sum()).backward()
    assert leaf.grad is not None
    if dtype == torch.bfloat16:  # rounded when the gradient of the log-probs is written, and with the divergence's
        tolerance = {"rtol": 2**-7, "atol": 2**-8}
    torch.testing.assert_close(leaf.grad.cpu().double(), gradient[:, own], **tolerance)
    assert not leaf.grad[:, max(0, vocab_size - own.start) :].any(), "padding has a gradient"


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_float64(name: str) -> None:
    check(name, None, device_for(1))


def ranks_check_every_case(rank: int) -> None:
    """Every case on the ranks of this launch, which are one tensor-parallel group."""
    size = int(os.environ["WORLD_SIZE"])
    built, accelerator = initialized(tp=size)
    for name in CASES:
        try:
            check(name, built.tp, accelerator.name)
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from error


def test_tensor_parallel_equals_float64() -> None:
    run_ranks(2, ranks_check_every_case)


def test_a_student_with_its_teachers_distribution_stands_still() -> None:
    """Its logits are the teacher's, shifted row by row: divergence and gradient vanish for every beta."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(6, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    for beta in (0.0, 0.4, 1.0):
        leaf = (hidden @ weight.t() + torch.arange(6.0)[:, None]).requires_grad_()
        targets = torch.arange(6)
        columns = VocabColumns.of(leaf, targets, group=None, vocab_size=None, temperature=1.0)
        outputs = vocab_parallel_divergence(leaf * 1, targets, TeacherHead(hidden, weight, beta), columns=columns)
        outputs.divergence.sum().backward()
        assert leaf.grad is not None
        assert outputs.divergence.abs().max() < 1e-5
        assert leaf.grad.abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_nothing_of_the_logits_size_is_allocated(dtype: torch.dtype, beta: float) -> None:
    """Chunks and, on a CPU, the projection in float32, which a GPU reads in bfloat16."""
    tokens, vocab, width, chunk_rows = 512, 256, 8, 4
    logits = torch.randn(tokens, vocab).to(dtype).requires_grad_() * 1
    targets = torch.randint(vocab, (tokens,))
    teacher = TeacherHead(torch.randn(tokens, width).to(dtype), torch.randn(vocab, width).to(dtype), beta)
    columns = VocabColumns.of(logits, targets, group=None, vocab_size=None, temperature=1.0, chunk_rows=chunk_rows)
    largest = max(vocab * width * 4, tokens * width * 4, chunk_rows * vocab * 4, tokens * 8)
    assert 8 * largest < logits.untyped_storage().nbytes()
    with LargestAllocation(logits) as forward:
        outputs = vocab_parallel_divergence(logits, targets, teacher, columns=columns)
    with LargestAllocation(logits) as backward:
        (gradient,) = torch.autograd.grad((outputs.divergence + outputs.logprobs).sum(), logits)
    assert max(forward.largest, backward.largest) <= largest
    assert gradient.data_ptr() == logits.data_ptr()
