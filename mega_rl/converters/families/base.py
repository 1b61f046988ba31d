"""What a model family states: its table of rules and what its Hugging Face code hard-wires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_rl.converters.architecture import Mla, Moe, Window
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.rules import Rule


@dataclass(frozen=True)
class Family:
    """A model family: its table and how its Hugging Face code reads config.json.

    `qkv_bias`, `qk_norm` are true, false, or the name of the key that says so. `fixed` holds, for keys that the code
    reads and Megatron-Core cannot follow, the values that it can and the reason why no other.
    """

    model_type: str
    rules: tuple[Rule, ...]
    # What the class gives to keys that are absent from config.json; sizes that every checkpoint states are not here.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Keys that the code reads beside those of every family, of `defaults` and of `fixed`.
    keys: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    qkv_bias: bool | str = False
    bias_keys: tuple[str, ...] = ()  # must agree: linear layers have a bias everywhere or nowhere
    qk_norm: bool | str = False
    tied: bool = False  # where config.json does not say
    rope_interleaved: bool = False  # rotates even with odd dimensions
    partial_rotary: bool = False  # its code can rotate a part of each head
    rope_per_layer_type: bool = False  # rope_parameters may hold one object per kind of layer
    window: Callable[[Fields, int], Window | None] | None = None
    mla: Callable[[Fields], Mla] | None = None
    moe: Callable[[Fields, int], Moe | None] | None = None
    # Fields of HFConfig with one value for the whole family, and those that follow from config.json in its own way.
    constants: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Fields], Mapping[str, Any]] | None = None
    # Modules of the code that its checkpoints carry on the hub; it is never run, and the table stands for it.
    hub_code: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    # Tensors that checkpoints repeat inside multi-token prediction layers.
    mtp_ignored: tuple[str, ...] = ()


NO_LINEAR_BIAS = ((False,), "Megatron-Core has biases on all linear layers or on none, and the MLP here has none")
