"""Batches gathered over data parallelism in rank order, and log-probs and entropy of logits cut over the vocabulary.

The reference of a gather is the same rows made on one rank, of log-probs and entropy the whole logits in float64.
Tolerances: sums of float32 over 96 entries round at 1e-7 relative; 1e-5 leaves room for differences of logits.
A bfloat16 gradient is rounded once when it is stored (2^-9 relative).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.parallel.comm import GroupRanks, gather_tensordict
from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy
from tests.special_distributed.program import device, finish, group_of_mine, pass_on_four_ranks, world

ROWS, LENGTHS = (3, 0, 1, 4), (5, 8, 2, 7)  # of each rank
TENSOR_PARALLEL = {4: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 1: [[0], [1], [2], [3]]}
DATA_PARALLEL = {1: [[0, 1, 2, 3]], 2: [[0, 2], [1, 3]]}  # by tensor-parallel size
VOCAB, TOKENS = 96, 33


def batch(rank: int) -> TensorDict:
    """Rows that say where they come from: tensors of several dtypes and shapes, objects of rows, data of all rows."""
    rows, length = ROWS[rank], LENGTHS[rank]
    where = 1000 * rank + 10 * torch.arange(rows)[:, None] + torch.arange(length)
    texts = [f"rank {rank}, row {row}: ü" for row in range(rows)]
    return TensorDict(
        {
            "tokens": where.t().contiguous().t(),  # strided: what gloo alone would send wrong
            "mask": where % 3 == 0,
            "logprobs": -where.float() / 7,
            "hidden": where[:, :, None].bfloat16().expand(rows, length, 3),
            "routing": where.to(torch.int16)[:, :, None, None].expand(rows, length, 2, 2),
            "reward": (where.sum(1) / 3).double(),
            "number": where.sum(1).to(torch.int16),
            "text": NonTensorStack(*texts, "none")[:rows],
            "answer": NonTensorStack(*[{"of": [rank, row, None]} for row in range(rows)], True)[:rows],
            "meta": NonTensorData({"temperature": 0.7, "stop": ["<eos>"]}, batch_size=[rows]),
        },
        batch_size=[rows],
    )


def gathered_in_rank_order(ranks: GroupRanks, members: list[int]) -> None:
    """`members` are the world's ranks in the group, in its order."""
    mine = members[ranks.rank]
    given = batch(mine).to(device())
    actual = gather_tensordict(given, ranks)
    parts = [batch(member) for member in members]
    assert actual.batch_size == (sum(ROWS[member] for member in members),)
    assert set(actual.keys()) == set(given.keys())
    length = max(LENGTHS[member] for member in members)
    tensors = [name for name, field in parts[0].items() if isinstance(field, Tensor)]
    assert len(tensors) == 7
    for name in tensors:
        assert torch.equal(given[name].cpu(), batch(mine)[name]), "the input changed"
        expected = torch.cat([with_length(part[name], length) for part in parts])
        assert actual[name].device == device()
        assert actual[name].dtype == expected.dtype, name
        assert torch.equal(actual[name].cpu(), expected), name
    for name in ("text", "answer"):
        assert actual.get(name).tolist() == [value for part in parts for value in part.get(name).tolist()], name
    assert actual["meta"] == {"temperature": 0.7, "stop": ["<eos>"]}
    again = gather_tensordict(actual, ranks)  # a gathered batch is a batch
    assert again.get("text").tolist() == actual.get("text").tolist() * ranks.size


def with_length(field: Tensor, length: int) -> Tensor:
    """[B, S, ...] with zeros up to `length`; [B] as it is."""
    if field.dim() == 1:
        return field
    full = torch.zeros(len(field), length, *field.shape[2:], dtype=field.dtype)
    full[:, : field.shape[1]] = field
    return full


def a_field_that_one_rank_lacks_is_told_to_all(ranks: GroupRanks) -> None:
    given = batch(ranks.rank)
    if ranks.rank == 3:
        del given["mask"]
    message = r"field 'mask' .* torch.bool \[B, S\] on rank\(s\) 0, 1, 2; missing on rank\(s\) 3$"
    with pytest.raises(RunError, match=message):
        gather_tensordict(given, ranks)


def entropy_equals_that_of_full_logits(group: dist.ProcessGroup, *, replica: int) -> None:
    """Forward and backward on every column cut; `replica` numbers the tokens of a data-parallel rank."""
    cases: list[dict[str, Any]] = [
        {"dtype": torch.float32, "inplace_backward": False},
        {"dtype": torch.float32, "inplace_backward": True},
        {"dtype": torch.float32, "inplace_backward": False, "temperature": 0.6, "vocab_size": 70},  # padding behind
        {"dtype": torch.bfloat16, "inplace_backward": False},
        {"dtype": torch.bfloat16, "inplace_backward": True, "spread": 1e3},
    ]
    for number, case in enumerate(cases):
        one_entropy(group, seed=10 * replica + number, **case)


def one_entropy(
    group: dist.ProcessGroup,
    *,
    seed: int,
    dtype: torch.dtype,
    inplace_backward: bool,
    temperature: float = 1.0,
    vocab_size: int = VOCAB,
    spread: float = 3.0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = (torch.randn(TOKENS, VOCAB, generator=generator) * spread).to(dtype)
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator)
    width = VOCAB // group.size()
    columns = slice(group.rank() * width, (group.rank() + 1) * width)
    logits = whole[:, columns].to(device()).clone().requires_grad_()
    given = logits * 1  # as from an output layer: its memory may become the gradient's
    logprobs, entropy = vocab_parallel_logprobs_entropy(
        given,
        targets.to(device()),
        group=group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_rows=7,
        inplace_backward=inplace_backward,
    )
    assert entropy is not None
    assert torch.equal(given.cpu(), whole[:, columns]), "the forward changed its input"
    full = whole.double().requires_grad_()
    logp = torch.log_softmax(full[:, :vocab_size] / temperature, dim=1)
    expected = torch.stack([logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)])
    torch.testing.assert_close(torch.stack([logprobs, entropy]).double().cpu(), expected, rtol=1e-5, atol=1e-5)
    (torch.stack([logprobs, entropy]) * weights.to(device())).sum().backward()
    (expected * weights.double()).sum().backward()
    assert inplace_backward or torch.equal(given.detach().cpu(), whole[:, columns]), "the backward changed its input"
    assert logits.grad is not None
    assert full.grad is not None
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-12}
    torch.testing.assert_close(logits.grad.double().cpu(), full.grad[:, columns], **bounds)


def main() -> None:
    with world() as ranks:
        for groups in DATA_PARALLEL.values():
            members = next(group for group in groups if ranks.rank in group)
            gathered_in_rank_order(GroupRanks(group_of_mine(groups)), members)
        a_field_that_one_rank_lacks_is_told_to_all(ranks)
        for size, groups in TENSOR_PARALLEL.items():
            entropy_equals_that_of_full_logits(group_of_mine(groups), replica=ranks.rank // size)
        finish(ranks)


def test_on_four_ranks() -> None:
    pass_on_four_ranks(main)


if __name__ == "__main__":
    main()
