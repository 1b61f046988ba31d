"""Reads config.json of a Hugging Face checkpoint: plain JSON in, `HFConfig` out, no code of the checkpoint is run.

Accepts the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`,
`dtype`). What Megatron-Core cannot reproduce exactly is refused by field, value and reason, never guessed. Imports
neither torch nor transformers: the command line answers through it at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig, Rope
from mega_rl.converters.families import FAMILIES, Family
from mega_rl.errors import UserError, UserErrors

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Megatron-Core's llama3 RoPE takes only `factor` from outside; these three are constants of its code
# (megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling).
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_hf_config(path: str | Path) -> HFConfig:
    """The architecture described by `path`/config.json.

    Raises UserError when the directory or file is missing or is not JSON, UserErrors listing every field that is
    missing, malformed or not supported.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"checkpoint {directory}: no such directory; give a Hugging Face checkpoint directory")
    raw = _read_json(directory / "config.json", required=True)
    generation = _read_json(directory / "generation_config.json", required=False)
    return parse_hf_config(raw, generation=generation, where=str(directory / "config.json"))


def parse_hf_config(
    raw: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> HFConfig:
    """The architecture described by a decoded config.json; errors as in `read_hf_config`, prefixed with `where`."""
    family = _family(raw, where)
    fields = _Fields(raw, where)
    _refuse_unsupported(fields, family)
    bias = {name: fields.boolean(name, default=False) for name in family.bias_fields}
    if len(set(bias.values())) > 1 or bias == {"attention_bias": True}:
        fields.refuse("attention_bias", "Megatron-Core has linear biases everywhere or nowhere, mlp_bias must be equal")
    linear_bias = any(bias.values())
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads={heads}")
    default_head_dim = hidden // heads if family.head_dim is None or raw.get("head_dim", 0) is None else family.head_dim
    config = HFConfig(
        family=family.model_type,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", default=default_head_dim),
        ffn_hidden_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tied=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=family.qkv_bias or linear_bias,
        linear_bias=linear_bias,
        qk_norm=family.qk_norm,
        rope=_rope(fields),
        initializer_range=fields.number("initializer_range", default=0.02),
        eos_token_ids=_token_ids(fields, generation or {}),
        pad_token_id=_pad_token_id(fields),
        dtype=_dtype(fields),
        raw=dict(raw),
    )
    if config.head_dim % 2:
        fields.refuse("head_dim", "rotary embedding needs an even number", value=config.head_dim)
    if fields.problems:
        raise UserErrors(fields.problems)
    return config


class _Fields:
    """Typed access to config.json that collects every problem instead of stopping at the first."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where, self.problems = raw, where, list[str]()

    def refuse(self, name: str, reason: str, *, value: Any = None) -> None:
        shown = self.raw.get(name) if value is None else value
        self.problems.append(f"{self.where}: {name}={json.dumps(shown, default=str)}: {reason}")

    def size(self, name: str, *, default: int | None = None) -> int:
        """A positive integer; None and absent take the default. 1 stands in after a problem."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{self.where}: {name} is missing; it must be a positive integer")
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, "must be a positive integer")
            return 1
        return value

    def number(self, name: str, *, default: float) -> float:
        """A positive number."""
        value = self.raw.get(name)
        return default if value is None else self.positive(name, value)

    def positive(self, name: str, value: Any) -> float:
        """`value` when it is a positive number; 1.0 after a problem."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.refuse(name, "must be a positive number", value=value)
            return 1.0
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value if isinstance(value, bool) else default


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """The object in a JSON file; an empty one when an optional file is absent."""
    if not path.is_file():
        if required:
            raise UserError(f"{path}: no such file; a Hugging Face checkpoint directory has a config.json")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file from the model's source again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, must be an object")
    return value


def _family(raw: Mapping[str, Any], where: str) -> Family:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        hint = "; code that comes with a checkpoint (auto_map) is never run" if raw.get("auto_map") else ""
        supported = ", ".join(sorted(FAMILIES)) + hint
        raise UserError(f"{where}: model_type={json.dumps(model_type)} is not supported; supported are {supported}")
    return family


def _refuse_unsupported(fields: _Fields, family: Family) -> None:
    """Collects everything that would make the model compute something else than its Hugging Face code."""
    raw = fields.raw
    if raw.get("auto_map"):
        stock = f"the stock {family.model_type} architecture"
        fields.refuse("auto_map", f"code from a checkpoint is never run; remove the key if the weights fit {stock}")
    if raw.get("quantization_config"):
        fields.refuse("quantization_config", "quantised weights cannot be trained; use the unquantised checkpoint")
    if raw.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", 'only "silu" is supported')
    if raw.get("is_encoder_decoder"):
        fields.refuse("is_encoder_decoder", "only decoder-only models are supported")
    if family.sliding_window:
        _refuse_sliding_window(fields)


def _refuse_sliding_window(fields: _Fields) -> None:
    """A window is used only when use_sliding_window is set and some layer lies in its range."""
    raw = fields.raw
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return
    layer_types = raw.get("layer_types")
    layers, first = raw.get("num_hidden_layers"), raw.get("max_window_layers", 28)
    if isinstance(layer_types, list):
        used = any(kind != "full_attention" for kind in layer_types)
    else:
        used = not (isinstance(first, int) and isinstance(layers, int)) or first < layers
    if used:
        fix = "set use_sliding_window to false if sequences stay shorter than the window"
        fields.refuse("sliding_window", f"sliding-window attention is not supported; {fix}")


def _rope(fields: _Fields) -> Rope:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    raw = fields.raw
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    given = raw.get(name)
    if given is not None and not isinstance(given, dict):
        fields.refuse(name, "must be an object")
        given = None
    scaling: dict[str, Any] = given or {}
    # One spelling may hold the base and the other the scaling; where both hold one, the newer wins as in transformers.
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else fields.positive("rope_theta", theta)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        fields.refuse("partial_rotary_factor", "this family rotates every dimension", value=partial)
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if kind == "default":
        return Rope("default", theta)
    if kind not in ("linear", "llama3"):
        fix = "set it to default if sequences stay within the original context"
        fields.refuse(f"{name}.rope_type", f"only default, linear and llama3 are reproduced exactly; {fix}", value=kind)
        return Rope("default", theta)
    if scaling.get("factor") is None:
        fields.refuse(f"{name}.factor", f"missing; rope_type={kind} needs it", value="absent")
        return Rope("default", theta)
    factor = fields.positive(f"{name}.factor", scaling["factor"])
    if kind == "linear":
        return Rope("linear", theta, factor)
    for key, expected in LLAMA3_CONSTANTS.items():
        if scaling.get(key) != expected:
            reason = f"Megatron-Core's llama3 scaling has {expected:g} built in"
            fields.refuse(f"{name}.{key}", reason, value=scaling.get(key, "absent"))
    return Rope("llama3", theta, factor)


def _token_ids(fields: _Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a response; what generation uses comes first, as in transformers."""
    value = generation.get("eos_token_id")
    value = fields.raw.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        fields.refuse("eos_token_id", "must be a token id or a list of token ids", value=value)
        return ()
    return tuple(ids)


def _pad_token_id(fields: _Fields) -> int | None:
    value = fields.raw.get("pad_token_id")
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    fields.refuse("pad_token_id", "must be a token id or null")
    return None


def _dtype(fields: _Fields) -> str | None:
    """Type of the weights, without the "torch." of older files."""
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in DTYPES:
        fields.refuse(name, f"must be one of {', '.join(DTYPES)}")
        return None
    return str(dtype)
