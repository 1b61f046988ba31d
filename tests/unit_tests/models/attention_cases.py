"""The core attention against explicit softmax, as run by the one rank of the launch in conftest.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HEADS, GROUPS, DIM = 4, 2, 8
MIXES: dict[str, tuple[int, ...]] = {
    "length 1": (1,),
    "all of length 1": (1, 1, 1),
    "one sequence": (37,),
    "one long among short": (1, 3, 130, 2, 1, 17, 16),
    "at the class borders": (15, 16, 17, 31, 32, 33, 64, 65),
    "of one class": (9, 12, 16, 5),
}


def core_attention(groups: int = GROUPS) -> Any:
    """The module under test; 4 heads of 8."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from mega_rl.models.attention import SDPACoreAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=groups, kv_channels=DIM
    )
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self")


def inputs(lengths: Sequence[int], *, groups: int = GROUPS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Packed query [T, heads, D], key and value [T, groups, D], and a gradient of the context [T, heads*D]."""
    generator = torch.Generator().manual_seed(sum(lengths) + groups)
    total = sum(lengths)
    shapes = [(total, HEADS, DIM), (total, groups, DIM), (total, groups, DIM), (total, HEADS * DIM)]
    tensors = [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(tensors)]


def reference(lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads*D]: scores, mask, softmax and sum written out in fp64, one sequence and one head after the other."""
    query, key, value = (x.double() for x in (query, key, value))
    per_group = HEADS // key.size(1)
    contexts = []
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        heads = []
        for head in range(HEADS):
            q, k, v = (
                x[start:stop, h] for x, h in ((query, head), (key, head // per_group), (value, head // per_group))
            )
            scores = (q @ k.T / DIM**0.5).masked_fill(future, -torch.inf)
            heads.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v)
        contexts.append(torch.cat(heads, dim=-1))
    return torch.cat(contexts)


def packed(module: Any, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The module on packed input."""
    from mega_rl.models.attention import packed_sequences

    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    context: Tensor = module(query, key, value, None, packed_seq_params=packed_sequences(bounds, max(lengths)))
    return context


def padded(module: Any, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The module on right-padded rows [S, B, ...] (padding 1e3, which must not matter), read back packed."""
    rows = [
        torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), padding_value=1e3) for x in (query, key, value)
    ]
    context = module(*rows, None)
    return torch.cat([context[:length, row] for row, length in enumerate(lengths)])


def differences(
    lengths: Sequence[int], *, groups: int = GROUPS, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Largest difference to the reference of context and gradients, relative to the largest number of each."""
    module = core_attention(groups)
    *given, grad = inputs(lengths, groups=groups, dtype=dtype)
    expected = reference(lengths, *given)
    expected_grads = torch.autograd.grad(expected, given, grad.double())
    worst = {}
    for form, attend in (("packed", packed), ("padded", padded)):
        found = attend(module, lengths, *given)
        found_grads = torch.autograd.grad(found, given, grad)
        for name, one, other in zip("oqkv", (found, *found_grads), (expected, *expected_grads), strict=True):
            # Of a sequence of one token the gradients of query and key are 0: nothing to be relative to.
            worst[f"{form} {name}"] = float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
    return worst


def hypothesis_difference() -> float:
    """Largest of `differences` over many mixes of lengths and numbers of groups."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    worst = 0.0

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.integers(1, 70), min_size=1, max_size=7), st.sampled_from([1, 2, 4]))
    def check(lengths: list[int], groups: int) -> None:
        nonlocal worst
        worst = max(worst, *differences(lengths, groups=groups).values())
        assert worst < 1e-9, f"{lengths} groups={groups}"

    check()
    return worst


def leaks(lengths: Sequence[int], poison: float) -> list[str]:
    """What of the others changes, by a single bit, when one sequence's q, k, v and gradient become `poison`."""
    module = core_attention()
    before = _everything(module, lengths, inputs(lengths))
    changed = []
    bounds = [0, *itertools.accumulate(lengths)]
    for victim, (start, stop) in enumerate(itertools.pairwise(bounds)):
        spoiled = inputs(lengths)
        for tensor in spoiled:
            tensor.data[start:stop] = poison
        others = torch.ones(bounds[-1], dtype=torch.bool)
        others[start:stop] = False
        after = _everything(module, lengths, spoiled)
        changed += [
            f"{name} of the others of sequence {victim}"
            for name, one, other in zip("oqkv", before, after, strict=True)
            if not torch.equal(one[others], other[others])
        ]
        assert not torch.equal(before[0], after[0])
    return changed


def _everything(module: Any, lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    *given, grad = tensors
    context = packed(module, lengths, *given)
    return [context.detach(), *torch.autograd.grad(context, given, grad)]


def attention_cases() -> dict[str, Any]:
    """Everything test_attention.py looks at."""
    return {
        "mixes": {name: differences(lengths) for name, lengths in MIXES.items()},
        "groups": {groups: differences((1, 20, 7), groups=groups) for groups in (1, 2, 4)},
        "dtypes": {str(dtype): differences((1, 20, 7, 50), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)},
        "hypothesis": hypothesis_difference(),
        "leaks": {
            str(poison): leaks(MIXES["one long among short"], poison) for poison in (0.5, float("nan"), float("inf"))
        },
    }
