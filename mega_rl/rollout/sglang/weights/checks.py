"""Checks of a server before it gets weights: model, settings, names and shapes.

SGLang 0.5.20 crashes on a tensor of a wrong shape and ignores an unknown name silently, so the sender checks both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError, UserErrors
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION

_SHORT_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class ExpectedServer:
    """Model and weights that the trainer will send, and the settings a server needs for them."""

    hf: HFConfig  # the trainer's model
    sent: Mapping[str, tuple[int, ...]]  # shapes by Hugging Face's names
    dtype: str  # the server's weights': "float32"
    tp: int | None = None  # None: any, as a joined server may have
    routing: bool = False  # it has to report the experts of tokens


def sent_shapes(sharding: Sharding) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an update's tensors by name."""
    return {name: shape for unit in export_plan(sharding) for name, shape, _ in unit.tensors}


def check_server(control: Control, expected: ExpectedServer) -> list[str]:
    """Return every reason why this server cannot take these weights, one line each.

    Compares /model_info and /server_info and, where the server's checkpoint can be read from here, the names and
    shapes of its tensors. Raises ServerError when the server does not answer.
    """
    problems = mismatches(control.object("GET", "/model_info"), control.object("GET", "/server_info"), expected)
    where = f"SGLang server {control.endpoint.index} at {control.endpoint.url}"
    return [f"{where}: {problem}" for problem in problems]


def mismatches(model: Mapping[str, Any], server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Return the mismatches of /model_info, /server_info and their checkpoint with `expected`, in words."""
    problems = _wrong_settings(server, expected)
    raw = expected.hf.raw
    for key in ("model_type", "architectures"):
        if key in raw and model.get(key) != raw[key]:
            problems.append(
                f"serves {key}={model.get(key)!r}, the trainer's model is {raw[key]!r}; serve the same model"
            )
    if model.get("is_generation") is not True:
        problems.append("its model does not generate (is_generation is not true); serve a language model")
    path = Path(str(model.get("model_path")))
    readable = (path / "config.json").is_file()
    return problems + (_wrong_checkpoint(path, expected) if readable else _wrong_tensors(expected, None))


def _wrong_settings(server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Return in words the settings of a server under which an update fails."""
    rules: list[tuple[str, tuple[object, ...], str]] = [
        ("version", (SGLANG_VERSION,), "its endpoints are known for this release only"),
        ("pp_size", (1, None), "weights are sent per tensor-parallel rank; use --tp-size"),
        ("quantization", (None, "", "unquant"), "weights are sent unquantised"),
        ("speculative_algorithm", (None, ""), "the draft model would keep its old weights"),
        ("is_embedding", (False, None), "it has to generate"),
        # "auto" means bfloat16 for a checkpoint in float32 too, so it is not accepted.
        ("dtype", _names_of(expected.dtype), "start it with --dtype of rollout.dtype"),
    ]
    if server.get("enable_dp_attention") is not True:
        rules.append(("dp_size", (1, None), "without enable_dp_attention weights reach one data-parallel replica only"))
    if expected.routing:
        rules.append(("enable_return_routed_experts", (True,), "rollout.sglang.return_routing=true asks for experts"))
    if expected.tp is not None:
        rules.append(("tp_size", (expected.tp,), "as rollout.sglang.server.tp"))
    return [
        f"{name}={server.get(name)!r} must be {allowed[0]!r}: {why}"
        for name, allowed, why in rules
        if server.get(name) not in allowed
    ]


def _names_of(dtype: str) -> tuple[str, ...]:
    return (dtype, *(short for short, name in _SHORT_DTYPES.items() if name == dtype))


def _wrong_checkpoint(path: Path, expected: ExpectedServer) -> list[str]:
    """Return the differences between the trainer's weights and the checkpoint that the server serves, in words."""
    try:
        hf = parse_hf_config(json.loads((path / "config.json").read_text("utf-8")), where=str(path / "config.json"))
        shapes: dict[str, tuple[int, ...]] = {}
        if any(path.glob("*.safetensors")):  # a server with --load-format dummy needs none
            with CheckpointReader(path) as reader:
                shapes = {name: info.shape for name, info in reader.tensors.items()}
                hf = as_on_disk(hf, shapes)
    except (UserErrors, UserError, OSError, ValueError, TypeError) as error:
        return [f"its checkpoint {path} cannot be read: {error}"]
    wanted = {name: tensor.shape for name, tensor in hf_tensors(hf, head="lm").items()}
    aside = ignored_tensors(hf, head="lm")
    return _wrong_tensors(expected, wanted | {name: shape for name, shape in shapes.items() if name not in aside})


def _wrong_tensors(expected: ExpectedServer, wanted: Mapping[str, tuple[int, ...]] | None) -> list[str]:
    """Return in words the tensors whose name or shape is wrong.

    wanted: shapes of the server's model; None where its checkpoint cannot be read: the trainer's config gives them.
    """
    if wanted is None:
        wanted = {name: tensor.shape for name, tensor in hf_tensors(expected.hf, head="lm").items()}
    shapes = [(name, expected.sent.get(name), wanted.get(name)) for name in {**expected.sent, **wanted}]
    return [
        f"{name} would be sent as {list(own or ())}, its model has {list(theirs or ())}"
        for name, own, theirs in shapes
        if own is None or theirs is None or tuple(own) != tuple(theirs)
    ]
