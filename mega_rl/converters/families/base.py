"""Entry of a model family: its rules, constants of its Hugging Face code, limits of use.

Everything that the package has to know of one family and not of another is a field here, so that no other module names
a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_rl.converters.architecture import Activation, DeltaNet, HFConfig, Mla, Moe, Window
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.rules import Rule


@dataclass(frozen=True)
class ExpertNames:
    """Names on disk of a layer's mixture and of an expert's three matrices.

    transformers calls every mixture `mlp` and holds all experts of a layer in two tensors.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()  # further parts of names: in transformers, on disk

    def on_disk(self, name: str) -> str:
        """Return the name on disk of a tensor of transformers that is not an expert's."""
        for part, there in self.renamed:
            name = name.replace(part, there)
        return name.replace(".mlp.", f".{self.block}.")


@dataclass(frozen=True)
class KnownBug:
    """A fault of transformers: parity with it proves nothing, and rollouts come from another model."""

    fixed_in: str  # the first release of transformers without it
    concerns: Callable[[HFConfig], bool]
    what: str


@dataclass(frozen=True)
class Family:
    """A model family.

    `qkv_bias`, `qk_norm` are true, false, or the name of the key that says so. `fixed` holds, for keys that the code
    reads and Megatron-Core cannot follow, the values that it can and the reason why no other.
    """

    model_type: str  # in config.json
    rules: tuple[Rule, ...]

    # For readers of the documentation.
    title: str
    differs: str  # completes "differs from Llama by ..."

    # Engines and formats that it works with.
    megatron: str = ""  # the first release of Megatron-Core that has its layers; empty: every one that is supported
    absent_in_sglang: bool = False  # SGLang 0.5.21 has no class for it
    adapters_in_sglang: bool = False  # SGLang 0.5.21's adapters of it were seen to compute what the trainer does
    untied_in_sglang: bool = False  # SGLang 0.5.21 never reads tie_word_embeddings: the head would have no weights
    # Keys that SGLang 0.5.21 reads and transformers does not: without them it computes another model.
    needed_by_sglang: tuple[str, ...] = ()
    # Windows reach transformers' attention only through the mask, which FlashAttention does not read.
    windows_in_mask_only: bool = False
    # model_type of the class in transformers that computes the same, where transformers lacks this one.
    stand_in: str = ""
    known_bugs: tuple[KnownBug, ...] = ()

    # Values of keys that are absent from config.json; sizes that every checkpoint states are not here.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Further keys that the code reads, besides every family's, `defaults` and `fixed`.
    keys: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)
    # Names that models of images and text have for this family, where positions of text are counted as here.
    in_wrappers: tuple[str, ...] = ()

    # The architecture; fields as in HFConfig unless said otherwise.
    qkv_bias: bool | str = False
    linear_bias: bool = False
    bias_keys: tuple[str, ...] = ()  # must agree: linear layers have a bias everywhere or nowhere
    qk_norm: bool | str = False
    qk_norm_joint: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    zero_centered_norm: bool = False
    activation: Activation = "silu"
    sinks: bool = False
    tied: bool = False  # if config.json does not say
    rope_interleaved: bool = False  # rotates even with odd dimensions
    partial_rotary: bool = False  # its code can rotate a part of each head
    rope_per_layer_type: bool = False  # rope_parameters may hold one object per kind of layer; windows are not scaled
    unrotated: Callable[[Fields, int], tuple[bool, ...]] | None = None  # layers that do not rotate; empty: none
    query_growth: bool = False  # queries grow with the position: `llama_4_scaling_beta` of rope_parameters
    window: Callable[[Fields, int], Window | None] | None = None
    mla: Callable[[Fields], Mla] | None = None
    moe: Callable[[Fields, int], Moe | None] | None = None
    delta: Callable[[Fields, int], DeltaNet | None] | None = None
    attention_gate: bool = False
    # Those fields of HFConfig that are factors: `embedding_scale`, `softmax_scale`, `residual_scale`, `logit_scale`.
    scales: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}

    # Further tensors that checkpoints hold, outside the table.
    fused_experts: bool = False  # always one tensor of all experts per layer
    expert_names: ExpertNames = ExpertNames()
    # Modules of the code that its checkpoints carry on the hub; it is never run, and the table stands for it.
    hub_code: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    unread: tuple[str, ...] = ()  # patterns of names that transformers' class does not read
    # Tensors that checkpoints repeat inside multi-token prediction layers.
    mtp_ignored: tuple[str, ...] = ()

    @property
    def transformers_type(self) -> str:
        """Return the model_type of the class in transformers that computes this family."""
        return self.stand_in or self.model_type


NO_LINEAR_BIAS = ((False,), "Megatron-Core has biases on all linear layers or on none, and the MLP here has none")
