"""Rotary angles of packed tokens: bit for bit what Megatron-Core's own packed rotation gives, without its waits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.parallel.accelerator import prepare

LENGTHS = (5, 1, 12, 7, 15)
DIM = 16


@dataclass(frozen=True)
class Slice:
    """A context-parallel group as far as rotation asks for it."""

    at: int = 0
    of: int = 1

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.of


def rotary(kind: str, group: Slice) -> Any:
    prepare("auto")
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    if kind == "yarn":
        return YarnRotaryEmbedding(DIM, scaling_factor=4.0, original_max_position_embeddings=64, cp_group=group)
    return RotaryEmbedding(DIM, 1.0, rotary_interleaved=kind == "interleaved", cp_group=group)


def rotated(kind: str, group: Slice, *, latent: bool, ours: bool, dtype: torch.dtype) -> list[Tensor]:
    """Turned queries and their gradient: by Megatron-Core from the lengths, or by ours from the positions."""
    prepare("auto")
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.rope import ONE_ROW, PackedRotary, TokenPositions

    lengths = [-(-length // (2 * group.of)) * 2 * group.of if group.of > 1 else length for length in LENGTHS]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    held = held_positions(lengths, cp_rank=group.at, cp_size=group.of) if group.of > 1 else torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[held]
    generator = torch.Generator().manual_seed(0)
    query, gradient = (torch.randn(len(held), 3, DIM + 4, generator=generator).to(dtype) for _ in range(2))
    query.requires_grad_()
    config = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=kind == "interleaved", multi_latent_attention=latent
    )
    form = ONE_ROW if ours else "thd"
    packed = TokenPositions(qkv_format=form, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), positions=positions)
    module = PackedRotary(rotary(kind, group), heads_only=latent)
    length = module.get_rotary_seq_len(None, None, query, config, packed)
    angles = module(length, packed_seq=not ours)  # as Megatron-Core says of the form
    angles, scale = angles if isinstance(angles, tuple) else (angles, 1.0)
    arguments = {"config": config, "mscale": scale, "cp_group": group}
    if not ours:
        out = apply_rotary_pos_emb(query, angles, cu_seqlens=bounds, **arguments)
    elif latent:
        out = apply_rotary_pos_emb(query, angles, **arguments)
    else:
        out = apply_rotary_pos_emb(query.unsqueeze(1), angles, **arguments).squeeze(1)
    out.backward(gradient)
    assert query.grad is not None
    return [out.detach(), query.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [Slice(), Slice(0, 2), Slice(1, 2), Slice(3, 4)], ids=str)
@pytest.mark.parametrize(
    ("kind", "latent"), [("plain", False), ("interleaved", False), ("yarn", False), ("plain", True), ("yarn", True)]
)
def test_angles_by_position_are_those_by_length(kind: str, latent: bool, group: Slice, dtype: torch.dtype) -> None:
    """Values and gradients, to the last bit; sequences of one token, and of all the table's, among them."""
    ours = rotated(kind, group, latent=latent, ours=True, dtype=dtype)
    theirs = rotated(kind, group, latent=latent, ours=False, dtype=dtype)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], torch.zeros_like(ours[0]))


def test_padded_batches_get_the_table() -> None:
    """Positions of packed tokens are not kept for a batch that is not packed."""
    prepare("auto")
    from mega_rl.engines.models.rope import ONE_ROW, PackedRotary, TokenPositions

    module = PackedRotary(rotary("plain", Slice()))
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
    packed = TokenPositions(qkv_format=ONE_ROW, max_seqlen_q=4, max_seqlen_kv=4, positions=torch.tensor([0, 1, 0]))
    assert module(module.get_rotary_seq_len(None, None, torch.zeros(3, 1, 8), config, packed)).shape == (3, 1, 1, DIM)
    rows = torch.zeros(9, 2, 8)
    assert module(module.get_rotary_seq_len(None, None, rows, config)).shape == (9, 1, 1, DIM)
