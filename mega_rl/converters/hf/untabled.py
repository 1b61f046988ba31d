"""Models without a table: causal language models that transformers builds, for `engine.backend=fsdp`.

The class, built without memory, names its tensors. How a checkpoint spells them is read off transformers' own
conversion, run over row numbers in the place of weights. Imports torch and transformers, which takes seconds: only a
model that no table knows pays for it.
"""

from __future__ import annotations

import inspect
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mega_rl.converters.architecture import DiskTensor, HFConfig, OwnTable, Rope
from mega_rl.converters.families.fields import MOST_LAYERS
from mega_rl.converters.hf.config import text_config
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.errors import UserError

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # missing in transformers' list
UNLIMITED_POSITIONS = 1 << 30  # positions, where a config states none
# Errors of foreign code on a config or input that it does not expect.
FOREIGN = (
    TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError, ArithmeticError, ImportError,
    StrictDataclassError,
)  # fmt: skip


def read_untabled(raw: Mapping[str, Any], where: str) -> HFConfig:
    """Return the language model of a decoded config.json, with its class's table.

    Raises UserError: transformers cannot build a causal language model from it.
    """
    described = text_config(raw)
    config = _read_config(described, where)
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's head_dim, from transformers 5.24
    heads = _number(config, "num_attention_heads", 1)
    return HFConfig(
        family=config.model_type,
        num_layers=min(_number(config, "num_hidden_layers", 1), MOST_LAYERS),
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", config.hidden_size // heads),
        ffn_hidden_size=_number(config, "intermediate_size", 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        max_position_embeddings=_number(config, "max_position_embeddings", UNLIMITED_POSITIONS),
        norm_eps=1e-6,
        tied=getattr(config, "tie_word_embeddings", False),
        qkv_bias=False,
        linear_bias=False,
        qk_norm=False,
        rope=Rope("default", 1e4),
        initializer_range=getattr(config, "initializer_range", None) or 0.02,
        dtype=None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        own=_table_of_text(json.dumps(described, sort_keys=True), where),
        raw=dict(described),
        wrapper=None if described is raw else dict(raw),
    )


def _read_config(raw: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """Return transformers' config. Raises UserError: it has no causal language model for it."""
    name, release = raw.get("model_type"), f"transformers {__version__}"

    def refused(why: str) -> UserError:
        return UserError(f"{where}: model_type={json.dumps(name)}: {why}; take a model that engine.backend=fsdp trains")

    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        code = "; code that comes with a checkpoint (auto_map) is never run" if raw.get("auto_map") else ""
        raise refused(f"{release} has no such model{code}")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise refused(f"{release} has no class with a language-model head for it")
    if raw.get("quantization_config"):
        raise refused("quantization_config: quantised weights can be trained only by families with a table")
    try:
        config = config_of(raw)
    except FOREIGN as error:
        raise refused(f"{release} cannot read it: {' '.join(str(error).split())}") from error
    if config.is_encoder_decoder:
        raise refused("is_encoder_decoder=true: only decoder-only models are supported")
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        raise refused("it is a model of images and text; save its language model on its own")
    return config


def config_of(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """Return transformers' config of a decoded config.json, which spells infinity as an object."""
    kind = CONFIG_MAPPING[raw["model_type"]]
    return kind.from_dict(kind._decode_special_floats(dict(raw)))


def _number(config: PreTrainedConfig, name: str, default: int) -> int:
    """Return a size of the config, or the default where it states none or several."""
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else default


@lru_cache(maxsize=16)
def _table_of_text(text: str, where: str) -> OwnTable:
    config = _read_config(json.loads(text), where)
    try:
        return table_of(build_empty(config))
    except FOREIGN as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: transformers cannot build model_type={config.model_type}: {why}") from error


def build_empty(config: PreTrainedConfig, *, attention: str | None = None) -> PreTrainedModel:
    """Return transformers' causal model of a config in evaluation mode, without memory, float32.

    attention: name of its attention function; None: its default.
    """
    with no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()
    return model.eval()


def accepted(model: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return arguments if takes_any else {name: value for name, value in arguments.items() if name in parameters}


def table_of(model: PreTrainedModel) -> OwnTable:
    """Return the tensors of a model and how a checkpoint spells them.

    Raises ValueError: a tensor on disk is not whole rows, in order, of one in memory.
    """
    whole = {name for name, _ in model.named_parameters()}
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name in whole or not isinstance(tensor, torch.nn.Parameter)
    }
    if scalars := [name for name, tensor in model.named_parameters() if not tensor.dim()]:
        raise ValueError(f"{scalars[0]} has no dimension, and FSDP2 cuts the first one")
    first, numbered = 0, {}
    places: dict[int, str] = {}  # tensor by the number of its first row
    for name, tensor in state.items():
        places[first] = name
        numbered[name] = _row_numbers(tensor, first)
        first += matrix_shape(tuple(tensor.shape))[0]
    by_tensor: dict[str, list[DiskTensor]] = {name: [] for name in state}
    starts = list(places)
    for name, numbers in revert_weight_conversion(model, numbered).items():
        low = _consecutive(name, numbers)
        start = starts[bisect_right(starts, low) - 1]
        by_tensor[places[start]].append(DiskTensor(name, tuple(numbers.shape), low - start))
    for name, disk in by_tensor.items():
        rows = matrix_shape(tuple(state[name].shape))[0]
        if sum(tensor.rows for tensor in disk) != rows:
            raise ValueError(f"transformers' conversion spells only a part of {name}")
    return OwnTable(
        tensors=tuple((name, tuple(sorted(disk, key=lambda t: t.row))) for name, disk in by_tensor.items()),
        body=model.base_model_prefix,
        tied=tuple(sorted(set(model.state_dict()) - set(state))),
        unread=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        float32=_kept_in_float32(model, state),
    )


def _row_numbers(tensor: Tensor, first: int) -> Tensor:
    """Return int64 like `tensor`, in each element the number of its row; columns take no memory."""
    rows, shape = torch.arange(first, first + matrix_shape(tuple(tensor.shape))[0]), tensor.shape
    return rows.view(shape) if len(shape) < 2 else rows.view(*shape[:-1], 1).expand(shape)


def _consecutive(name: str, numbers: Tensor) -> int:
    """Return the number of a disk tensor's first row. Raises ValueError: rows out of order."""
    columns = numbers.reshape(-1, 1) if numbers.dim() < 2 else numbers.flatten(0, -2)
    rows = columns[:, 0]
    low = int(rows[0])
    whole = columns.stride(1) == 0 or bool((columns == rows[:, None]).all())  # a row's elements are one in memory
    if not whole or not torch.equal(rows, torch.arange(low, low + len(rows))):
        raise ValueError(f"a checkpoint holds {name} in another order than transformers' model")
    return low


def _kept_in_float32(model: PreTrainedModel, names: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the tensors that are float32 in a model of any dtype."""
    patterns = "|".join({*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())})
    return tuple(name for name in names if patterns and re.search(rf"(^|\.)({patterns})($|\.)", name))
