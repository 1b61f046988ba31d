"""mega_rl.json: what a folder of converted weights says about itself, strictly checked when read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import DTYPES
from mega_rl.converters.plan.parameters import VALUE_HEADS
from mega_rl.converters.plan.sharding import Head, Sharding, Spec, check_layout
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.storage.strict_json import parse_object

MANIFEST_FILE = "mega_rl.json"
HF_FOLDER = "hf"  # config.json, tokenizer and templates of the source, byte for byte
VERSION = 1
MAX_BYTES = 64 << 20  # absent tensors are listed by name
MAX_RANKS = 1 << 20

Kind = Literal["ranks", "torch_dist"]
Mtp = Literal["drop", "load"]


@dataclass(frozen=True)
class ConversionManifest:
    """Content and layout of a converted checkpoint; a distributed checkpoint has the layout of one rank."""

    kind: Kind
    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    pipeline: tuple[int, ...] | None  # layers of every stage; None: even
    spec: Spec
    head: Head
    mtp: Mtp
    padded_vocab: int
    dtype: str | None  # that all weights were cast to; None: each tensor has its own
    fused_experts: bool  # one tensor of all experts per layer in the source
    value_head: str  # its name in the source
    absent: tuple[str, ...] = ()  # canonical parameters that the source had nothing for
    version: int = VERSION

    def sharding(self, hf: HFConfig) -> Sharding:
        """Return the model and how it is cut, as plans take it."""
        hf = replace(hf, mtp=self.mtp, fused_experts=self.fused_experts, value_head=self.value_head)
        return Sharding(hf, self.layout, spec=self.spec, head=self.head, padded_vocab=self.padded_vocab)

    @property
    def layout(self) -> ParallelLayout:
        """The layout, on as many ranks as it takes to hold everything once."""
        return storage_layout(self.tp, self.pp, self.vpp, self.ep, self.etp, self.pipeline)


def storage_layout(tp: int, pp: int, vpp: int, ep: int, etp: int, pipeline: tuple[int, ...] | None) -> ParallelLayout:
    """A layout of these sizes, on as many ranks as every combination of them needs."""
    world_size = tp * pp * ep * etp
    return ParallelLayout(world_size=world_size, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, pipeline=pipeline)


def manifest_of(kind: Kind, sharding: Sharding, *, dtype: str | None, absent: tuple[str, ...]) -> ConversionManifest:
    """The manifest of a model that is stored with this sharding."""
    hf, layout = sharding.hf, sharding.layout
    return ConversionManifest(
        kind=kind,
        **{size: getattr(layout, size) for size in ("tp", "pp", "vpp", "ep", "etp", "pipeline")},
        spec=sharding.spec,
        head=sharding.head,
        mtp=hf.mtp,
        padded_vocab=sharding.vocab,
        dtype=dtype,
        fused_experts=hf.fused_experts,
        value_head=hf.value_head,
        absent=absent,
    )


def write_manifest(folder: Path, manifest: ConversionManifest) -> None:
    """Writes `folder`/mega_rl.json."""
    with (folder / MANIFEST_FILE).open("x", encoding="utf-8") as file:
        file.write(json.dumps(asdict(manifest), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> ConversionManifest:
    """The manifest of a folder. Raises UserError or UserErrors naming every field that is missing or wrong."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: more than {MAX_BYTES} bytes; this is no manifest of a conversion")
        raw = parse_object(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); convert the checkpoint again") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}; convert the checkpoint again") from error
    return parse_manifest(raw, where=str(path))


def parse_manifest(raw: Any, *, where: str = MANIFEST_FILE) -> ConversionManifest:
    """A manifest from decoded JSON; errors as in `read_manifest`, prefixed with `where`."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: holds a JSON {type(raw).__name__}, must be an object; convert the checkpoint again")
    version = raw.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UserError(f"{where}: version={version!r}, this program reads {VERSION}; convert the checkpoint again")
    known = {field.name for field in fields(ConversionManifest)}
    problems = [f"{where}: {name} is missing; convert the checkpoint again" for name in sorted(known - set(raw))]
    problems += [f"{where}: {name!r} is unknown; convert the checkpoint again" for name in sorted(set(raw) - known)]
    problems += [
        f"{where}: {name}={raw[name]!r} {rule}; convert the checkpoint again"
        for name, rule in _RULES.items()
        if name in raw and not _VALID[name](raw[name])
    ]
    if problems:
        raise UserErrors(problems)
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    manifest = ConversionManifest(**values)
    _check_sizes(manifest, where)
    return manifest


def check_fits(manifest: ConversionManifest, hf: HFConfig, where: str) -> None:
    """Raises UserErrors when the model of config.json cannot be stored as the manifest says."""
    problems = check_layout(hf, manifest.layout, padded_vocab=manifest.padded_vocab)
    if problems:
        raise UserErrors([f"{where}: {problem}, says config.json" for problem in problems])


def _check_sizes(manifest: ConversionManifest, where: str) -> None:
    stages = manifest.pp * manifest.vpp
    if manifest.tp * manifest.pp * manifest.ep * manifest.etp > MAX_RANKS or stages > MAX_RANKS:
        raise UserError(f"{where}: tp, pp, vpp, ep and etp make more than {MAX_RANKS} parts")
    try:
        layout = manifest.layout
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if manifest.kind == "torch_dist" and layout != ParallelLayout():
        raise UserError(f"{where}: kind=torch_dist must have tp=pp=vpp=ep=etp=1 and no pipeline")


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_one_of(*values: object) -> Any:
    return lambda value: isinstance(value, str | bool | None) and value in values and type(value) in map(type, values)


def _is_pipeline(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(_is_size(v, 0) for v in value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


_SIZE = "must be a whole number of at least 1"
_RULES: Mapping[str, str] = {
    "kind": "must be ranks or torch_dist",
    **dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "padded_vocab"), _SIZE),
    "pipeline": "must be null or a list of numbers of layers",
    "spec": "must be local or te",
    "head": "must be lm or value",
    "mtp": "must be drop or load",
    "dtype": f"must be null or one of {', '.join(DTYPES)}",
    "fused_experts": "must be true or false",
    "value_head": f"must be one of {', '.join(VALUE_HEADS)}",
    "absent": "must be a list of names",
}
_VALID: Mapping[str, Any] = {
    "kind": _is_one_of(*get_args(Kind)),
    **dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "padded_vocab"), _is_size),
    "pipeline": _is_pipeline,
    "spec": _is_one_of(*get_args(Spec)),
    "head": _is_one_of(*get_args(Head)),
    "mtp": _is_one_of(*get_args(Mtp)),
    "dtype": _is_one_of(None, *DTYPES),
    "fused_experts": _is_one_of(True, False),
    "value_head": _is_one_of(*VALUE_HEADS),
    "absent": _is_names,
}
