"""Peaks of forward and backward passes over one micro-batch: activations in flight, logits, and temporaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mega_rl.config.attention import requested_attention
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import Head, padded_vocab_size
from mega_rl.plan.activations import FP32, Kernel, LayerShape, Recompute, kept, saved
from mega_rl.plan.parameters import transformers_parameters
from mega_rl.plan.setup import PlannedModel, RunSetup

# A float32 temporary of the log-probs has this many elements at most, and three are alive at once.
_CHUNK, _CHUNKS = 2**24, 3
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # limits of the kernel for variable lengths (`engines.models.attention_kernels`)
# Slots per token where sequences are padded to powers of two: lengths spread evenly fill three quarters.
CLASS_PADDING = 4 / 3


@dataclass(frozen=True)
class PassBytes:
    """Bytes at the peak of a pass, in addition to the model's state."""

    activations: int = 0  # kept for the backward
    logits: int = 0
    working: int = 0  # memory of the layer or head that computes

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.activations + self.logits + self.working


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
    """Return the tokens of a micro-batch on one rank that holds as many longest sequences as fit."""
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


def training_pass(setup: RunSetup, model: PlannedModel, pp_rank: int) -> PassBytes:
    """Return the peak of forward and backward on one pipeline rank."""
    tokens, layout = tokens_of_a_pass(setup), setup.layout
    layers = _layers_of(setup, model, pp_rank)
    activations = tokens * _layer_bytes(setup, layers)
    if layout.pp > 1:  # micro-batches, each over all chunks of the rank, whose activations are alive at once
        warmup = layout.pp - pp_rank - 1
        if layout.vpp > 1:
            warmup = 2 * warmup + (layout.vpp - 1) * layout.pp
        activations *= min(num_microbatches(setup) * layout.vpp, warmup + 1) / layout.vpp
    recompute = recompute_of(setup)
    backward = tokens * max((_backward_of(setup, shape, recompute) for shape in _kinds(layers)), default=0.0)
    end, head = _head(setup, model, tokens) if pp_rank == layout.pp - 1 else (0, PassBytes())
    if setup.spec == "hf":
        backward += _gathered(setup, model)
        head = PassBytes(logits=head.logits, working=head.working + _gathered(setup, model))
    total = activations + end
    if head.total >= backward:
        return PassBytes(round(total), head.logits, head.working)
    return PassBytes(round(total), 0, round(backward))


def forward_pass(setup: RunSetup, model: PlannedModel, pp_rank: int) -> PassBytes:
    """Return the peak of a pass without gradients: the memory of one layer, or the logits."""
    tokens, layout = tokens_of_a_pass(setup), setup.layout
    layers = _layers_of(setup, model, pp_rank)
    gathered = _gathered(setup, model) if setup.spec == "hf" else 0
    # About half of a layer's entries are alive at a time: those of attention, or those of the MLP.
    working = tokens * max((sum(saved(shape).values()) / 2 for shape in _kinds(layers)), default=0.0) + gathered
    if pp_rank < layout.pp - 1 or model.head == "value":
        return PassBytes(working=round(working))
    logits = tokens * _columns(setup, model) * setup.logit_itemsize
    temporaries = _temporaries(logits, setup.logit_itemsize) + gathered
    if logits + temporaries >= working:
        return PassBytes(logits=logits, working=temporaries + tokens * model.hf.hidden_size * setup.itemsize)
    return PassBytes(working=round(working))


def shape_of(setup: RunSetup, model: PlannedModel, *, moe: bool) -> LayerShape:
    """Return a layer of a model as it runs."""
    kernel = _kernel(setup, model)
    padded = kernel in ("classes", "eager") and setup.spec != "te" and setup.config.trainer.microbatch.packing
    padding = CLASS_PADDING if padded else 1.0
    return LayerShape(model.hf, setup.layout, setup.spec, kernel, moe, setup.itemsize, padding, setup.longest)


def _kernel(setup: RunSetup, model: PlannedModel) -> Kernel:
    """Return the attention kernel of a GPU; local layers use torch's kernel for variable lengths if they can."""
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
    shapes = {moe: shape_of(setup, model, moe=moe) for moe in {hf.is_moe(i) for i in numbers}}
    return [shapes[hf.is_moe(i)] for i in numbers]


def _kinds(layers: list[LayerShape]) -> list[LayerShape]:
    """Return each kind of layer once."""
    return list({shape.moe: shape for shape in layers}.values())


def _layer_bytes(setup: RunSetup, layers: list[LayerShape]) -> float:
    """Return the bytes per token that all layers of a rank keep."""
    recompute = recompute_of(setup)
    per_chunk = -(-len(layers) // setup.layout.vpp)
    sizes: dict[tuple[bool, bool], float] = {}
    total = 0.0
    for number, shape in enumerate(layers):
        whole = recompute.mode == "full" and 0 < recompute.layers <= number % per_chunk
        key = (shape.moe, whole)
        if key not in sizes:
            sizes[key] = sum(kept(shape, Recompute() if whole else recompute).values())
        total += sizes[key]
    return total


def _backward_of(setup: RunSetup, shape: LayerShape, recompute: Recompute) -> float:
    """Return bytes per token of a layer's backward: recomputed activations plus the largest gradients."""
    again = sum(saved(shape).values()) - sum(kept(shape, recompute).values())
    hf, b, tp = shape.hf, shape.itemsize, shape.layout.tp
    if shape.moe and hf.moe is not None:
        width = 3 * hf.moe.ffn_hidden_size * hf.moe.top_k * shape.share
    else:
        width = 3 * hf.ffn_hidden_size / tp
    return max(again, 0.0) + (width + 2 * hf.hidden_size) * b


def _head(setup: RunSetup, model: PlannedModel, tokens: int) -> tuple[int, PassBytes]:
    """Return (bytes kept around the head, peak of the head's backward) of the last stage."""
    hf, b = model.hf, setup.itemsize
    share = 1 / setup.layout.tp if setup.layout.sequence_parallel else 1.0
    hidden = round(tokens * hf.hidden_size * b * share)
    if model.head == "value":
        fp32 = round(tokens * hf.hidden_size * FP32 * share)
        return 2 * hidden, PassBytes(working=2 * fp32)
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
    return 2 * hidden, PassBytes(logits=logits, working=backward)


def _columns(setup: RunSetup, model: PlannedModel) -> int:
    """Return the entries of the vocabulary on one rank."""
    tp = setup.layout.tp
    return padded_vocab_size(model.hf.vocab_size, tp) // tp


def _temporaries(logits: int, itemsize: int) -> int:
    return _CHUNKS * FP32 * min(logits // itemsize, _CHUNK)


def _gathered(setup: RunSetup, model: PlannedModel) -> int:
    """Return the bytes of FSDP2's gathered units: two at once, their gradients, and the gradients in transit."""
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
