"""Rotary settings of config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mega_rl.converters.architecture import Llama3Rope, Rope, Yarn
from mega_rl.converters.families import Family
from mega_rl.converters.families.fields import Fields

LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

Kind = Literal["default", "linear", "llama3", "yarn"]
# Keys of families whose queries grow with the position.
GROWTH, GROWTH_KEYS = "llama_4_scaling_beta", ("llama_4_scaling_beta", "max_position_embeddings")
SHARED_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
KEYS: dict[Kind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *LLAMA3_KEYS),
    "yarn": YARN_KEYS,
}


def read_rope(fields: Fields, family: Family) -> Rope:
    """Return the rotary settings of the model; refuse those that Megatron-Core does not compute exactly."""
    old, new = fields.object("rope_scaling"), fields.object("rope_parameters")
    if fields.raw.get("rope_scaling") and fields.raw.get("rope_parameters") and old != new:
        fields.refuse("rope_scaling", "rope_parameters says otherwise, and transformers takes only one; remove one")
    name, given = ("rope_scaling", old) if old else ("rope_parameters", new)
    local_theta = None
    if family.rope_per_layer_type:
        name, given, local_theta = _per_layer_type(fields, name, given)
    rope = fields.inside(name, given)
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=1e4))
    percent = _percent(fields, rope, family)
    kind = _kind(rope)
    if kind is None:
        fix = "set it to default if sequences stay within the original context"
        fix = "its factors act on short sequences too" if _stated(rope) == "longrope" else fix
        rope.refuse("rope_type", f"only {', '.join(KEYS)} are reproduced exactly; {fix}", value=_stated(rope))
        return Rope("default", theta)
    # A setting of another kind may be left over and has no effect.
    known = {
        *SHARED_KEYS,
        *family.keys,
        *(GROWTH_KEYS if family.query_growth else ()),
        *(KEYS[kind] if kind != "default" else (key for keys in KEYS.values() for key in keys)),
    }
    for key in rope.raw:
        if key not in known and rope.raw[key] is not None:
            fix = f"remove it if rope_type={kind} of transformers does not read it"
            rope.refuse(key, f"not a setting that Megatron-Core knows; {fix}")
    factor, yarn, llama3 = 1.0, None, None
    if kind != "default":
        factor = _factor(fields, rope, kind)
    if kind == "llama3":
        llama3 = _llama3(fields, rope)
    if kind == "yarn":
        yarn = _yarn(fields, rope, factor, latent=family.mla is not None)
        yarn = replace(yarn, query_growth=rope.optional_number(GROWTH) or 0.0)
        if percent != 1 or family.rope_interleaved:
            rope.refuse(
                "rope_type", "Megatron-Core's yarn rotates every dimension of a head, halves against each other"
            )
    elif kind != "default" and family.mla is not None:
        rope.refuse("rope_type", "Megatron-Core's latent attention has default and yarn", value=kind)
    local_theta = None if kind == "default" and local_theta == theta else local_theta
    return Rope(kind, theta, factor, percent, family.rope_interleaved, yarn, llama3, local_theta)


def _percent(fields: Fields, rope: Fields, family: Family) -> float:
    """Return the share of a head that rotates, in latent attention of its rotating part."""
    percent = rope.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    if family.mla is not None and percent < 1:
        nope, rotated = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
        percent /= rotated / (nope + rotated)
    if percent > 1 or (percent < 1 and not family.partial_rotary):
        rule = "must be at most 1" if percent > 1 else "this family rotates every dimension"
        fields.refuse("partial_rotary_factor", rule, value=percent)
    return percent


def _per_layer_type(fields: Fields, name: str, given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], float]:
    """Return name and content of the full layers' settings, and the window layers' base, never scaled."""
    kinds = ("full_attention", "sliding_attention")
    nested = fields.inside(name, given)
    if not any(kind in given for kind in kinds):
        theta = nested.number("rope_theta", default=fields.number("rope_theta", default=1e4))
        return name, given, fields.number("rope_local_base_freq", default=theta)
    for key in given:
        # For a model that lacks one kind of layer, transformers 5 writes keys of one object next to the others.
        if key not in kinds and given[key] is not None and key not in SHARED_KEYS:
            nested.refuse(key, f"must be inside {' or '.join(kinds)}")
    local = nested.inside("sliding_attention", nested.object("sliding_attention"))
    if _kind(local) != "default":
        local.refuse("rope_type", "layers with a window have no scaling in Megatron-Core", value=_stated(local))
    theta = local.number("rope_theta", default=fields.number("rope_local_base_freq", default=1e4))
    return f"{name}.full_attention", nested.object("full_attention"), theta


def _stated(rope: Fields) -> Any:
    """Return the kind of scaling as the file says it, under its newer or older name."""
    return rope.get("rope_type") or rope.get("type") or "default"


def _kind(rope: Fields) -> Kind | None:
    """Return the kind of scaling; None for one that is not supported."""
    stated = _stated(rope)
    return next((kind for kind in KEYS if kind == stated), None)


def _factor(fields: Fields, rope: Fields, kind: str) -> float:
    """Return the stretch; yarn may state only the two context lengths."""
    if rope.get("factor") is None:
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and "factor" in rope.raw and original is not None:
            ratio = fields.size("max_position_embeddings") / rope.size("original_max_position_embeddings")
            return max(ratio, 1.0)
        rope.missing("factor", f"rope_type={kind} needs it")
        return 1.0
    factor = rope.number("factor", default=1.0)
    if factor < 1:
        rope.refuse("factor", "must be a positive number, at least 1")
    return factor


def _llama3(fields: Fields, rope: Fields) -> Llama3Rope:
    """Return the wavelengths that are stretched; config.json must state both limits."""
    for key in LLAMA3_KEYS[:2]:
        if rope.get(key) is None:
            rope.missing(key, "rope_type=llama3 needs it")
    low, high = (rope.number(key, default=default) for key, default in zip(LLAMA3_KEYS, (1.0, 4.0), strict=False))
    if high <= low:
        rope.refuse("high_freq_factor", f"must be above low_freq_factor={low:g}")
    length = rope.size("original_max_position_embeddings", default=fields.size("max_position_embeddings"))
    return Llama3Rope(low, high, length)


def _yarn(fields: Fields, rope: Fields, factor: float, *, latent: bool) -> Yarn:
    """Return the settings of yarn; `latent`: the model has latent attention."""
    mscale, all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    truncate = rope.boolean("truncate", default=True)
    if latent and not truncate:
        rope.refuse("truncate", "Megatron-Core's latent attention always truncates")
    if latent and all_dim and not mscale:
        rope.refuse("mscale_all_dim", "Megatron-Core needs mscale too")
    computed = attention_factor(factor, mscale, all_dim)
    stated = rope.optional_number("attention_factor")
    if stated is not None and not math.isclose(stated, computed, rel_tol=1e-6):
        rope.refuse("attention_factor", f"Megatron-Core computes {computed:.7g} from factor and mscale; remove the key")
    return Yarn(
        original_max_position_embeddings=rope.size(
            "original_max_position_embeddings", default=fields.size("max_position_embeddings")
        ),
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=mscale,
        mscale_all_dim=all_dim,
        truncate=truncate,
    )


def attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor of sines and cosines under yarn, as transformers computes it."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
