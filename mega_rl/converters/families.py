"""One declarative table per model family: which Hugging Face tensors make which Megatron-Core parameter.

A rule names a canonical parameter (Megatron-Core's name under a local layer spec, global layer index in place of
`{layer}`), the tensors on disk that fill it, and how a row of the parameter relates to a row of a tensor. Loading,
export, resharding and the completeness proof are all derived from these rules (see plan.py), so a rule is written once
and holds in both directions. Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Primitive = Literal["vocab", "copy", "qkv", "col", "row", "gated"]


@dataclass(frozen=True)
class Source:
    """A tensor on disk: its name (with `{layer}`) and its shape as symbols of `HFConfig.dims`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One parameter and its sources.

    `when` names an entry of `HFConfig.switches` that turns the rule on. The tensor of an `optional` rule may be absent
    on disk; its parameter then keeps its initial value.
    """

    param: str
    primitive: Primitive
    sources: tuple[Source, ...]
    when: str = ""
    optional: bool = False

    @property
    def per_layer(self) -> bool:
        """Whether the rule holds once per transformer layer."""
        return "{layer}" in self.param


@dataclass(frozen=True)
class Family:
    """A model family: its table and what its Hugging Face code hard-wires instead of reading from config.json."""

    model_type: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False  # q, k and v have a bias whatever config.json says
    qk_norm: bool = False  # RMSNorm over each head of q and k
    bias_fields: tuple[str, ...] = ()  # config.json booleans that its code reads, default False
    head_dim: int | None = None  # where config.json has none; None: hidden_size // num_attention_heads
    sliding_window: bool = False  # its code can use a sliding window
    ignored: tuple[str, ...] = field(default=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",))


def vocab(param: str, name: str) -> Rule:
    """Rule of a [vocab, hidden] table: rows cut over tensor parallel, zero rows added up to the padded vocabulary."""
    return Rule(param, "vocab", (Source(name, ("vocab", "hidden")),))


def copy(param: str, name: str, *shape: str, when: str = "", optional: bool = False) -> Rule:
    """Rule of a parameter that every tensor-parallel rank holds whole."""
    return Rule(param, "copy", (Source(name, shape),), when, optional)


def qkv(param: str, name: str, *columns: str, when: str = "") -> Rule:
    """Rule of the fused attention input: per key-value group its query heads, its key head, its value head.

    `name` holds `{part}`, replaced by q, k and v. Cut by rows.
    """
    parts = {"q": "q", "k": "kv", "v": "kv"}
    sources = tuple(Source(name.replace("{part}", part), (rows, *columns)) for part, rows in parts.items())
    return Rule(param, "qkv", sources, when)


def col(param: str, name: str, *shape: str, when: str = "") -> Rule:
    """Rule of a column-parallel weight or bias: output rows cut over tensor parallel."""
    return Rule(param, "col", (Source(name, shape),), when)


def row(param: str, name: str, *shape: str, when: str = "") -> Rule:
    """Rule of a row-parallel weight: input columns cut over tensor parallel."""
    return Rule(param, "row", (Source(name, shape),), when)


def gated(param: str, name: str, *shape: str, when: str = "") -> Rule:
    """Rule of [gate; up]: each half is cut by rows on its own. `name` holds `{part}`, replaced by gate and up."""
    return Rule(param, "gated", tuple(Source(name.replace("{part}", part), shape) for part in ("gate", "up")), when)


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = (vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),)

ATTENTION = (
    copy(_M + "input_layernorm.weight", _H + "input_layernorm.weight", "hidden"),
    qkv(_M + "self_attention.linear_qkv.weight", _H + "self_attn.{part}_proj.weight", "hidden"),
    qkv(_M + "self_attention.linear_qkv.bias", _H + "self_attn.{part}_proj.bias", when="qkv_bias"),
    copy(_M + "self_attention.q_layernorm.weight", _H + "self_attn.q_norm.weight", "head_dim", when="qk_norm"),
    copy(_M + "self_attention.k_layernorm.weight", _H + "self_attn.k_norm.weight", "head_dim", when="qk_norm"),
    row(_M + "self_attention.linear_proj.weight", _H + "self_attn.o_proj.weight", "hidden", "q"),
    copy(_M + "self_attention.linear_proj.bias", _H + "self_attn.o_proj.bias", "hidden", when="linear_bias"),
)

MLP = (
    copy(_M + "pre_mlp_layernorm.weight", _H + "post_attention_layernorm.weight", "hidden"),
    gated(_M + "mlp.linear_fc1.weight", _H + "mlp.{part}_proj.weight", "ffn", "hidden"),
    gated(_M + "mlp.linear_fc1.bias", _H + "mlp.{part}_proj.bias", "ffn", when="linear_bias"),
    row(_M + "mlp.linear_fc2.weight", _H + "mlp.down_proj.weight", "hidden", "ffn"),
    copy(_M + "mlp.linear_fc2.bias", _H + "mlp.down_proj.bias", "hidden", when="linear_bias"),
)

OUTPUT = (
    copy("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    vocab("output_layer.weight", "lm_head.weight"),
)

# A critic's head, one row held by every rank, in place of the vocabulary's.
VALUE_HEAD = copy("output_layer.weight", "score.weight", "one", "hidden", optional=True)

DENSE = EMBEDDING + ATTENTION + MLP + OUTPUT

QWEN2 = Family("qwen2", DENSE, qkv_bias=True, sliding_window=True)
QWEN3 = Family("qwen3", DENSE, qk_norm=True, bias_fields=("attention_bias",), head_dim=128, sliding_window=True)
LLAMA = Family("llama", DENSE, bias_fields=("attention_bias", "mlp_bias"))

FAMILIES = {family.model_type: family for family in (QWEN2, QWEN3, LLAMA)}
