"""Parameter names: the canonical ones of the family tables and the dialects that live models speak.

Canonical names are those of a Megatron-Core model under a local layer spec. A Transformer Engine spec fuses the two
layer norms of a dense layer into the linear that follows, which renames them and nothing else. Inside a model chunk
layers are numbered from 0; canonical names carry the index in the whole model. Imports the standard library only.
"""

from __future__ import annotations

import re
from typing import Literal

Spec = Literal["local", "te"]

_TE_SUFFIXES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def dialect_name(canonical: str, *, spec: Spec) -> str:
    """The name a model built with `spec` gives to a canonical parameter (layer index unchanged)."""
    if spec == "te":
        for local, te in _TE_SUFFIXES.items():
            if canonical.endswith(local):
                return canonical.removesuffix(local) + te
    return canonical


def canonical_name(name: str, *, spec: Spec) -> str:
    """Inverse of `dialect_name`."""
    if spec == "te":
        for local, te in _TE_SUFFIXES.items():
            if name.endswith(te):
                return name.removesuffix(te) + local
    return name


def with_layer(name: str, layer: int) -> str:
    """The same name with another layer index; names outside the decoder's layers are returned as they are."""
    return _LAYER.sub(f"decoder.layers.{layer}.", name)
