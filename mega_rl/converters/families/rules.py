"""The vocabulary of the family tables: which Hugging Face tensors make which Megatron-Core parameter.

A rule names a parameter, the tensors on disk that fill it, and how a row of the parameter relates to a row of a tensor.
Loading, export and the completeness proof are all derived from these rules (see `plan`), so a rule is written once and
holds in both directions.

Parameters have the names of a model under a local layer spec, with `{layer}` and `{expert}` for indices; `te` is the
name under Transformer Engine's spec if it differs, except an expert's. Names of tensors on disk have the same form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

# How tensors are stacked into a parameter and how tensor parallelism cuts it; blocks.py has the arithmetic.
Primitive = Literal["vocab", "copy", "qkv", "col", "row", "gated", "sections"]
# Scope of a rule: once, for every layer of the decoder, for every multi-token prediction layer.
Scope = Literal["model", "layer", "mtp"]
Part = Literal["all", "first half", "second half", "even", "odd"]
LAYER_KINDS = frozenset({"dense", "moe", "attention", "delta"})  # a layer is one of the first two, and of the last two

DECODER_LAYER, MTP_LAYER = "decoder.layers.{layer}.", "mtp.layers.{mtp}.transformer_layer."
DISK_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Share:
    """One of several kinds of rows that take turns in a tensor, group by group.

    `parts` are each kind's rows in the whole tensor, as symbols; a group has 1 / `groups` of each, one after the other.
    """

    parts: tuple[str, ...]
    index: int  # the kind that is meant
    groups: str = "one"


@dataclass(frozen=True)
class Source:
    """A tensor on disk: its name and its shape as symbols of `HFConfig.dims`.

    With `stacked` its first dimension counts experts and a parameter is made of one of them. With `transposed` its last
    two dimensions are (input, output) where Megatron-Core has (output, input). `part` says which of the outputs, and so
    does `share`.
    """

    name: str
    shape: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False
    part: Part = "all"
    share: Share | None = None


@dataclass(frozen=True)
class Rule:
    """One parameter and its sources.

    `when` names switches (`HFConfig.switches`, and `LAYER_KINDS`) that must all hold. The
    tensor of an `optional` rule may be absent on disk; its parameter then keeps its initial value. Rules with equal
    `together` are exported in one bucket: a rollout engine fuses their tensors as they arrive. `float32` parameters
    are so in a model of any dtype. `frozen` ones have no gradient in training.
    """

    param: str
    primitive: Primitive
    sources: tuple[Source, ...]
    te: str = ""
    when: tuple[str, ...] = ()
    scope: Scope = "model"
    optional: bool = False
    together: str = ""
    float32: bool = False
    frozen: bool = False

    @property
    def per_expert(self) -> bool:
        """Return whether the rule holds once per expert; the experts' tensor parallelism cuts such parameters."""
        return "{expert}" in self.param

    def name(self, spec: str) -> str:
        """Return the parameter's name under a layer spec, "local" or "te"."""
        if spec != "te" or self.te:
            return self.te if spec == "te" else self.param
        return re.sub(r"local_experts\.\{expert\}\.(.*)", r"\1{expert}", self.param)


def _single(
    primitive: Primitive,
    param: str,
    name: str,
    *shape: str,
    te: str = "",
    when: Sequence[str] = (),
    stacked: bool = False,
    transposed: bool = False,
    together: str = "",
) -> Rule:
    """Return the rule of a parameter that one tensor fills."""
    source = Source(name, shape, stacked, transposed)
    return Rule(param, primitive, (source,), te, tuple(when), together=together)


copy = partial(_single, "copy")  # every tensor-parallel rank holds the whole parameter
col = partial(_single, "col")  # column-parallel weight or bias: output rows are cut over tensor parallel
row = partial(_single, "row")  # row-parallel weight: input columns are cut over tensor parallel


def vocab(param: str, name: str) -> Rule:
    """Return the rule of a [vocab, hidden] table: rows cut over tp, padded with zero rows."""
    return _single("vocab", param, name, "vocab", "hidden")


def qkv(param: str, name: str, *columns: str, when: Sequence[str] = ()) -> Rule:
    """Return the rule of fused qkv: per key-value group query heads, key head and value head.

    `name` holds `{part}`, replaced by q, k and v. Cut by rows.
    """
    parts = {"q": "q", "k": "kv", "v": "kv"}
    sources = tuple(Source(name.replace("{part}", part), (rows, *columns)) for part, rows in parts.items())
    return Rule(param, "qkv", sources, when=tuple(when))


def joined_qkv(param: str, name: str, *columns: str) -> Rule:
    """Return the rule of fused qkv from one tensor of queries, then keys, then values."""
    return Rule(param, "qkv", shares(name, "qkv", *columns, parts=("q", "kv", "kv")))


def gated(param: str, name: str, *shape: str, parts: Sequence[str] = ("gate", "up"), when: Sequence[str] = ()) -> Rule:
    """Return the rule of [gate; up] from two tensors, each cut by rows; `name` holds `{part}`."""
    sources = tuple(Source(name.replace("{part}", part), shape) for part in parts)
    return Rule(param, "gated", sources, when=tuple(when))


def fused_gated(
    param: str,
    name: str,
    *shape: str,
    when: Sequence[str] = (),
    stacked: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
) -> Rule:
    """Return the rule of [gate; up] from one tensor: gate above up, or alternating rows (`interleaved`)."""
    parts: tuple[Part, Part] = ("even", "odd") if interleaved else ("first half", "second half")
    sources = tuple(Source(name, shape, stacked, transposed, part) for part in parts)
    return Rule(param, "gated", sources, when=tuple(when))


def sections(param: str, *sources: Source, when: Sequence[str] = ()) -> Rule:
    """Return the rule of a parameter whose sources are each cut by rows."""
    return Rule(param, "sections", sources, when=tuple(when))


def shares(name: str, *shape: str, parts: Sequence[str], groups: str = "one") -> tuple[Source, ...]:
    """Return a source for each kind of rows that take turns in a tensor."""
    return tuple(Source(name, shape, share=Share(tuple(parts), i, groups)) for i in range(len(parts)))


def in_layers(*rules: Rule, prefix: str = DECODER_LAYER, scope: Scope = "layer") -> tuple[Rule, ...]:
    """Return the rules with a layer's prefixes, each for every layer of the decoder."""
    return tuple(
        replace(
            rule,
            param=prefix + rule.param,
            te=prefix + rule.te if rule.te else "",
            sources=tuple(replace(source, name=DISK_LAYER + source.name) for source in rule.sources),
            scope=scope,
            when=(*rule.when, "mtp") if scope == "mtp" else rule.when,
        )
        for rule in rules
    )


def of_mtp(*rules: Rule) -> tuple[Rule, ...]:
    """Return the rules, with the prefixes of a layer, of what multi-token prediction adds to it."""
    return in_layers(*rules, prefix="mtp.layers.{mtp}.", scope="mtp")


def in_mtp_layers(layer_rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of the decoder's layers once more, for inside every multi-token prediction layer.

    On disk those layers follow the decoder's, so `{layer}` counts on; in the model they count from 0 (`{mtp}`).
    """
    return tuple(
        replace(
            rule,
            param=rule.param.replace(DECODER_LAYER, MTP_LAYER),
            te=rule.te.replace(DECODER_LAYER, MTP_LAYER),
            scope="mtp",
            when=(*rule.when, "mtp"),
        )
        for rule in layer_rules
    )
