"""A checkpoint's twin of few layers, experts and tokens, and transformers' own model of a folder.

The twin has every kind of layer and every setting of its config, so a wrong conversion of a large model shows on a
laptop.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from mega_rl.converters.architecture import HFConfig, Moe, is_delta_net, is_moe
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.moe import EXPERT_KEYS
from mega_rl.converters.families.rules import DISK_LAYER
from mega_rl.converters.hf import small
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.hf.untabled import FOREIGN
from mega_rl.converters.live.load import model_config, repeat_faults
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors
from mega_rl.converters.safetensors.header import PLAIN_NAMES, name_prefixes, renamed
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError, UserErrors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_LAYERS, MAX_VOCAB = 4, 4096
MAX_CHOSEN = 16  # tokens that an indexer chooses: fewer than there are, or the choice would not matter
# Widths of a narrowed twin, at most. Numbers of heads and experts stay what they are.
NARROW = {
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
NARROW_HIDDEN, NARROW_HEAD = 512, 32


@dataclass(frozen=True)
class Twin:
    """A model's config cut down, and where its layers come from."""

    raw: dict[str, Any]  # config.json
    hf: HFConfig
    layers: tuple[int, ...]  # layer numbers of the original model


def shrink(hf: HFConfig, *, where: str = "config.json", multiple: int = 1, narrow: bool = False) -> Twin:
    """Return a small twin of a model: about `MAX_LAYERS` layers, `MAX_VOCAB` tokens, and few experts.

    multiple: divides the number of layers. narrow: cut widths too. Raises UserError for layers that cannot be chosen.
    """
    layers = _layers(hf, multiple, where)
    raw = dict(hf.raw)
    for name in ("quantization_config", "auto_map", "num_nextn_predict_layers", "full_attention_interval"):
        raw.pop(name, None)
    raw["num_hidden_layers"] = len(layers)
    raw["vocab_size"] = min(hf.vocab_size, MAX_VOCAB)
    raw |= dict.fromkeys(("bos_token_id", "eos_token_id"), None)
    if isinstance(raw.get("pad_token_id"), int):  # a row that transformers never trains
        raw["pad_token_id"] %= raw["vocab_size"]
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(raw.get(name), list):
            raw[name] = [raw[name][layer] for layer in layers]
    mixed = hf.window if hf.window is not None and len(set(hf.window.layers)) > 1 else None
    for kind, special in (("linear_attention", hf.delta), ("sliding_attention", mixed)):
        if special is not None:
            raw["layer_types"] = [kind if special.layers[layer] else "full_attention" for layer in layers]
    if "no_rope_layers" in FAMILIES[hf.family].defaults:
        raw["no_rope_layers"] = [int(not hf.unrotated[layer]) for layer in layers]
    if hf.moe is not None:
        _shrink_experts(raw, hf.moe, layers, FAMILIES[hf.family].defaults)
    if hf.mla is not None and hf.mla.indexer is not None:
        raw["index_topk"] = min(hf.mla.indexer.top_k, MAX_CHOSEN)
    if narrow:
        _narrow(raw, hf)
    twin = Twin(raw, parse_hf_config(raw, where=f"{where} of the shrunk twin"), layers)
    if [_kind(hf, layer) for layer in layers] != [_kind(twin.hf, i) for i in range(len(layers))]:
        raise UserError(f"{where}: its layers cannot be cut down to {list(layers)}; leave --twin out")
    return twin


def write_twin(source: Path, target: Path, *, multiple: int = 1) -> Twin:
    """Write a checkpoint's twin to `target`, with its own weights."""
    with CheckpointReader(source) as reader:
        original = as_on_disk(read_hf_config(source), {name: info.shape for name, info in reader.tensors.items()})
        if faults := repeat_faults(reader, original, "lm"):
            raise UserErrors([f"{source}: {fault}" for fault in faults])
        twin = shrink(original, where=str(source / "config.json"), multiple=multiple)
        spelled = as_on_disk(twin.hf, {name: (0,) for name in reader.tensors})
        _write(twin, target, _tensors(reader, twin, spelled))
    return twin


def write_random_twin(source: Path, target: Path, *, multiple: int = 1, narrow: bool = False, seed: int = 0) -> Twin:
    """Write a twin with random weights of the model that `source`/config.json describes to `target`."""
    twin = shrink(read_hf_config(source), where=str(source / "config.json"), multiple=multiple, narrow=narrow)
    _write(twin, target, random_tensors(twin.hf, seed=seed))
    return twin


def write_small(source: Path, target: Path, *, seed: int = 0) -> int:
    """Write a small random model of the class of `source`/config.json; return its number of elements.

    For models without a table. Raises UserError: transformers cannot build it small.
    """
    config = model_config(source)
    disable_progress_bar()
    try:
        model = small.random_model(small.shrink(config), attention="eager", device=torch.device("cpu"), seed=seed)
        model.save_pretrained(target)
    except FOREIGN as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: model_type={config.model_type} cannot be built small: {why}") from error
    return model.num_parameters()


def _write(twin: Twin, target: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(twin.raw, indent=2))
        write_checkpoint(target, tensors, files={"config.json": config})


def random_tensors(hf: HFConfig, *, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, float32 tensor) of every weight, large enough that each layer changes its input.

    Norms are near 1, biases near 0, neither at its neutral value; a matrix keeps the size of what it multiplies.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, (shape, _, _) in hf_tensors(hf, head="lm").items():
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1 and not name.endswith("bias"):
            yield name, values / shape[-1] ** 0.5
        else:
            neutral = 0.0 if hf.zero_centered_norm or "norm" not in name else 1.0
            yield name, neutral + 0.1 * values


def _tensors(reader: CheckpointReader, twin: Twin, spelled: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the twin's tensors: leading rows of the chosen layers of the original."""
    prefixes = {DISK_LAYER.format(layer=i): DISK_LAYER.format(layer=layer) for i, layer in enumerate(twin.layers)}
    for name, tensor in hf_tensors(spelled, head="lm").items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        there = prefixes.get(prefix, "") + name.removeprefix(prefix)
        if there not in reader.tensors:
            raise UserError(f"{reader.path}: {there} is missing; 'mega-rl convert verify' lists all that are")
        numel, width = prod(tensor.shape), tensor.shape[-1] if len(tensor.shape) > 1 else 1
        yield name, reader.read_block(there, (0, numel // width), (0, width)).view(tensor.shape)


def _layers(hf: HFConfig, multiple: int, where: str) -> tuple[int, ...]:
    """Return the first, the last and each kind's first layer, and more up to a `multiple`."""
    kinds: dict[tuple[bool, ...], int] = {}
    for layer in range(hf.num_layers):
        kinds.setdefault(_kind(hf, layer), layer)
    chosen = {0, hf.num_layers - 1, *list(kinds.values())[: MAX_LAYERS - 1]}
    num_layers = -(-len(chosen) // multiple) * multiple
    if num_layers > hf.num_layers:
        raise UserError(
            f"{where}: a twin that {multiple} pipeline stages split evenly needs {num_layers} layers, "
            f"num_hidden_layers={hf.num_layers}; ask for fewer stages"
        )
    while len(chosen) < num_layers:  # from the middle of the widest gap
        inside = sorted(chosen)
        low, high = max(pairwise(inside), key=lambda gap: gap[1] - gap[0])
        chosen.add((low + high + 1) // 2)
    return tuple(sorted(chosen))


def _narrow(raw: dict[str, Any], hf: HFConfig) -> None:
    """Cut widths; those that are cut with the heads stay multiples of their number."""
    for name, limit in NARROW.items():
        if raw.get(name):
            raw[name] = min(raw[name], limit)
    head = min(hf.head_dim, NARROW_HEAD)
    if raw.get("rotary_dim"):
        raw["rotary_dim"] = raw["rotary_dim"] * head // hf.head_dim
    if hf.mla is not None:
        raw["hidden_size"] = min(hf.hidden_size, NARROW_HIDDEN)
        raw.pop("head_dim", None)
    elif raw.get("head_dim") or hf.head_dim * hf.num_heads != hf.hidden_size:
        raw |= {"hidden_size": min(hf.hidden_size, NARROW_HIDDEN), "head_dim": head}
    else:
        raw["hidden_size"] = hf.num_heads * head


def _shrink_experts(raw: dict[str, Any], moe: Moe, layers: tuple[int, ...], defaults: Mapping[str, object]) -> None:
    """Reduce the number of experts, keep their groups, and renumber the layers that have them."""
    groups = moe.num_groups or 1
    needed = max(2 * moe.top_k, 8) if groups == 1 else groups * max(2, -(-moe.top_k // (moe.topk_groups or 1)))
    experts = min(moe.num_experts, -(-needed // groups) * groups)
    for name in EXPERT_KEYS:
        if name in raw or name in defaults:
            raw[name] = experts
    dense = [i for i, layer in enumerate(layers) if not moe.layers[layer]]
    if "first_k_dense_replace" in raw:
        raw["first_k_dense_replace"] = len(dense)
    if "moe_layer_end_index" in raw:
        raw |= {"moe_layer_start_index": len(dense), "moe_layer_end_index": len(layers) - 1}
    if "decoder_sparse_step" in raw or "mlp_only_layers" in raw:
        raw |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _kind(hf: HFConfig, layer: int) -> tuple[bool, ...]:
    """Return whether a layer has experts, has a window, does not rotate, is a delta net."""
    windowed = hf.window is not None and hf.window.layers[layer]
    unrotated = bool(hf.unrotated) and hf.unrotated[layer]
    return is_moe(hf, layer), windowed, unrotated, is_delta_net(hf, layer)


def as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model by name on disk, as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    prefixes = name_prefixes(saved)
    return {renamed(name, prefixes, PLAIN_NAMES): tensor for name, tensor in saved.items()}


def load_transformers(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder, on the CPU; no weight of it is random."""
    from transformers import AutoModelForCausalLM

    answer: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=model_config(Path(path)),
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = answer
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{path}: transformers does not find {len(missing)} weights of its model ({missing[0]}, ...)")
    loaded: PreTrainedModel = model.eval()
    return loaded
