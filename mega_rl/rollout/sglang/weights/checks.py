"""What a server must be before weights are sent to it.

SGLang 0.5.20 dies of a tensor of another shape and takes one of an unknown name in silence, so the sender has to know.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import UserError, UserErrors
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION
from mega_rl.storage.safetensors_reader import CheckpointReader

# Setting of a server -> the only values with which weights can be sent to it, and what else it would need.
_SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "dp_size": ((1, None), "weights reach one data-parallel replica only; start several servers instead"),
    "pp_size": ((1, None), "weights are sent per tensor-parallel rank; use --tp-size"),
    "quantization": ((None, "", "unquant"), "weights are sent unquantised"),
    "speculative_algorithm": ((None, ""), "the draft model would keep its old weights"),
    "is_embedding": ((False, None), "it has to generate"),
}
# Fields of a config that may differ: they say how a model is stored, trained and ended, not what it computes.
_NOT_COMPARED = frozenset(
    {
        "eos_token_ids",
        "pad_token_id",
        "dtype",
        "fused_experts",
        "value_head",
        "raw",
        "initializer_range",
        "mtp",
        "mtp_layers",
    }
)
_SHORT_DTYPES = {"half": "float16", "float": "float32"}
_NOT_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)


class SentTensor(NamedTuple):
    """One weight as it will be sent."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ExpectedServer:
    """What the trainer will send, and the server that it is for."""

    hf: HFConfig  # of the trainer's model
    sent: tuple[SentTensor, ...]
    dtype: str  # of the server's weights: "float32"
    tp: int | None = None  # of a server that the run started; None: any


def sent_tensors(sharding: Sharding, dtype: torch.dtype) -> tuple[SentTensor, ...]:
    """Every tensor that the trainer sends, in its order; dtype: of all but those that are float32 in every model."""
    return tuple(
        SentTensor(name, shape, torch.float32 if unit.float32 else dtype)
        for unit in export_plan(sharding)
        for name, shape, _ in unit.tensors
    )


def check_server(control: Control, expected: ExpectedServer) -> list[str]:
    """Every reason, one line each, why this server must not get these weights; empty when it may.

    Asks the server what it is and, where its checkpoint can be read from here, compares all names and shapes with what
    that holds. Raises ServerError when it does not answer.
    """
    found = mismatches(control.model_info(), control.server_info(), expected)
    where = f"SGLang server {control.endpoint.index} at {control.endpoint.url}"
    return [f"{where}: {problem}" for problem in found]


def mismatches(model: Mapping[str, Any], server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """What /model_info and /server_info say that does not fit, and what their checkpoint says."""
    found = _wrong_settings(server, expected)
    raw = expected.hf.raw
    for key in ("model_type", "architectures"):
        if key in raw and model.get(key) != raw[key]:
            found.append(f"serves {key}={model.get(key)!r}, the trainer's model is {raw[key]!r}; serve the same model")
    if model.get("is_generation") is not True:
        found.append("its model does not generate (is_generation is not true); serve a language model")
    path = Path(str(model.get("model_path")))
    readable = (path / "config.json").is_file()
    return found + (_wrong_checkpoint(path, server, expected) if readable else _wrong_tensors(expected, None))


def _wrong_settings(server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Settings of SGLang under which an update is impossible or would be another than asked."""
    found = []
    if server.get("version") != SGLANG_VERSION:
        found.append(f"runs SGLang {server.get('version')!r}; its endpoints are known for {SGLANG_VERSION} only")
    for name, (allowed, why) in _SETTINGS.items():
        if server.get(name) not in allowed:
            found.append(f"{name}={server.get(name)!r} must be {allowed[0]!r}: {why}")
    if expected.tp is not None and server.get("tp_size") != expected.tp:
        found.append(f"tp_size={server.get('tp_size')!r}, sglang.tp is {expected.tp}")
    # "auto" is bfloat16 for a checkpoint in float32 too, so it is not taken for an answer.
    dtype = str(server.get("dtype"))
    if _SHORT_DTYPES.get(dtype, dtype) != expected.dtype:
        found.append(
            f"dtype={server.get('dtype')!r}, rollouts are to be in {expected.dtype}; start it with "
            f"--dtype {expected.dtype}, or set rollout.dtype"
        )
    return found


def _wrong_checkpoint(path: Path, server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Differences between the trainer's model and the checkpoint that the server was started from."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
        config |= json.loads(str(server.get("json_model_override_args") or "{}"))
        hf = parse_hf_config(config, where=str(path / "config.json"))
        shapes = None
        if any(path.glob("*.safetensors")):  # a server with --load-format dummy needs none
            with CheckpointReader(path) as reader:
                shapes = {name: info.shape for name, info in reader.tensors.items()}
                hf = as_on_disk(hf, shapes)
    except UserErrors as error:
        return list(error.problems)
    except (UserError, OSError, ValueError, TypeError) as error:
        return [f"its checkpoint {path} cannot be read: {error}"]
    found = [
        f"{path / 'config.json'}: {field.name}={getattr(hf, field.name)!r}, "
        f"the trainer's model has {getattr(expected.hf, field.name)!r}"
        for field in fields(HFConfig)
        if field.name not in _NOT_COMPARED and getattr(hf, field.name) != getattr(expected.hf, field.name)
    ]
    wanted = {name: tensor.shape for name, tensor in hf_tensors(hf, head="lm").items()}
    if shapes is not None:
        aside = ignored_tensors(hf, head="lm")
        wanted |= {name: shape for name, shape in shapes.items() if name not in aside}
    return found + _wrong_tensors(expected, wanted)


def _wrong_tensors(expected: ExpectedServer, wanted: Mapping[str, tuple[int, ...]] | None) -> list[str]:
    """Every tensor that would be sent twice, not at all, in another shape or type, or under a name that is unknown.

    wanted: of the server's model; None where its checkpoint is out of reach, and the trainer's config stands in.
    """
    if wanted is None:
        wanted = {name: tensor.shape for name, tensor in hf_tensors(expected.hf, head="lm").items()}
    counts = Counter(tensor.name for tensor in expected.sent)
    found = [f"{name} would be sent {count} times" for name, count in counts.items() if count > 1]
    for tensor in expected.sent:
        if tensor.name not in wanted:
            found.append(f"{tensor.name} {list(tensor.shape)} would be sent and is no part of its model")
        elif tuple(wanted[tensor.name]) != tensor.shape:
            found.append(
                f"{tensor.name} would be sent as {list(tensor.shape)}, its model has {list(wanted[tensor.name])}"
            )
        if tensor.dtype not in _NOT_QUANTIZED:
            found.append(f"{tensor.name} would be sent as {tensor.dtype}, which SGLang cannot load")
    found += [f"{name} {list(shape)} would not be sent" for name, shape in wanted.items() if name not in counts]
    return found
