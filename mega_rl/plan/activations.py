"""Peaks of passes over a micro-batch, and bytes per token that autograd keeps of a layer.

Each entry is a tensor that some operation saves; a tensor that two operations save counts once, and a view counts as
the memory behind it. Tokens are those of a micro-batch on one context-parallel rank;
sequence parallelism cuts the entries outside attention and MLP.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mega_rl.config.needs import requested_attention
from mega_rl.converters.architecture import HFConfig, is_delta_net, is_moe
from mega_rl.converters.plan.sharding import Head, Spec, padded_vocab_size
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state import transformers_parameters

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
    kernel: Kernel = "classes"
    moe: bool = False  # its MLP is a mixture
    delta: bool = False  # a gated delta net stands in the place of attention
    itemsize: int = 2  # bytes of an activation
    padding: float = 1.0  # slots per token of the length classes; 1: all sequences are of one length
    seqlen: int = 0  # longest sequence; only score matrices depend on it

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
    if recompute.selects("core_attn") and not shape.delta:
        _drop_core_attention(shape, entries)
    if recompute.selects("layernorm"):
        fused = shape.spec == "te"  # norms that a linear layer computes give no output to drop
        entries["attention input"] *= fused and shape.hf.mla is None
        entries["MLP input"] *= fused and not shape.moe
    if recompute.selects("mla_up_proj") and shape.hf.mla is not None:
        entries["rotary tables"] = 0.0
        entries["keys and queries"] *= shape.kernel == "classes"  # copies that attention keeps stay
    mlp = ("MLP input",) if shape.spec == "te" and not shape.moe else ()  # its norm is inside
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
    norms = dict.fromkeys(("attention norm input", "MLP norm input"), _norm_input(shape) * shape.hf.pre_norms)
    if shape.hf.post_norms:
        norms["norms of outputs"] = 2 * _norm_input(shape)
    mixer = _delta_net if shape.delta else _attention if shape.hf.mla is None else _latent_attention
    return norms | mixer(shape) | (_mixture(shape) if shape.moe else _mlp(shape))


def _norm_input(shape: LayerShape) -> float:
    """Return the input of an RMSNorm with its statistics; written-out norms also keep FP32 copies."""
    elements = shape.hf.hidden_size * shape.share
    if shape.spec == "hf":
        return elements * (FP32 + shape.itemsize) + FP32
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
        "query, key and value": q + 2 * kv if normed or shape.kernel in ("packed", "varlen") else 0.0,
        "query before its norm": q if normed and hf.num_kv_heads > tp else 0.0,
        "rotary tables": _rotary(shape, hf.head_dim * hf.rope.percent),
        "context": q,
    }
    if shape.spec == "te":
        # Its attention copies the values, its norms queries and keys: all are strided views of the one product.
        entries["query, key and value"] = kv if shape.kernel == "packed" else 0.0
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
    if hf.attention_gate:
        entries["output gate"] = q / b * (FP32 + b)  # the sigmoid, and the product
    return entries | _core_attention(shape, q=q, k=kv, v=kv, context=q)


def _delta_net(shape: LayerShape) -> dict[str, float]:
    """Return the entries of a gated delta net with flash-linear-attention, of what is not compiled."""
    net, b, tp = shape.hf.delta, shape.itemsize, shape.layout.tp
    assert net is not None
    key_heads, heads = net.num_key_heads / tp, net.num_value_heads / tp
    keys, values = key_heads * net.key_head_dim, heads * net.value_head_dim
    return {
        "attention input": shape.hidden,
        "projections": 2 * (keys + values + heads) * b,  # the convolution reads a view of them
        # Normalised, and once more a copy for each of the value's heads.
        "queries and keys": 2 * (keys + heads * net.key_head_dim) * b + 2 * key_heads * FP32,
        "values": values * b,
        "decays": heads * (3 * FP32 + b),
        "delta rule": heads * _DELTA_CHUNK * b,
        # Before and after its norm and its gate, whose input and result are FP32.
        "context": values * (3 * b + 2 * FP32) + heads * FP32,
    }


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
    """Return the bytes of sine and cosine of a token, for queries and keys, unless fused."""
    fused = shape.spec == "te" and shape.hf.rope.kind != "yarn" if fused is None else fused
    return 0.0 if fused else 4 * width * shape.itemsize


def _core_attention(shape: LayerShape, *, q: float, k: float, v: float, context: float) -> dict[str, float]:
    """Return the entries of attention proper, from bytes per token of its inputs and its result."""
    heads, cp = shape.hf.num_heads / shape.layout.tp, shape.layout.cp
    statistics = heads * FP32
    if shape.kernel == "packed":
        # The result is the next linear's input, and the values a view of the product, but for latent attention's.
        return {"keys and queries": q + k + (v if shape.hf.mla is not None else 0.0), "softmax": statistics}
    if shape.kernel == "varlen":
        if shape.hf.mla is None:
            return {"keys and queries": q + k, "softmax": statistics}
        return {"keys and queries": q + k + q, "softmax": q + statistics}
    if shape.kernel == "eager":
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
    """Return the entries of a dense MLP."""
    ffn = shape.hf.ffn_hidden_size * shape.itemsize / shape.layout.tp
    return {
        "MLP input": shape.hidden,
        "MLP hidden": (2 if shape.hf.gated else 1) * ffn,
        "MLP activation": ffn * _results_of_the_gate(shape),
    }


def _results_of_the_gate(shape: LayerShape) -> int:
    """Return the number of kept results of the gate's width: the product, perhaps its inputs."""
    if not shape.hf.gated:
        return 1
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


# A float32 temporary of the log-probs has this many elements at most, and three are alive at once.
_CHUNK, _CHUNKS = 2**24, 3
_DELTA_CHUNK = 64  # tokens that the delta rule takes at once: it keeps a matrix of their products
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # limits of the kernel for variable lengths (`engines.models.attention_kernels`)
# Slots per token where sequences are padded to powers of two: lengths spread evenly fill three quarters.
CLASS_PADDING = 4 / 3
# Uses of memory at the peak of a pass, in addition to the model's state: activations that are kept for the backward,
# and what the layer or the head that computes works on.
ACTIVATIONS, LOGITS, WORKING = "activations", "logits", "working memory"


def recompute_of(setup: RunSetup) -> Recompute:
    """Return the settings of recomputation."""
    model = setup.config.model
    return Recompute(model.recompute, tuple(model.recompute_modules), model.recompute_layers)


def tokens_of_a_pass(setup: RunSetup) -> int:
    """Return the tokens of the largest micro-batch on one rank, padding included."""
    micro, longest = setup.config.trainer.microbatch, setup.longest
    if micro.packing:
        tokens = min(micro.max_tokens, longest * rows_of_a_minibatch(setup))
        tokens = max(tokens, longest)  # a sequence is never cut
    else:
        tokens = min(micro.size, rows_of_a_minibatch(setup)) * longest
    return -(-tokens // setup.layout.cp)


def tokens_of_longest(setup: RunSetup) -> int:
    """Return a rank's tokens of a micro-batch with as many longest sequences as fit."""
    whole = tokens_of_a_pass(setup) * setup.layout.cp // setup.longest * setup.longest
    return -(-whole // setup.layout.cp)


def rows_of_a_minibatch(setup: RunSetup) -> int:
    """Return the sequences that one data-parallel rank has in a mini-batch."""
    trainer = setup.config.trainer
    return -(-trainer.minibatch_size * setup.config.rollout.n // setup.layout.dp)


def num_microbatches(setup: RunSetup) -> int:
    """Return the micro-batches of a mini-batch when every sequence is as long as it may be."""
    per_pass = tokens_of_a_pass(setup) * setup.layout.cp
    fits = max(1, per_pass // setup.longest)  # whole sequences in one micro-batch
    return max(1, -(-rows_of_a_minibatch(setup) // fits))


def training_pass(setup: RunSetup, model: PlannedModel, pp_rank: int) -> dict[str, int]:
    """Return the bytes at the peak of forward and backward on one pipeline rank, by use."""
    tokens, layout = tokens_of_a_pass(setup), setup.layout
    layers = _layers_of(setup, model, pp_rank)
    activations = tokens * _layer_bytes(setup, layers)
    if layout.pp > 1:  # micro-batches, each over all chunks of the rank, whose activations are alive at once
        warmup = layout.pp - pp_rank - 1
        if layout.vpp > 1:
            warmup = 2 * warmup + (layout.vpp - 1) * layout.pp
        activations *= min(num_microbatches(setup) * layout.vpp, warmup + 1) / layout.vpp
    recompute = recompute_of(setup)
    backward = tokens * max((_backward_of(shape, recompute) for shape in set(layers)), default=0.0)
    end, logits, head = _head(setup, model, tokens) if pp_rank == layout.pp - 1 else (0, 0, 0)
    if setup.spec == "hf":
        backward += _gathered(setup, model)
        head += _gathered(setup, model)
    kept_bytes = {ACTIVATIONS: round(activations + end)}
    if logits + head >= backward:
        return kept_bytes | {LOGITS: logits, WORKING: head}
    return kept_bytes | {WORKING: round(backward)}


def forward_pass(setup: RunSetup, model: PlannedModel, pp_rank: int) -> dict[str, int]:
    """Return the bytes of a pass without gradients by use: of one layer, or the logits."""
    tokens, layout = tokens_of_a_pass(setup), setup.layout
    layers = _layers_of(setup, model, pp_rank)
    gathered = _gathered(setup, model) if setup.spec == "hf" else 0
    # About half of a layer's entries are alive at a time: those of attention, or those of the MLP.
    working = tokens * max((sum(saved(shape).values()) / 2 for shape in set(layers)), default=0.0) + gathered
    if pp_rank < layout.pp - 1 or model.head == "value":
        return {WORKING: round(working)}
    logits = tokens * _columns(setup, model) * setup.logit_itemsize
    temporaries = _temporaries(logits, setup.logit_itemsize) + gathered
    if logits + temporaries >= working:
        return {LOGITS: logits, WORKING: temporaries + tokens * model.hf.hidden_size * setup.itemsize}
    return {WORKING: round(working)}


def shape_of(setup: RunSetup, model: PlannedModel, *, moe: bool, delta: bool = False) -> LayerShape:
    """Return a layer of a model as it runs."""
    kernel = _kernel(setup, model)
    padded = kernel in ("classes", "eager") and setup.spec != "te" and setup.config.trainer.microbatch.packing
    padding = CLASS_PADDING if padded else 1.0
    return LayerShape(model.hf, setup.layout, setup.spec, kernel, moe, delta, setup.itemsize, padding, setup.longest)


def _kernel(setup: RunSetup, model: PlannedModel) -> Kernel:
    """Return the attention kernel of a GPU; local layers prefer torch's for variable lengths."""
    if setup.spec == "te":
        return "packed"
    hf = model.hf
    if requested_attention(setup.config, model.role).word == "eager":
        return "eager"
    width = hf.head_dim if hf.mla is None else hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim
    fits = width <= _LARGEST_HEAD and width % _HEAD_MULTIPLE == 0 and not hf.sinks and setup.itemsize == 2
    packed = setup.config.trainer.microbatch.packing and setup.layout.cp == 1
    return "varlen" if fits and packed and setup.spec == "local" else "classes"


def _layers_of(setup: RunSetup, model: PlannedModel, pp_rank: int) -> list[LayerShape]:
    """Return the layers of all chunks of a pipeline rank."""
    layout, hf = setup.layout, model.hf
    numbers = [i for stage in range(layout.vpp) for i in layout.layers_of(pp_rank, hf.num_layers, stage)]
    kinds = [(is_moe(hf, i), is_delta_net(hf, i)) for i in numbers]
    shapes = {kind: shape_of(setup, model, moe=kind[0], delta=kind[1]) for kind in set(kinds)}
    return [shapes[kind] for kind in kinds]


def _layer_bytes(setup: RunSetup, layers: list[LayerShape]) -> float:
    """Return the bytes per token that all layers of a rank keep."""
    recompute = recompute_of(setup)
    per_chunk = -(-len(layers) // setup.layout.vpp)
    sizes: dict[tuple[bool, ...], float] = {}
    total = 0.0
    for number, shape in enumerate(layers):
        whole = recompute.mode == "full" and 0 < recompute.layers <= number % per_chunk
        key = (shape.moe, shape.delta, whole)
        if key not in sizes:
            sizes[key] = sum(kept(shape, Recompute() if whole else recompute).values())
        total += sizes[key]
    return total


def _backward_of(shape: LayerShape, recompute: Recompute) -> float:
    """Return bytes per token of a layer's backward: recomputed activations plus the largest gradients."""
    again = sum(saved(shape).values()) - sum(kept(shape, recompute).values())
    hf, b, tp = shape.hf, shape.itemsize, shape.layout.tp
    if shape.moe and hf.moe is not None:
        width = 3 * hf.moe.ffn_hidden_size * hf.moe.top_k * shape.share
    else:
        width = (3 if hf.gated else 2) * hf.ffn_hidden_size / tp
    return max(again, 0.0) + (width + 2 * hf.hidden_size) * b


def _head(setup: RunSetup, model: PlannedModel, tokens: int) -> tuple[int, int, int]:
    """Return (bytes kept around the head, logits, working memory of the head's backward)."""
    hf, b = model.hf, setup.itemsize
    share = 1 / setup.layout.tp if setup.layout.sequence_parallel else 1.0
    hidden = round(tokens * hf.hidden_size * b * share)
    if model.head == "value":
        fp32 = round(tokens * hf.hidden_size * FP32 * share)
        return 2 * hidden, 0, 2 * fp32
    logits = tokens * _columns(setup, model) * setup.logit_itemsize
    weight = _columns(setup, model) * hf.hidden_size * b  # the gradient of the head's weight
    gathered = 2 * tokens * hf.hidden_size * b if setup.layout.sequence_parallel and setup.layout.tp > 1 else hidden
    products = 0
    if setup.config.model.fp32_head:
        # `parallel.fp32_linear` holds both gradients in float32, the larger once more as a product that is added, and
        # half of the logits' gradient in bf16.
        weight32, hidden32 = FP32 * _columns(setup, model) * hf.hidden_size, FP32 * tokens * hf.hidden_size
        products = weight32 + hidden32 + max(weight32, hidden32) + logits // 2
    backward = max(weight + gathered + products, _temporaries(logits, setup.logit_itemsize))
    return 2 * hidden, logits, backward


def _columns(setup: RunSetup, model: PlannedModel) -> int:
    """Return the entries of the vocabulary on one rank."""
    tp = setup.layout.tp
    return padded_vocab_size(model.hf.vocab_size, tp) // tp


def _temporaries(logits: int, itemsize: int) -> int:
    return _CHUNKS * FP32 * min(logits // itemsize, _CHUNK)


def _gathered(setup: RunSetup, model: PlannedModel) -> int:
    """Return the bytes of FSDP2's gathered units: two at once, with gradients held and in transit."""
    largest = _largest_unit(model.hf, model.head)
    reduced = FP32 if setup.config.engine.fsdp.grad_reduce_in_fp32 else setup.itemsize
    return largest * (2 * setup.itemsize + ((setup.itemsize + reduced) if model.trainable else 0))


@lru_cache(maxsize=64)
def _largest_unit(hf: HFConfig, head: Head) -> int:
    """Return the elements of FSDP2's largest unit: a layer, the embedding or the head."""
    sizes: dict[str, int] = {}
    for parameter in transformers_parameters(hf, head):
        sizes[parameter.unit] = sizes.get(parameter.unit, 0) + parameter.numel
    return max(sizes.values())
