"""Reading of weights in a run's checkpoint for the converters, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl.checkpoint.format.reader import Checkpoint as RunCheckpoint
from mega_rl.checkpoint.format.reader import StoredPiece, as_matrix
from mega_rl.config.schema import AdapterConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.copying import ShapeAndDtype
from mega_rl.converters.offline.checkpoint import WeightFiles, open_boxes
from mega_rl.converters.offline.torch_dist import Chunk, DistTensor
from mega_rl.converters.plan.compose import Home
from mega_rl.converters.plan.parameters import adapted, disk_tensors, hf_tensors, row_copies
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader, TensorInfo
from mega_rl.errors import UserError, UserErrors

HEADS: Mapping[str, Head] = {"actor": "lm", "critic": "value", "reference": "lm"}
_FSDP_HEAD = "score.weight"  # transformers' name of the value head


def open_weights(folder: Path, *, role: str, reference: Path) -> WeightFiles:
    """Open a role's weights in one checkpoint of a run; compare all checksums.

    `reference`: folder of the Hugging Face checkpoint that the model came from; its config.json is read.

    Raises UserError: the checkpoint is damaged, has no such model, or the model is not that of `reference`.
    """
    prefix = f"{role}/weights/"
    stored = RunCheckpoint.open(folder)
    manifest = stored.manifest
    pieces = {name.removeprefix(prefix): p for name, p in stored.pieces.items() if name.startswith(prefix)}
    if not pieces:
        roles = ", ".join(sorted(manifest.numbers)) or "none"
        raise UserError(f"{folder}: has no {role}; its models: {roles}")
    stored.verify(piece for of_one in pieces.values() for piece in of_one)
    shapes = {name: manifest.tensors[prefix + name].shape for name in pieces}
    is_fsdp = manifest.identity.get("engine") == "fsdp"
    hf = adapted(read_hf_config(reference, any_model=is_fsdp), _adapter_of(manifest.config), HEADS[role])
    open_engine = _open_fsdp if is_fsdp else _open_megatron
    kind = manifest.config.get("algorithm", {}).get("kind", {})
    head: Head = "value" if role == "actor" and kind.get("name") == "rm" else HEADS[role]
    return open_engine(folder, Sharding(hf, head=head), pieces, shapes)


def _adapter_of(config: Mapping[str, Any]) -> AdapterConfig:
    """Return the settings of a run's adapters; those of a checkpoint without any: none."""
    model = config.get("model")
    given = model.get("adapter", {}) if isinstance(model, dict) else {}
    return AdapterConfig(**{**given, "path": ""})


def _open_megatron(
    folder: Path,
    sharding: Sharding,
    pieces: Mapping[str, Sequence[StoredPiece]],
    shapes: Mapping[str, tuple[int, ...]],
) -> WeightFiles:
    """Open weights under Megatron-Core's names: separate layers, in boxes as in a distributed checkpoint."""
    tensors = {
        key: DistTensor(
            key, of_one[0].dtype, shapes[key], tuple(Chunk(*p.box, p.file, p.offset, p.spec.nbytes) for p in of_one)
        )
        for key, of_one in pieces.items()
        if of_one
    }
    return open_boxes(folder, sharding, tensors, lambda tensor, chunk: chunk.offset)


def _open_fsdp(
    folder: Path,
    sharding: Sharding,
    pieces: Mapping[str, Sequence[StoredPiece]],
    shapes: Mapping[str, tuple[int, ...]],
) -> WeightFiles:
    """Open weights under transformers' names, in rows; the experts of a layer are in two tensors."""
    hf = sharding.hf
    infos: dict[str, TensorInfo] = {}
    homes: dict[str, list[Home]] = {}
    wholes: dict[str, ShapeAndDtype] = {}
    for name, of_one in pieces.items():
        infos |= {piece.spec.key: as_matrix(piece) for piece in of_one}
        for disk in disk_tensors(hf.family, name, shapes[name], hf.own):
            on_disk = hf.value_head if disk.name == _FSDP_HEAD and sharding.head == "value" else disk.name
            wholes[on_disk] = ShapeAndDtype(disk.shape, of_one[0].dtype)
            homes[on_disk] = [Home(p.spec.key, copy) for p in of_one for copy in row_copies([disk], *p.box)]
    _check_shapes(folder, hf, sharding.head, wholes)
    files = CheckpointReader(folder, tensors=infos)
    return WeightFiles(folder, "hf", sharding, wholes, files, homes)


def _check_shapes(folder: Path, hf: HFConfig, head: Head, wholes: Mapping[str, ShapeAndDtype]) -> None:
    """Raise UserErrors for tensors that do not fit the model of config.json."""
    expected = hf_tensors(hf, head=head)
    unknown = sorted(set(wholes) - set(expected))
    problems = [f"{folder}: {name} is not part of the {hf.family} model" for name in unknown]
    for name, tensor in expected.items():
        if name not in wholes and not tensor.optional:
            problems.append(f"{folder}: {name} is missing")
        elif name in wholes and wholes[name].shape != tensor.shape:
            problems.append(f"{folder}: {name} has shape {list(wholes[name].shape)}, expected {list(tensor.shape)}")
    if problems:
        raise UserErrors(problems)
