"""Adapters of a model: as a PEFT folder, and merged into the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.converters.architecture import Adapter
from mega_rl.converters.plan.adapters import CONFIG_FILE, WEIGHT, A, B, adapter_config
from mega_rl.converters.safetensors.header import PLAIN_NAMES, renamed
from mega_rl.converters.safetensors.output_folder import write_json
from mega_rl.converters.safetensors.reader import CheckpointReader, read_header
from mega_rl.converters.safetensors.writer import SafetensorsFile, TensorSpec
from mega_rl.errors import UserError

FOLDER = "adapter"  # holds a PEFT folder, next to merged weights
_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."


def merged(
    weights: Iterable[tuple[str, Tensor]], adapter: Adapter | None, parts: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights W + scale B A of a model.

    weights: as `export_hf` yields them, adapters before their weights. parts: gets every A and B.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name.endswith((A, B)):
            waiting[name] = tensor
            continue
        module = name.removesuffix(WEIGHT)
        own = {end: waiting.pop(module + end) for end in (A, B) if module + end in waiting}
        if adapter is not None and own:
            tensor = add(tensor, own[A], own[B], adapter.scale)
        if parts is not None:
            parts |= {module + end: part for end, part in own.items()}
        yield name, tensor


def add(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `weight` + scale b a, summed in float32."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def add_stored(reader: CheckpointReader, adapter: Adapter | None) -> None:
    """Let the reader of a model's weights also read the PEFT folder that adapters begin from."""
    if adapter is None or not adapter.path:
        return
    for name, info in read_header(Path(adapter.path) / _FILE).items():
        if not name.startswith(_PREFIX) or not name.endswith((A, B)):
            raise UserError(f"{info.file}: {name} is not a tensor of a LoRA adapter of PEFT; save the adapter again")
        reader.tensors[renamed(name.removeprefix(_PREFIX), reader.prefixes, PLAIN_NAMES)] = info


def incomplete(adapter: Adapter | None, absent: Iterable[str]) -> list[str]:
    """Return a line if the PEFT folder of an adapter lacks tensors.

    absent: names of the model's tensors that are in no file.
    """
    parts = sorted(name for name in absent if name.endswith((A, B)))
    if adapter is None or not adapter.path or not parts:
        return []
    what = f"lacks {parts[0]} and {len(parts) - 1} more, or has them in other shapes"
    return [f"model.adapter.path={adapter.path}: {what}; name an adapter of this model"]


def write_adapter(
    folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor], *, base: Path, prefixes: tuple[str, str]
) -> None:
    """Write a PEFT folder. base: the model below. prefixes: how names begin in its checkpoint."""
    folder.mkdir()
    write_json(folder / CONFIG_FILE, adapter_config(adapter, str(base)))
    named = {_PREFIX + renamed(name, PLAIN_NAMES, prefixes): tensor for name, tensor in tensors.items()}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
    with SafetensorsFile(folder / _FILE, specs) as file, torch.no_grad():
        for name, tensor in named.items():
            file.write(name, tensor)
