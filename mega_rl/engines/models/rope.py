"""Rotary angles of packed tokens, and frequencies that no setting of Megatron-Core can express."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.converters.architecture import HFConfig

# The form of a packed micro-batch for Megatron-Core's layers: one row of T tokens, [T, 1, heads, D]. Under "thd" they
# would turn queries and keys sequence by sequence, and ask the device for the lengths: four waits of the host in every
# layer and pass. Angles in the order of the tokens need no lengths.
ONE_ROW = "sbhd"


@dataclass
class TokenPositions(PackedSeqParams):
    """`PackedSeqParams` with the position of each token in its own sequence, and a word on padding."""

    positions: Tensor | None = None  # [T / cp] int64, of the tokens that this rank holds, on the model's device
    pad_between_seqs: bool = False  # a sequence's padding is a part of it; see `build.pass_on_padding`

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int, **fields: Any) -> Self:
        """Return the parameters of sequences whose queries and keys end alike; fields: the others."""
        ends: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        return cls(**ends, max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen, **fields)


class PackedRotary(torch.nn.Module):
    """Megatron-Core's rotary embedding with angles in the order of packed tokens, if positions are known.

    A module asks for the length first, with the parameters of the packed micro-batch, and for the angles next. They are
    those of the table that `rotary` makes, bit for bit; on the slices of context-parallel ranks too, whose tokens'
    positions are those in the whole sequences. `heads_only`: of tensors [T, heads, D], as latent attention has them,
    rather than [T, 1, heads, D].
    """

    def __init__(self, rotary: RotaryEmbedding, *, heads_only: bool = False) -> None:
        super().__init__()
        self.rotary = rotary
        self._heads_only = heads_only
        self._positions: Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: None,
        transformer: object,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Return the length of the table, and take note of the positions of these packed tokens."""
        self._positions = None
        if isinstance(packed_seq_params, TokenPositions) and packed_seq_params.qkv_format == ONE_ROW:
            self._positions = packed_seq_params.positions
        length: int = self.rotary.get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params
        )
        return length

    def forward(
        self, max_seq_len: int, *, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> Tensor | tuple[Tensor, float]:
        """Return packed tokens' angles [T, 1, 1, d], else those of `rotary`; yarn adds its scale."""
        group = {} if cp_group is None else {"cp_group": cp_group}
        if self._positions is None:
            return self.rotary(max_seq_len, packed_seq=packed_seq, **group)
        made = self.rotary(max_seq_len, packed_seq=True, **group)  # whole sequences, not cut for this rank
        table = made[0] if isinstance(made, tuple) else made
        angles = table.index_select(0, self._positions)
        angles = angles.squeeze(1) if self._heads_only else angles
        return (angles, made[1]) if isinstance(made, tuple) else angles


def set_llama3_frequencies(chunk: GPTModel, hf: HFConfig) -> None:
    """Set a chunk's rotary frequencies to those of `hf.rope` (kind "llama3").

    Wavelengths above original / low_freq_factor are stretched by the factor, those below original / high_freq_factor
    stay, and between the two the frequency goes over linearly in original / wavelength (Llama 3 reference code,
    `apply_scaling`; transformers `_compute_llama3_parameters`). Megatron-Core's own scaling
    (`RotaryEmbedding._apply_scaling`) has all settings but the factor built in: another original context length would
    be ignored without a word.
    """
    rotary, rope, settings = chunk.rotary_pos_emb, hf.rope, hf.rope.llama3
    assert settings is not None
    plain = 1.0 / rope.theta ** (torch.arange(0, hf.head_dim, 2, dtype=torch.int64).float() / hf.head_dim)
    turns = settings.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    rotary.inv_freq = (plain * (kept + (1 - kept) / rope.factor)).to(rotary.inv_freq)
