"""Logits of a checkpoint by transformers. Imports no Megatron-Core: the reference runs where that cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mega_rl.converters.families import FAMILIES
from mega_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Outputs:
    """Logits and hidden states of a model on a batch."""

    logits: Tensor  # [B, S, vocab] float32, without padding of the vocabulary
    hidden: tuple[Tensor, ...] = field(default=())  # each layer's output [B, S, H]; empty unless requested


@torch.no_grad()
def hf_logits(path: str | Path, tokens: Tensor, *, dtype: str = "fp32", layer_outputs: bool = False) -> Outputs:
    """Return the logits of `tokens` [B, S] int64 by the checkpoint in directory `path` in transformers, on the CPU.

    Attention is transformers' own plain one, and no code of the checkpoint is run. `dtype` is "fp32" or "bf16".
    `layer_outputs` asks for the hidden states too.
    """
    model = _load(path, DTYPES[dtype])
    states: list[Tensor] = []

    def keep(output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    with recorded(list(model.model.layers) if layer_outputs else [], keep):
        logits = model(tokens, use_cache=False).logits
    return Outputs(logits.float(), tuple(states))


def hf_weights(path: str | Path) -> dict[str, Tensor]:
    """Return every weight of the checkpoint in directory `path` by its name on disk, float32, as transformers loads it.

    A reference that shares no code with the converters decides by itself which tensors of the files are the model.
    Takes 4 bytes per element, twice that for experts. Raises UserError for a checkpoint that lacks weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _load(path, torch.float32)
    weights: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return weights


def _load(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder, on the CPU; no weight of it is random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads((Path(path) / "config.json").read_bytes())
    model_type = raw.pop("model_type")
    family = FAMILIES.get(model_type)
    config = AutoConfig.for_model(family.transformers_type if family else model_type, **raw)
    answer: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
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


@contextmanager
def recorded(layers: Sequence[torch.nn.Module], keep: Callable[[Any], None]) -> Iterator[None]:
    """Hands every output of each of `layers` to `keep` as long as the context lasts."""
    hooks = [layer.register_forward_hook(lambda module, inputs, output: keep(output)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
