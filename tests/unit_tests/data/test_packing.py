"""Packing and padding: every token arrives once, shifted by one, and outputs find the way back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.data.packing import MicroBatch, pack, pad, scatter_back
from mega_rl.types import Rollout

Make = Callable[..., MicroBatch]


def batch_of(lengths: list[int], size: int) -> Rollout:
    """Token (b, t) is 100 * (b + 1) + t; its log-prob is the same number negated; the first token is the prompt."""
    rows, column = len(lengths), torch.arange(size)
    length = torch.tensor(lengths, dtype=torch.int64)
    inside = column < length[:, None]
    tokens = torch.where(inside, 100 * (torch.arange(rows)[:, None] + 1) + column, 0)
    mask = inside & (column >= 1)
    return Rollout.from_rows(
        tokens,
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        lengths=length,
        rollout_logprobs=torch.where(mask, -tokens.float(), 0.0),
    )


FIELDS = ("rollout_logprobs", "loss_mask")


def test_pack_by_hand() -> None:
    micro = pack(batch_of([2, 4, 1, 3], size=5), [3, 0, 2], field_names=FIELDS, pad_to_multiple=4)
    assert micro.tokens.tolist() == [[400, 401, 402, 100, 101, 300, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert micro.targets.tolist() == [[401, 402, 0, 101, 0, 0, 0, 0]]
    assert micro.cu_seqlens is not None
    assert micro.cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.max_seqlen == 3
    assert micro.rows == (3, 0, 2)
    assert micro.lengths == (3, 2, 1)
    assert micro.packed
    assert micro.fields["rollout_logprobs"].tolist() == [[-401.0, -402.0, 0.0, -101.0, 0.0, 0.0, 0.0, 0.0]]
    assert micro.fields["loss_mask"].tolist() == [[True, True, False, True, False, False, False, False]]
    assert micro.fields["loss_mask"].dtype == torch.bool


def test_pad_by_hand() -> None:
    micro = pad(batch_of([2, 4, 1, 3], size=8), [3, 0], field_names=FIELDS, pad_to_multiple=4)
    assert micro.tokens.tolist() == [[400, 401, 402, 0], [100, 101, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert micro.targets.tolist() == [[401, 402, 0, 0], [101, 0, 0, 0]]
    assert micro.cu_seqlens is None
    assert not micro.packed
    assert micro.max_seqlen == 4
    assert micro.fields["rollout_logprobs"].tolist() == [[-401.0, -402.0, 0.0, 0.0], [-101.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("make", [pack, pad])
@pytest.mark.parametrize("multiple", [1, 8])
def test_no_rows_make_a_dummy(make: Make, multiple: int) -> None:
    batch = batch_of([2, 3], size=3)
    micro = make(batch, [], field_names=FIELDS, pad_to_multiple=multiple)
    for tensor in (micro.tokens, micro.targets, micro.position_ids, *micro.fields.values()):
        assert tensor.shape == (1, multiple)
    assert not micro.tokens.any()
    assert not micro.fields["loss_mask"].any()
    assert micro.max_seqlen == multiple
    if micro.cu_seqlens is not None:
        assert micro.cu_seqlens.tolist() == [0, multiple]
    out = torch.full((2, 3), 5.0)
    scatter_back(torch.ones(1, multiple), micro, out)
    assert torch.equal(out, torch.full((2, 3), 5.0))


@pytest.mark.parametrize("make", [pack, pad])
def test_scatter_back_leaves_first_tokens_and_padding_alone(make: Make) -> None:
    micro = make(batch_of([2, 3], size=4), [1, 0], pad_to_multiple=4)
    out = torch.full((2, 4), -7.0)
    scatter_back(torch.ones_like(micro.tokens, dtype=torch.bfloat16), micro, out)
    assert out.tolist() == [[-7.0, 1.0, -7.0, -7.0], [-7.0, 1.0, 1.0, -7.0]]
    with pytest.raises(AssertionError, match="values are"):
        scatter_back(torch.ones(3, 3), micro, out)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    cut=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize("make", [pack, pad])
def test_fields_come_back_as_they_went(make: Make, lengths: list[int], cut: int, multiple: int, seed: int) -> None:
    batch = batch_of(lengths, size=max(lengths) + 1)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    out = torch.zeros_like(batch.rollout_logprobs)
    for first in range(0, len(order), cut):
        micro = make(batch, order[first : first + cut], field_names=FIELDS, pad_to_multiple=multiple)
        assert micro.tokens.numel() % multiple == 0
        # The field of a position is that of its target, and only sequence ends have none.
        assert torch.equal(micro.fields["rollout_logprobs"], -micro.targets.float())
        following = torch.roll(micro.tokens.flatten(), -1)[micro.targets.flatten() > 0]
        assert torch.equal(following, micro.targets.flatten()[micro.targets.flatten() > 0])
        scatter_back(micro.fields["rollout_logprobs"], micro, out)
    assert torch.equal(out, batch.rollout_logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [pack, pad])
def test_on_a_gpu(make: Make) -> None:
    batch = batch_of([2, 4, 1, 3], size=5)
    host, device = (make(b, [3, 0, 2], field_names=FIELDS, pad_to_multiple=4) for b in (batch, batch.to("cuda")))
    for name in ("tokens", "targets", "position_ids"):
        assert torch.equal(getattr(host, name), getattr(device, name).cpu())
    out = torch.zeros_like(batch.rollout_logprobs, device="cuda")
    scatter_back(device.fields["rollout_logprobs"], device, out)
    assert torch.equal(out.cpu()[[0, 2, 3]], batch.rollout_logprobs[[0, 2, 3]])
