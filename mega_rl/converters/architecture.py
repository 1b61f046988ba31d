"""The architecture of a decoder-only model, normalised: what every spelling of config.json comes down to.

Nothing here knows a file format or a family's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from mega_rl.converters.safetensors.header import PLAIN_NAMES

Activation = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu_squared", "xielu"]
Quantization = Literal["fp8", "mxfp4", "int4"]


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071) as transformers computes it."""

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the correction range to whole dimensions
    # Queries are multiplied by 1 + query_growth * log(1 + floor(position / original_max_position_embeddings)).
    query_growth: float = 0.0


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's context extension: which wavelengths are stretched; the defaults are those of Meta's checkpoints."""

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base `theta` and, unless kind is "default", the stretch `factor`.

    Where the sliding-window layers have a base of their own, `kind` and `factor` hold in the other layers only.
    """

    kind: Literal["default", "linear", "llama3", "yarn"]
    theta: float
    factor: float = 1.0
    percent: float = 1.0  # share of a head's dimensions that are rotated
    interleaved: bool = False  # rotates even with odd dimensions instead of the first half with the second
    yarn: Yarn | None = None
    llama3: Llama3Rope | None = None
    local_theta: float | None = None  # base in the sliding-window layers where they rotate otherwise


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: a token sees itself and the `size` - 1 tokens before it."""

    size: int
    layers: tuple[bool, ...]  # layers that have the window


@dataclass(frozen=True)
class Indexer:
    """Lightning indexer (DeepSeek-V3.2, arXiv:2512.02556): chooses the tokens that attention sees."""

    num_heads: int
    head_dim: int
    top_k: int  # tokens that a query sees, of itself and those before it
    interleaved: bool  # rotates even with odd dimensions instead of the first half with the second


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (arXiv:2405.04434)."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6  # norms on both latents; built into the architecture's code
    indexer: Indexer | None = None  # None: attention sees every earlier token


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets (arXiv:2412.06464): linear attention in place of attention."""

    layers: tuple[bool, ...]  # layers that have one instead of attention
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # tokens that the convolution before it sees


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: which layers, how many experts, and how the router chooses."""

    layers: tuple[bool, ...]  # layers whose MLP is a mixture
    num_experts: int
    top_k: int
    ffn_hidden_size: int  # one expert's
    shared_ffn_hidden_size: int = 0  # all shared experts' together; 0: there are none
    shared_gate: bool = False  # a sigmoid gate scales the shared experts' output
    score: Literal["softmax", "sigmoid"] = "softmax"
    # True: scores of all experts, then the top k as they are (softmax) or normalised (sigmoid). False: the top k of
    # the logits, softmax over those.
    score_before_topk: bool = False
    expert_bias: bool = False  # a float32 correction per expert that takes part in the choice only
    scaling: float | None = None  # factor on the routed experts' weights
    num_groups: int | None = None  # number of groups; experts are chosen from the best `topk_groups`
    topk_groups: int | None = None
    # Weights of a softmax that is corrected are divided by their sum, or by this if it is larger.
    weight_floor: float | None = None


class DiskTensor(NamedTuple):
    """A tensor on disk as whole rows of a model's tensor, both seen as matrices."""

    name: str
    shape: tuple[int, ...]
    row: int  # its first one in the model's tensor

    @property
    def rows(self) -> int:
        """Return the number of rows; a vector is one column."""
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)


@dataclass(frozen=True)
class OwnTable:
    """Tensors of a model that no family describes, as its class in transformers has them."""

    tensors: tuple[tuple[str, tuple[DiskTensor, ...]], ...]  # in memory -> on disk
    body: str  # prefix of the names, except of the output head
    tied: tuple[str, ...]  # names that a checkpoint may repeat
    unread: tuple[str, ...]  # patterns of names that its checkpoints hold and it does not read
    float32: tuple[str, ...]  # tensors in memory that stay so in a model of any dtype

    @cached_property
    def on_disk(self) -> Mapping[str, tuple[DiskTensor, ...]]:
        """Return the tensors on disk by the tensor in memory that they make."""
        return dict(self.tensors)


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters: W + `scale` B A in the place of weights W. Source: arXiv:2106.09685."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last parts of modules' names on disk: "q_proj"
    rank_stabilised: bool = False  # alpha / sqrt(rank) instead of alpha / rank (arXiv:2312.03732)
    path: str = ""  # PEFT folder that it begins as; empty: B is zero

    @property
    def scale(self) -> float:
        """Return the factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True)
class HFConfig:
    """The architecture of a decoder-only model, and how its checkpoint on disk spells it."""

    family: str  # model_type of config.json: "qwen3"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int  # dense layers'
    vocab_size: int  # rows of the embedding on disk, before any padding
    max_position_embeddings: int
    norm_eps: float
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    linear_bias: bool  # every linear layer has a bias, the experts' too
    qk_norm: bool  # norms over each head of q and k
    rope: Rope
    unrotated: tuple[bool, ...] = ()  # layers without rotary embedding; empty: all have it
    mla: Mla | None = None
    moe: Moe | None = None
    delta: DeltaNet | None = None
    window: Window | None = None
    activation: Activation = "silu"  # the gated MLP's; a squared ReLU and xIELU have no gate
    zero_centered_norm: bool = False  # a norm multiplies by 1 + weight
    qk_norm_joint: bool = False  # norms over all heads of q together, and of k; never with qk_norm
    pre_norms: bool = True  # norms on the inputs of attention and MLP
    post_norms: bool = False  # norms on the outputs of attention and MLP too
    attention_gate: bool = False  # a sigmoid of a second query projection scales the output of attention
    sinks: bool = False  # a learnt logit per head that takes attention and gives nothing
    embedding_scale: float = 1.0
    softmax_scale: float | None = None  # factor on attention logits; None: 1 / sqrt of the query's head size
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    logit_scale: float = 1.0
    mtp_layers: int = 0  # multi-token prediction layers in the checkpoint
    mtp: Literal["drop", "load"] = "drop"  # whether they are part of the model that is converted
    quantization: Quantization | None = None
    initializer_range: float = 0.02  # standard deviation of fresh heads
    dtype: str | None = None  # "bfloat16"; None where the file does not say
    # How the tensors on disk spell it; `plan.as_on_disk` reads them off the names.
    fused_experts: bool = False  # one tensor of all experts per layer instead of one per expert
    value_head: str = "score.weight"  # name of a critic's head
    prefixes: tuple[str, str] = PLAIN_NAMES  # how names begin, layers' and the head's
    adapter: Adapter | None = None
    own: OwnTable | None = None  # in the place of a family's table; most fields above then say nothing
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # config.json of the model of images and text whose language model this is; `raw` is the language model's part.
    wrapper: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def uncut(self) -> str:
        """Return the layers that need whole sequences and so refuse context parallelism; empty: none."""
        return "top-k indexers" if self.mla is not None and self.mla.indexer is not None else ""

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies its activation by a second projection."""
        return self.activation not in ("relu_squared", "xielu")

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes behind the shape symbols of the family tables."""
        dims = {
            "one": 1,
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "two_hidden": 2 * self.hidden_size,
            "heads": self.num_heads,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "qkv": (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
            "o": self.num_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "two_ffn": 2 * self.ffn_hidden_size,
            "q_and_gate": 2 * self.num_heads * self.head_dim,
        }
        if self.mla is not None:
            query = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
            dims |= {
                "q": self.num_heads * query,
                "q_rank": self.mla.q_lora_rank or 0,
                "kv_rank": self.mla.kv_lora_rank,
                "kv_down": self.mla.kv_lora_rank + self.mla.qk_rope_head_dim,
                "kv_up": self.num_heads * (self.mla.qk_nope_head_dim + self.mla.v_head_dim),
                "o": self.num_heads * self.mla.v_head_dim,
            }
            if (indexer := self.mla.indexer) is not None:
                rows = indexer.num_heads * indexer.head_dim
                dims |= {"index_q": rows, "index_heads": indexer.num_heads, "index_dim": indexer.head_dim}
        if self.moe is not None:
            dims |= {
                "experts": self.moe.num_experts,
                "expert_ffn": self.moe.ffn_hidden_size,
                "two_expert_ffn": 2 * self.moe.ffn_hidden_size,
                "shared_ffn": self.moe.shared_ffn_hidden_size,
            }
        if self.delta is not None:
            keys = self.delta.num_key_heads * self.delta.key_head_dim
            values = self.delta.num_value_heads * self.delta.value_head_dim
            dims |= {
                "delta_keys": keys,
                "delta_values": values,
                "delta_key_heads": self.delta.num_key_heads,
                "delta_heads": self.delta.num_value_heads,
                "two_delta_heads": 2 * self.delta.num_value_heads,
                "delta_qkv": 2 * keys + values,
                "delta_qkvz": 2 * keys + 2 * values,
                "delta_head_dim": self.delta.value_head_dim,
                "conv_kernel": self.delta.conv_kernel,
            }
        if self.adapter is not None:
            dims["rank"] = self.adapter.rank
        if self.own is not None:
            dims |= {str(size): size for _, disk in self.own.tensors for one in disk for size in one.shape}
        return dims

    @cached_property
    def switches(self) -> frozenset[str]:
        """Return the properties of the whole model that a rule's `when` may name."""
        moe = self.moe
        named = {
            "qkv_bias": self.qkv_bias,
            "linear_bias": self.linear_bias,
            "qk_norm": self.qk_norm,
            "q_rank": self.mla is not None and self.mla.q_lora_rank is not None,
            "no_q_rank": self.mla is not None and self.mla.q_lora_rank is None,
            "shared_experts": moe is not None and moe.shared_ffn_hidden_size > 0,
            "expert_bias": moe is not None and moe.expert_bias,
            "per_expert": not self.fused_experts,
            "fused_experts": self.fused_experts,
            "mtp": self.mtp == "load" and self.mtp_layers > 0,
        }
        return frozenset(name for name, on in named.items() if on)


def is_moe(hf: HFConfig, layer: int) -> bool:
    """Return whether a layer's MLP is a mixture of experts; prediction layers are like the last."""
    return hf.moe is not None and hf.moe.layers[min(layer, hf.num_layers - 1)]


def is_delta_net(hf: HFConfig, layer: int) -> bool:
    """Return whether a layer is a gated delta net; prediction layers have attention."""
    return hf.delta is not None and layer < hf.num_layers and hf.delta.layers[layer]
