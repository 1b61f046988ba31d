"""Write a shrunk twin of a checkpoint: a few layers, experts and rows of the vocabulary.

The twin has every kind of layer that the model has, the first and the last among them, and every setting of its
config, so what is wrong with the conversion of a large model shows on a laptop. A twin with random weights needs a
config.json only, and may be narrowed besides: its widths are halved until the model is small.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig, Moe
from mega_rl.converters.families.rules import DISK_LAYER
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.live.load import repeat_faults
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError, UserErrors

MAX_LAYERS, MAX_VOCAB = 4, 4096
# Widths of a narrowed twin: halved until they are at most this. Numbers of heads and experts stay what they are.
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
    """Return a small twin of a model: at most `MAX_LAYERS` layers, `MAX_VOCAB` tokens, and few experts.

    `multiple`: the number of layers must be one of it, and be above `MAX_LAYERS` where that takes more. `narrow` halves
    widths too, as only a twin with random weights may.

    Raises UserError when the fields that say which layer is of which kind cannot be cut down to the chosen layers, or
    the model has too few.
    """
    layers = _layers(hf, multiple, where)
    raw = dict(hf.raw)
    for name in ("quantization_config", "auto_map", "num_nextn_predict_layers"):
        raw.pop(name, None)
    raw["num_hidden_layers"] = len(layers)
    raw["vocab_size"] = min(hf.vocab_size, MAX_VOCAB)
    raw |= dict.fromkeys(("bos_token_id", "eos_token_id"), None)
    if isinstance(raw.get("pad_token_id"), int):  # a row that transformers never trains
        raw["pad_token_id"] %= raw["vocab_size"]
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(raw.get(name), list):
            raw[name] = [raw[name][layer] for layer in layers]
    if hf.window is not None and len(set(hf.window.layers)) > 1:
        kinds = {True: "sliding_attention", False: "full_attention"}
        raw["layer_types"] = [kinds[hf.window.layers[layer]] for layer in layers]
    if hf.moe is not None:
        _shrink_experts(raw, hf.moe, layers)
    if narrow:
        _narrow(raw, hf)
    twin = Twin(raw, parse_hf_config(raw, where=f"{where} of the shrunk twin"), layers)
    if not _same_kinds(hf, twin):
        raise UserError(f"{where}: its layers cannot be cut down to {list(layers)}; leave --logits or --twin out")
    return twin


def write_twin(source: Path, target: Path, *, multiple: int = 1, weights: Mapping[str, Tensor] | None = None) -> Twin:
    """Write a checkpoint's twin to `target`, with its own weights or the given ones."""
    with CheckpointReader(source) as reader:
        original = as_on_disk(read_hf_config(source), {name: info.shape for name, info in reader.tensors.items()})
        if faults := repeat_faults(reader, original, "lm"):
            raise UserErrors([f"{source}: {fault}" for fault in faults])
        twin = shrink(original, where=str(source / "config.json"), multiple=multiple)
        spelled = as_on_disk(twin.hf, {name: (0,) for name in reader.tensors})
        _write(twin, target, _tensors(reader, twin, spelled, weights))
    return twin


def write_random_twin(source: Path, target: Path, *, multiple: int = 1, narrow: bool = False, seed: int = 0) -> Twin:
    """Write a twin with random weights of the model that `source`/config.json describes to `target`."""
    twin = shrink(read_hf_config(source), where=str(source / "config.json"), multiple=multiple, narrow=narrow)
    _write(twin, target, random_tensors(twin.hf, seed=seed))
    return twin


def _write(twin: Twin, target: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    config = target.with_name(f"{target.name}.config.json")
    config.write_text(json.dumps(twin.raw, indent=2))
    write_checkpoint(target, tensors, files={"config.json": config})
    config.unlink()


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


def num_elements(hf: HFConfig) -> int:
    """Return the number of elements of all weights."""
    return sum(prod(tensor.shape) for tensor in hf_tensors(hf, head="lm").values())


def _tensors(
    reader: CheckpointReader, twin: Twin, spelled: HFConfig, weights: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the twin's tensors: leading rows of the chosen layers of the original."""
    prefixes = {DISK_LAYER.format(layer=i): DISK_LAYER.format(layer=layer) for i, layer in enumerate(twin.layers)}
    for name, tensor in hf_tensors(spelled, head="lm").items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        there = prefixes.get(prefix, "") + name.removeprefix(prefix)
        if there not in (reader.tensors if weights is None else weights):
            raise UserError(f"{reader.path}: {there} is missing; run verify without --logits for the whole list")
        numel, width = prod(tensor.shape), tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if weights is None:
            yield name, reader.read_rows(there, 0, numel // width).view(tensor.shape)
        else:
            yield name, weights[there].reshape(-1, width)[: numel // width].reshape(tensor.shape)


def _layers(hf: HFConfig, multiple: int, where: str) -> tuple[int, ...]:
    """Return the first, the last and each kind's first layer, and more up to a `multiple`."""
    kinds: dict[tuple[bool, bool], int] = {}
    for layer in range(hf.num_layers):
        windowed = hf.window is not None and hf.window.layers[layer]
        kinds.setdefault((hf.is_moe(layer), windowed), layer)
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
    """Halve widths; widths that are cut with the heads stay multiples of their number."""
    for name, limit in NARROW.items():
        if raw.get(name):
            raw[name] = _halved(raw[name], limit)
    head = _halved(hf.head_dim, NARROW_HEAD)
    if hf.mla is not None:
        raw["hidden_size"] = _halved(hf.hidden_size, NARROW_HIDDEN)
        raw.pop("head_dim", None)
    elif raw.get("head_dim") or hf.head_dim * hf.num_heads != hf.hidden_size:
        raw |= {"hidden_size": _halved(hf.hidden_size, NARROW_HIDDEN), "head_dim": head}
    else:
        raw["hidden_size"] = hf.num_heads * head


def _halved(size: int, limit: int) -> int:
    """Return `size` halved until it is at most `limit`, or odd."""
    while size > limit and size % 2 == 0:
        size //= 2
    return size


def _shrink_experts(raw: dict[str, Any], moe: Moe, layers: tuple[int, ...]) -> None:
    """Reduce the number of experts, keep their groups, and renumber the layers that have them."""
    groups = moe.num_groups or 1
    needed = max(2 * moe.top_k, 8) if groups == 1 else groups * max(2, -(-moe.top_k // (moe.topk_groups or 1)))
    experts = min(moe.num_experts, -(-needed // groups) * groups)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in raw:
            raw[name] = experts
    dense = [i for i, layer in enumerate(layers) if not moe.layers[layer]]
    if "first_k_dense_replace" in raw:
        raw["first_k_dense_replace"] = len(dense)
    if "decoder_sparse_step" in raw or "mlp_only_layers" in raw:
        raw |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _same_kinds(hf: HFConfig, twin: Twin) -> bool:
    """Return whether each chosen layer has the same kind in the twin and the model."""
    small = twin.hf
    same_mlp = all(small.is_moe(i) == hf.is_moe(layer) for i, layer in enumerate(twin.layers))
    of_twin = [small.window is not None and small.window.layers[i] for i in range(small.num_layers)]
    of_model = [hf.window is not None and hf.window.layers[layer] for layer in twin.layers]
    return same_mlp and of_twin == of_model
