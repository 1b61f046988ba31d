"""Proof, before a run, of how a Hugging Face model computes rows.

It runs on a small model of the very class with random weights, on the run's device, and is the same on every rank. The
judge is transformers' eager attention over each sequence by itself; logits and all gradients must agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mega_rl.config.needs import RequestedAttention, Role
from mega_rl.converters.hf.small import gradients, random_model, random_rows, shrink
from mega_rl.converters.hf.untabled import FOREIGN, accepted, config_of
from mega_rl.converters.live.load import model_config
from mega_rl.engines.fsdp_model import attention_arguments, attention_name
from mega_rl.engines.models.specs import Attention
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.base import distance

log = logging.getLogger(__name__)

# Tokens, more than windows and convolutions of small models see. They make three chunks and two: without its CUDA
# kernels NemotronH computes a row differently in a batch whose longest row has more chunks.
LENGTHS = (21, 13)
SMALLEST = 1e-30  # element that counts
TOLERANCE = 2e-5  # relative, float32: rounding gives 1e-6, a softcap of 50 left out 2e-4, a leak 1e-2 and more
Found = tuple[tuple[Attention, bool] | None, str]  # (attention, whether rows are packed) or None; a reason
CANDIDATES: dict[str, tuple[Attention, ...]] = {
    "auto": ("sdpa", "transformers: sdpa", "transformers: eager"),
    "sdpa": ("sdpa", "transformers: sdpa"),
    "eager": ("eager", "transformers: eager"),
}


def prove_rows(
    role: Role, path: Path, requested: RequestedAttention, *, packing: bool, device_type: str
) -> tuple[Attention, bool]:
    """Return (attention, whether packed rows equal single ones) for a model.

    Raises UserError: neither packed nor padded rows give the numbers of single ones.
    """
    word = requested.word
    if word not in CANDIDATES:
        raise UserError(
            f"{requested.key}={word}: a run proves the attention of a model without a table in float32, which {word} "
            "does not compute; set it to auto, sdpa or eager"
        )
    config = model_config(path)
    way, why = _proven(config.to_json_string(use_diff=False), word, packing, device_type)
    if way is None:
        raise UserError(
            f"{path}: model_type={config.model_type}: padded rows do not give the numbers of single ones ({why}); take "
            "another model"
        )
    attention, packs = way
    if packing and not packs:
        log.info("%s: packed sequences would meet in model_type=%s (%s); rows are padded", role, config.model_type, why)
    return attention, packs


@lru_cache(maxsize=16)
def _proven(text: str, word: str, packing: bool, device_type: str) -> Found:
    """Return `find_way` of a config as JSON: roles of one architecture are proved once."""
    return find_way(config_of(json.loads(text)), word, packing, device_type)


def find_way(config: PreTrainedConfig, word: str, packing: bool, device_type: str) -> Found:
    """Return the best way to compute rows with attention `word`, and why not another."""
    device = torch.device(device_type)
    small, truth, why = None, None, ""
    for widths in (True, False):
        try:
            small = shrink(config, widths=widths)
            truth = _alone(small, device)
            break
        except FOREIGN as error:
            why = _line(error)
    if small is None or truth is None:
        return None, why
    if not _is_causal(small, device):
        chunk = getattr(config, "chunk_size", None)
        small.chunk_size = sum(LENGTHS)
        if chunk is not None and _is_causal(small, device):
            fault = "transformers before 5.15 computes it wrongly without CUDA kernels (huggingface/transformers#47246)"
            return None, f"in rows of more than {chunk} tokens {fault}"
        return None, "a token sees later ones"
    for attention, packed in _ways(word, packing):
        try:
            far = farthest(_together(small, attention, device, packed=packed), truth)
        except (*FOREIGN, RunError) as error:
            why = f"{attention}: {_line(error)}"
            continue
        if far <= TOLERANCE:
            return (attention, packed), why
        why = f"{attention}, {'packed' if packed else 'padded'}: off by {far:.1e}"
    return None, why


def _ways(word: str, packing: bool) -> Iterator[tuple[Attention, bool]]:
    """Yield (attention, whether packed), best first; transformers' eager attention of packed rows is all [T, T]."""
    for packed in (True, False) if packing else (False,):
        for attention in CANDIDATES[word]:
            if not (packed and attention == "transformers: eager"):
                yield attention, packed


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


Result = tuple[list[Tensor], Tensor]  # logits [n, V] of each sequence; all gradients


def _alone(small: PreTrainedConfig, device: torch.device) -> Result:
    """Return the result of each sequence by itself, by transformers' eager attention."""
    model = random_model(small, attention="eager", device=device)
    logits = []
    for row in random_rows(LENGTHS, device=device):
        positions = torch.arange(len(row), device=device)[None]
        logits.append(_forward(model, row[None], {"position_ids": positions})[0])
    return _backward(model, logits)


def _is_causal(small: PreTrainedConfig, device: torch.device) -> bool:
    """Return whether the logits of a sequence's beginning are those of the beginning by itself."""
    model = random_model(small, attention="eager", device=device)
    (row,) = random_rows(LENGTHS[:1], device=device)
    with torch.no_grad():
        whole, part = (_forward(model, tokens[None], {})[0] for tokens in (row, row[: LENGTHS[1]]))
    return distance(whole[: LENGTHS[1]], part, floor=SMALLEST) <= TOLERANCE


def _together(small: PreTrainedConfig, attention: Attention, device: torch.device, *, packed: bool) -> Result:
    """Return the result of the sequences in one micro-batch, as the engine computes it."""
    model = random_model(small, attention=attention_name(attention), device=device)
    rows, longest = random_rows(LENGTHS, device=device), max(LENGTHS)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32) if packed else None
    arguments = attention_arguments(attention, bounds, longest, device=device, lengths=LENGTHS)
    if packed:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
        logits = _forward(model, torch.cat(rows)[None], {**arguments, "position_ids": positions})[0].split(LENGTHS)
    else:
        positions = torch.arange(longest, device=device).expand(len(rows), longest)
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        whole = _forward(model, tokens, {**arguments, "position_ids": positions})
        logits = tuple(row[:length] for row, length in zip(whole, LENGTHS, strict=True))
    return _backward(model, logits)


def _forward(model: PreTrainedModel, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return logits [b, S, V]."""
    return cast(Tensor, model(tokens, **accepted(model, {**arguments, "use_cache": False})).logits)


def _backward(model: PreTrainedModel, logits: Sequence[Tensor]) -> Result:
    """Return the result of a loss that weighs every logit in its own way."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(one.shape, generator=generator).to(one) for one in logits]
    torch.stack([(one * weight).sum() for one, weight in zip(logits, weights, strict=True)]).sum().backward()
    return [one.detach() for one in logits], gradients(model)


def farthest(one: Result, truth: Result) -> float:
    """Return the largest relative difference of logits and gradients."""
    pairs = [*zip(one[0], truth[0], strict=True), (one[1], truth[1])]
    return max(distance(actual, expected, floor=SMALLEST) for actual, expected in pairs)
