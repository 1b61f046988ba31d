"""Reader of config.json of a Hugging Face checkpoint: plain JSON in, `HFConfig` out.

Accepts the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`,
`dtype`). What Megatron-Core cannot reproduce exactly is refused by field, value and reason, never guessed, and so is an
unknown key. Imports neither torch nor transformers: the command line answers through it at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from mega_rl.config.values import ModelFacts
from mega_rl.converters.architecture import HFConfig, Quantization
from mega_rl.converters.families import FAMILIES, Family
from mega_rl.converters.families.fields import MOST_LAYERS, Fields
from mega_rl.converters.families.moe import EXPERT_KEYS
from mega_rl.converters.hf.rope import read_rope
from mega_rl.converters.safetensors.header import name_prefixes, tensor_names
from mega_rl.environment import installed_version
from mega_rl.errors import UserError, UserErrors, no_such
from mega_rl.untrusted import parse_object

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_MTP_LAYERS = 64
MTP_KEY = "num_nextn_predict_layers"

# Read by config.py and rope.py.
_READ = """
model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size
vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act hidden_activation rope_parameters
rope_scaling rope_theta initializer_range eos_token_id pad_token_id dtype torch_dtype quantization_config auto_map
is_encoder_decoder partial_rotary_factor
"""

# Training, generation, tokenizer, outputs, bookkeeping of tools: nothing of it changes log-probs of the model in
# evaluation mode, or it is true of every decoder-only language model.
_HARMLESS = """
architectures transformers_version name_or_path tokenizer_class prefix bos_token_id sep_token_id unk_token_id
mask_token_id cls_token_id decoder_start_token_id image_token_id bos_token eos_token pad_token unk_token use_cache
cache_implementation attn_implementation use_flash_attn use_flash_attention use_sdpa flash_attn attention_dropout
hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout classifier_dropout summary_dropout residual_dropout
embedding_dropout ffn_dropout hidden_dropout_prob attention_probs_dropout_prob output_attentions
output_hidden_states return_dict return_dict_in_generate output_scores torchscript use_bfloat16 tf_legacy_loss
pruned_heads tie_encoder_decoder chunk_size_feed_forward is_decoder add_cross_attention cross_attention_hidden_size
finetuning_task id2label label2id num_labels problem_type task_specific_params do_sample temperature top_k top_p
min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences num_beams num_beam_groups diversity_penalty early_stopping max_length min_length max_new_tokens
min_new_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens generation_config router_aux_loss_coef output_router_logits
router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux gradient_checkpointing pretraining_tp ep_size
initializer_factor seq_length model_max_length max_seq_len max_sequence_length max_window_layers unsloth_version
unsloth_fixed unsloth_tokenized_full tokenizer_padding_side base_model_name_or_path neftune_noise_alpha
keys_to_ignore_at_inference trust_remote_code revision commit_hash attention_probs_dropout training_args license
model_name trained_with sft_config chat_template transformers.js_config
"""

PROVED_LAYERS = {"full_attention", "sliding_attention"}
READ, HARMLESS = frozenset(_READ.split()), frozenset(_HARMLESS.split())

# Keys of other families, with the values at which they change nothing.
OFF = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_sliding_window": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "rope_interleave": (False,),
    "use_mrope": (False,),
    "num_nextn_predict_layers": (0,),
}


def read_hf_config(path: str | Path, *, any_model: bool = False) -> HFConfig:
    """Return the architecture that `path`/config.json describes.

    any_model: without a table the model is what transformers builds; only `engine.backend=fsdp` takes it.
    Raises UserError when the directory or file is missing or is not JSON, UserErrors listing every field that is
    missing, malformed, unknown or not supported.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(
            f"checkpoint {directory}: {no_such('directory', directory)}; give a checkpoint directory, or a name on the "
            "Hub as org/name"
        )
    raw, where = _read_json(directory / "config.json"), str(directory / "config.json")
    if any_model and text_config(raw).get("model_type") not in FAMILIES:
        from mega_rl.converters.hf.untabled import read_untabled  # takes seconds

        hf = read_untabled(raw, where)
    else:
        hf = parse_hf_config(raw, where=where)
    return hf if hf.wrapper is None else replace(hf, prefixes=name_prefixes(tensor_names(directory)))


def needs_proof(raw: Mapping[str, Any]) -> bool:
    """Return whether a run first proves packed rows and cached decoding of a model.

    Models of full or windowed attention, of a family with a table, are proved by tests.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES or FAMILIES[model_type].megatron:  # layers of new kinds
        return True
    return bool(set(raw.get("layer_types") or ()) - PROVED_LAYERS)


def parse_hf_config(raw: Mapping[str, Any], *, where: str = "config.json") -> HFConfig:
    """Return the architecture of a decoded config.json; errors as in `read_hf_config`, prefixed with `where`."""
    described = text_config(raw)
    family = _family(described, where)
    fields = Fields(described, where, defaults=family.defaults)
    _refuse_unsupported(fields, family)
    _refuse_unknown(fields, family)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads and not fields.problems:  # a refused size is 1 from here on, which is not the file's
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads={heads}", value=kv_heads)
    num_layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    linear_bias = _linear_bias(fields, family)
    config = HFConfig(
        family=family.model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, family, hidden, heads),
        ffn_hidden_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tied=fields.boolean("tie_word_embeddings", default=family.tied),
        qkv_bias=_switch(fields, family.qkv_bias) or linear_bias,
        linear_bias=linear_bias,
        qk_norm=_switch(fields, family.qk_norm),
        rope=read_rope(fields, family),
        unrotated=family.unrotated(fields, num_layers) if family.unrotated else (),
        mla=family.mla(fields) if family.mla else None,
        moe=family.moe(fields, num_layers) if family.moe else None,
        delta=family.delta(fields, num_layers) if family.delta else None,
        attention_gate=family.attention_gate,
        window=family.window(fields, num_layers) if family.window else None,
        activation=family.activation,
        zero_centered_norm=family.zero_centered_norm,
        qk_norm_joint=family.qk_norm_joint,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        sinks=family.sinks,
        **family.scales(fields),
        mtp_layers=fields.size(MTP_KEY, default=0, least=0, most=MOST_MTP_LAYERS) if _has_mtp(family) else 0,
        quantization=_quantization(fields),
        initializer_range=fields.number("initializer_range", default=0.02),
        dtype=_dtype(fields),
        fused_experts=family.fused_experts,
        raw=dict(described),
        wrapper=None if described is raw else dict(raw),
    )
    if not fields.problems:
        _check_sizes(fields, config)
    if fields.problems:
        raise UserErrors(list(dict.fromkeys(fields.problems)))
    return config


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face checkpoint directory has a config.json")
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {error}; copy the file from the model's source again") from error


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model.

    Families have their own names in it. Positions of three kinds (mrope) are one for text without images.
    """
    text, model_type = raw.get("text_config"), raw.get("model_type")
    if not isinstance(text, dict):
        if not any(model_type in family.in_wrappers for family in FAMILIES.values()):
            return raw
        text = {key: value for key, value in raw.items() if key != "vision_config"}  # older files of Qwen's
    model_type = text.get("model_type", model_type)
    shared = ["eos_token_id", "pad_token_id", "quantization_config", "is_encoder_decoder"]
    if "dtype" not in text and "torch_dtype" not in text:
        shared += ["dtype", "torch_dtype"]
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}  # transformers asks the whole model's
    text = {**{key: raw[key] for key in shared if key in raw}, **text, **tied}
    for family in FAMILIES.values():
        if model_type in family.in_wrappers:
            model_type = family.model_type
    for name in [name for name in text if name.startswith(("image_", "video_", "vision_")) or name == "auto_map"]:
        del text[name]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), dict):
            rope = {key: value for key, value in text[name].items() if not key.startswith("mrope_")}
            text[name] = {key: "default" if value == "mrope" else value for key, value in rope.items()}
    return {**text, "model_type": model_type}


def _family(raw: Mapping[str, Any], where: str) -> Family:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    fields = Fields(raw, where)
    hint = "; code that comes with a checkpoint (auto_map) is never run" if raw.get("auto_map") else ""
    fields.refuse(
        "model_type",
        f"no Megatron table; it trains with engine.backend=fsdp if transformers has its class; tables are "
        f"{', '.join(sorted(FAMILIES))}{hint}",
    )
    raise UserError(fields.problems[0])


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Refuse everything that would make the model compute something else than its Hugging Face code."""
    _check_code(fields, family)
    if fields.boolean("is_encoder_decoder"):
        fields.refuse("is_encoder_decoder", "only decoder-only models are supported")
    if family.activation == "gelu_tanh":
        fields.must_be("hidden_activation", ("gelu_pytorch_tanh",), 'only "gelu_pytorch_tanh" is supported')
    else:
        act = {"relu_squared": "relu2", "xielu": "xielu"}.get(family.activation, "silu")
        fields.must_be("hidden_act", (act,), f'only "{act}" is supported')
    for name, (allowed, reason) in family.fixed.items():
        fields.must_be(name, allowed, reason)


def _check_code(fields: Fields, family: Family) -> None:
    """Refuse code from a checkpoint, except code that the family's checkpoints are known to carry."""
    given = fields.object("auto_map")
    for target in given.values():
        # "repository--module.Class", or a list of those for slow and fast tokenizers.
        names = [name for name in (target if isinstance(target, list) else [target]) if name is not None]
        modules = [str(name).rpartition("--")[2].partition(".")[0] for name in names]
        if not all(module in family.hub_code for module in modules):
            stock = f"the stock {family.model_type} architecture"
            fields.refuse("auto_map", f"code from a checkpoint is never run; remove the key if the weights fit {stock}")
            return


def _refuse_unknown(fields: Fields, family: Family) -> None:
    """Refuse unknown keys, which may change what the model computes."""
    known = READ | HARMLESS | family.defaults.keys() | family.fixed.keys()
    known |= {*family.keys, *family.bias_keys}
    known |= {key for key in (family.qkv_bias, family.qk_norm) if isinstance(key, str)}
    if family.moe is not None:
        known |= set(EXPERT_KEYS)
    if _has_mtp(family):
        known |= {MTP_KEY}
    for name, value in fields.raw.items():
        if value is None or name in known or name.startswith("_"):
            continue
        if any(type(value) is type(off) and value == off for off in OFF.get(name, ())):
            continue
        fix = f"remove it if {family.model_type} of transformers does not read it"
        fields.refuse(name, f"not a known key of model_type={family.model_type}; {fix}")


def _linear_bias(fields: Fields, family: Family) -> bool:
    """Return whether linear layers have a bias; Megatron-Core has it everywhere or nowhere."""
    given = {name: fields.boolean(name) for name in family.bias_keys}
    if len(set(given.values())) > 1:
        name, *others = given
        others_are = ", ".join(f"{other}={json.dumps(given[other])}" for other in others)
        fields.refuse(name, f"Megatron-Core has biases on all linear layers or on none, but {others_are}")
    return family.linear_bias or any(given.values())


def _switch(fields: Fields, source: bool | str) -> bool:
    """Return a family's constant, or the value of the key that it names."""
    return source if isinstance(source, bool) else fields.boolean(source, default=bool(fields.defaults.get(source)))


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """Return the size of a head; for latent attention that of the values."""
    if family.mla is not None:
        return fields.size("v_head_dim")
    head_dim = fields.size("head_dim", default=max(hidden // heads, 1))
    if head_dim % 2 and not fields.problems:
        fields.refuse("head_dim", "rotary embedding needs an even number", value=head_dim)
    return head_dim


def _has_mtp(family: Family) -> bool:
    return any(rule.scope == "mtp" for rule in family.rules)


def _check_sizes(fields: Fields, config: HFConfig) -> None:
    """Refuse sizes that do not fit each other."""
    if config.mla is not None and config.mla.qk_rope_head_dim % 2:
        fields.refuse("qk_rope_head_dim", "rotary embedding needs an even number")
    rotated = int(config.head_dim * config.rope.percent)
    if config.rope.percent < 1 and (rotated % 2 or rotated < 2):
        reason = f"of a head's {config.head_dim} dimensions an even number must be rotated, not {rotated}"
        fields.refuse("partial_rotary_factor", reason, value=config.rope.percent)


def _quantization(fields: Fields) -> Quantization | None:
    """Return the kind of quantised weights that the reader decodes; refuse others."""
    given = fields.object("quantization_config")
    if not given:
        return None
    method, block = given.get("quant_method"), given.get("weight_block_size")
    if method == "mxfp4":
        return "mxfp4"
    sizes = block if isinstance(block, list) else []
    if method == "fp8" and (
        block is None or (len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes))
    ):
        return "fp8"
    if method == "compressed-tensors" and given.get("format") == "pack-quantized" and _is_int4(given):
        return "int4"
    reason = (
        "quantised weights may be fp8 (weight_block_size of two sizes, or null), mxfp4, or compressed-tensors' "
        "pack-quantized with symmetric groups of 4 bits; else use the unquantised checkpoint"
    )
    fields.refuse("quantization_config", reason, value={key: given.get(key) for key in ("quant_method", "format")})
    return None


def _is_int4(given: Mapping[str, Any]) -> bool:
    """Return whether all packed weights are symmetric integers of 4 bits, in groups of neighbours."""
    groups = given.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    wanted = {"num_bits": 4, "type": "int", "symmetric": True}
    return bool(schemes) and all(
        isinstance(scheme, dict)
        and all(scheme.get(key) == value for key, value in wanted.items())
        and scheme.get("strategy") in ("group", "channel")
        and not scheme.get("actorder")
        for scheme in schemes
    )


def _dtype(fields: Fields) -> str | None:
    """Return the type of the weights, without the "torch." of older files."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in DTYPES:
        fields.refuse(name, f"must be one of {', '.join(DTYPES)}")
        return None
    return str(dtype)


def release_problems(model_type: str) -> Iterator[str]:
    """Yield why the installed Megatron-Core cannot build a model of this family."""
    needed, installed = FAMILIES[model_type].megatron, installed_version("megatron-core")
    if needed and (installed is None or Version(installed) < Version(needed)):
        yield (
            f"model_type={model_type} needs megatron-core {needed} or newer, which has its layers and wants "
            f"Python 3.12 or newer; installed is {installed}: make the environment with a newer Python, or set "
            "engine.backend=fsdp"
        )


def facts_of(checkpoint: HFConfig) -> ModelFacts:
    """Return the sizes of a checkpoint's model that the rules between settings read."""
    moe = checkpoint.moe
    return ModelFacts(
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        num_kv_heads=checkpoint.num_kv_heads,
        ffn_hidden_size=checkpoint.ffn_hidden_size,
        max_position_embeddings=checkpoint.max_position_embeddings,
        multi_latent_attention=checkpoint.mla is not None,
        delta_key_heads=0 if checkpoint.delta is None else checkpoint.delta.num_key_heads,
        uncut=checkpoint.uncut,
        num_experts=0 if moe is None else moe.num_experts,
        expert_ffn_hidden_size=0 if moe is None else moe.ffn_hidden_size,
        expert_biases=moe is not None and checkpoint.linear_bias,
    )
