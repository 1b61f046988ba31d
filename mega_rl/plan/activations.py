"""Activations: what autograd keeps of one decoder layer until its backward, tensor by tensor, in bytes per token.

Each entry is a tensor that some operation saves; a tensor that two operations save counts once, and a view counts as
the memory behind it. Tokens are those of a micro-batch on one context-parallel rank;
sequence parallelism cuts the entries outside attention and MLP.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import Spec
from mega_rl.parallel.layout import ParallelLayout

FP32, INDEX = 4, 8
# How core attention holds packed sequences: copies padded to length classes, as they are (by Transformer Engine, or by
# torch's kernel for variable lengths, which wants values as wide as queries), or with score matrices.
Kernel = Literal["classes", "packed", "varlen", "eager"]


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward: `model.recompute` and its two other settings."""

    mode: str = "none"
    modules: Collection[str] = ("core_attn",)
    layers: int = 0  # number in each chunk, under "full"; 0: all

    def selects(self, module: str) -> bool:
        """Return whether selective recompute runs a module again."""
        return self.mode == "selective" and module in self.modules


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer and how it runs on one rank."""

    hf: HFConfig
    layout: ParallelLayout
    spec: Spec = "local"
    kernel: Kernel | None = None  # None: that of the spec
    moe: bool = False  # its MLP is a mixture
    itemsize: int = 2  # bytes of an activation
    padding: float = 1.0  # slots per token of the length classes; 1: all sequences are of one length
    seqlen: int = 0  # longest sequence; only score matrices depend on it

    @property
    def core(self) -> Kernel:
        """Return the kernel of core attention: Transformer Engine's read packed sequences as they are."""
        return self.kernel or ("packed" if self.spec == "te" else "classes")

    @property
    def hidden(self) -> float:
        """Return the bytes of a hidden state between the layer's parts, which sequence parallelism cuts."""
        return self.hf.hidden_size * self.itemsize * self.share

    @property
    def share(self) -> float:
        """Return the share of the tokens outside attention and MLP."""
        return 1 / self.layout.tp if self.layout.sequence_parallel else 1.0


def kept(shape: LayerShape, recompute: Recompute) -> dict[str, float]:
    """Return the tensors that a layer keeps for its backward, in bytes per token."""
    if recompute.mode == "full":
        return {"layer input": shape.hidden}
    entries = saved(shape)
    if recompute.selects("core_attn"):
        _drop_core_attention(shape, entries)
    if recompute.selects("layernorm"):
        fused = shape.spec == "te"  # norms that a linear layer computes give no output to drop
        entries["attention input"] *= fused and shape.hf.mla is None
        entries["MLP input"] *= fused and not shape.moe
    if recompute.selects("mla_up_proj") and shape.hf.mla is not None:
        entries["rotary tables"] = 0.0
        entries["keys and queries"] *= shape.core == "classes"  # copies that attention keeps stay
    mlp = ("MLP input",) if shape.spec == "te" and not shape.moe else ()  # whose norm is inside
    for module, names in {
        "mlp": ("MLP hidden", "MLP activation", *mlp),
        "moe_act": ("expert activation",),
        "shared_experts": ("shared experts",),
        "moe": ("router", "expert input", "expert hidden", "expert activation", "shared experts"),
    }.items():
        if recompute.selects(module):
            entries |= dict.fromkeys(set(names) & set(entries), 0.0)
    if recompute.selects("moe") and shape.moe:
        entries["MLP input"] = shape.hidden
    return entries


def saved(shape: LayerShape) -> dict[str, float]:
    """Return the tensors that a layer without recompute keeps, in bytes per token."""
    norms = {"attention norm input": _norm_input(shape), "MLP norm input": _norm_input(shape)}
    if shape.hf.post_norms:
        norms["norms of outputs"] = 2 * _norm_input(shape)
    attention = _attention(shape) if shape.hf.mla is None else _latent_attention(shape)
    return norms | attention | (_mixture(shape) if shape.moe else _mlp(shape))


def _norm_input(shape: LayerShape) -> float:
    """Return the input of an RMSNorm with its statistics; written-out norms keep the input in FP32 and its result."""
    elements = shape.hf.hidden_size * shape.share
    if shape.spec == "hf":
        return elements * (FP32 + (shape.itemsize if shape.itemsize != FP32 else FP32)) + FP32
    return elements * (FP32 if shape.hf.zero_centered_norm else shape.itemsize) + FP32 * shape.share


def _attention(shape: LayerShape) -> dict[str, float]:
    """Return the entries of grouped-query attention."""
    hf, b, tp = shape.hf, shape.itemsize, shape.layout.tp
    q = hf.num_heads * hf.head_dim * b / tp
    kv = max(hf.num_kv_heads // tp, 1) * hf.head_dim * b
    normed = hf.qk_norm or hf.qk_norm_joint
    entries = {
        "attention input": shape.hidden,
        # Keys and values are views of the one product; the queries of several groups are gathered into a copy.
        "query, key and value": q + 2 * kv if normed or shape.core in ("packed", "varlen") else 0.0,
        "query before its norm": q if normed and hf.num_kv_heads > tp else 0.0,
        "rotary tables": _rotary(shape, hf.head_dim * hf.rope.percent),
        "context": q,
    }
    if shape.spec == "te":
        # Its attention copies the values, its norms queries and keys: all are strided views of the one product.
        entries["query, key and value"] = kv if shape.core == "packed" else 0.0
        entries["query before its norm"] = q + kv if normed else 0.0
    if shape.spec == "hf":
        entries["query, key and value"] = (q + kv) / b * (FP32 + b) if normed else 0.0
        entries["query before its norm"] = 0.0
        entries["rotary tables"] = 0.0  # one for all layers
    elif hf.zero_centered_norm and normed:
        entries["query, key and value"] = (q + kv) / b * FP32  # copies that the norm computes with
        entries["query before its norm"] = 0.0
    elif hf.qk_norm_joint:
        entries["norms of queries and keys"] = (q + kv) / b * (FP32 + b)
    else:
        entries["norms of queries and keys"] = FP32 * (hf.num_heads + hf.num_kv_heads) / tp if normed else 0.0
    return entries | _core_attention(shape, q=q, k=kv, v=kv, context=q)


def _latent_attention(shape: LayerShape) -> dict[str, float]:
    """Return the entries of latent attention, whose down projections are whole on every rank."""
    hf, mla, b, tp = shape.hf, shape.hf.mla, shape.itemsize, shape.layout.tp
    assert mla is not None
    heads = hf.num_heads / tp
    q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) * b
    v = heads * mla.v_head_dim * b
    rank = (mla.q_lora_rank or 0) * b
    latent = (2 * mla.kv_lora_rank + mla.qk_rope_head_dim) * b
    entries = {
        "attention input": shape.hidden,
        # Both latents before and after their norms; under sequence parallelism they hold this rank's tokens.
        "latents": (2 * rank + latent) * shape.share,
        "rotary tables": _rotary(shape, mla.qk_rope_head_dim, fused=False),
        "context": v,
    }
    return entries | _core_attention(shape, q=q, k=q, v=v, context=v)


def _rotary(shape: LayerShape, width: float, *, fused: bool | None = None) -> float:
    """Return the bytes of sine and cosine of every token, once for queries and once for keys, unless fused."""
    fused = shape.spec == "te" and shape.hf.rope.kind != "yarn" if fused is None else fused
    return 0.0 if fused else 4 * width * shape.itemsize


def _core_attention(shape: LayerShape, *, q: float, k: float, v: float, context: float) -> dict[str, float]:
    """Return the entries of attention proper, from bytes per token of its inputs and its result."""
    heads, cp = shape.hf.num_heads / shape.layout.tp, shape.layout.cp
    statistics = heads * FP32
    if shape.core == "packed":
        # The result is the next linear's input, and the values a view of the product, but for latent attention's.
        return {"keys and queries": q + k + (v if shape.hf.mla is not None else 0.0), "softmax": statistics}
    if shape.core == "varlen":
        if shape.hf.mla is None:
            return {"keys and queries": q + k, "softmax": statistics}
        return {"keys and queries": q + k + q, "softmax": q + statistics}
    if shape.core == "eager":
        scores = heads * max(shape.seqlen, 1) * (FP32 + shape.itemsize)
        return {"keys and queries": (q + k + v) * shape.padding, "softmax": scores * shape.padding}
    slots = shape.padding if cp == 1 else 1.0
    # Context parallelism gathers the keys and values of whole sequences.
    inputs = q + cp * (k + v)
    return {"keys and queries": inputs * slots, "softmax": (context + statistics) * slots}


def _drop_core_attention(shape: LayerShape, entries: dict[str, float]) -> None:
    """Replace what attention keeps by its inputs, which its recomputation starts from."""
    hf, b, tp = shape.hf, shape.itemsize, shape.layout.tp
    entries["softmax"] = 0.0
    if hf.mla is not None:
        q = hf.num_heads * (hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim) * b / tp
        entries["keys and queries"] = 2 * q + hf.num_heads * hf.mla.v_head_dim * b / tp
        return
    q, kv = hf.num_heads * hf.head_dim * b / tp, max(hf.num_kv_heads // tp, 1) * hf.head_dim * b
    entries["keys and queries"] = q + kv
    entries["query, key and value"] = q + 2 * kv  # the values are a view of it


def _mlp(shape: LayerShape) -> dict[str, float]:
    """Return the entries of a dense gated MLP."""
    ffn = shape.hf.ffn_hidden_size * shape.itemsize / shape.layout.tp
    return {
        "MLP input": shape.hidden,
        "MLP hidden": 2 * ffn,
        "MLP activation": ffn * _results_of_the_gate(shape),
    }


def _results_of_the_gate(shape: LayerShape) -> int:
    """Return the number of kept results of the gate's width: the product, and its inputs if written out."""
    if shape.spec == "hf":
        return 2
    return 3 if shape.hf.activation == "gelu_tanh" else 1


def _mixture(shape: LayerShape) -> dict[str, float]:
    """Return the entries of a mixture of experts whose load is balanced."""
    moe, b = shape.hf.moe, shape.itemsize
    assert moe is not None
    sigmoid = 2 if moe.score == "sigmoid" else 1
    # Logits and weights in FP32, masks, and places of the chosen ones.
    router = FP32 * sigmoid * moe.num_experts + 2 * moe.num_experts + (2 * INDEX + FP32) * moe.top_k
    # Our router of local layers and those of transformers multiply in FP32, Transformer Engine's reads bf16.
    fp32_input = 0 if shape.spec == "te" else FP32 * shape.hf.hidden_size
    kept_input = shape.spec == "te" or moe.shared_ffn_hidden_size > 0
    hidden = moe.top_k * moe.ffn_hidden_size * b * shape.share
    entries = {
        "MLP input": shape.hidden if kept_input else 0.0,
        "router": (router + fp32_input) * shape.share,
        "expert input": moe.top_k * shape.hf.hidden_size * b * shape.share * shape.layout.etp,
        "expert hidden": 2 * hidden,
        "expert activation": hidden * _results_of_the_gate(shape) + FP32 * moe.top_k * shape.share,
    }
    if moe.shared_ffn_hidden_size:
        width = moe.shared_ffn_hidden_size * b / shape.layout.tp
        entries["shared experts"] = width * (2 + _results_of_the_gate(shape))
    return entries
