"""Weights that do not train."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from megatron.core.models.gpt import GPTModel


def freeze(chunks: Sequence[GPTModel], patterns: Sequence[str]) -> list[str]:
    """Take the weights that a pattern names out of training; returns this rank's names of them.

    Patterns are those of the shell over Megatron-Core's parameter names, layers numbered over the whole model
    ("decoder.layers.3.*"). Before DDP wraps the chunks: what is frozen has neither gradient nor optimizer state.
    """
    frozen = []
    for name, parameter in named_parameters(chunks):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
            frozen.append(name)
    return frozen


def named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of every chunk, layers numbered over the whole model from 0."""
    for chunk in chunks:
        layers = chunk.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in chunk.named_parameters():
            local = re.match(r"decoder\.layers\.(\d+)\.", name)
            rest = name[local.end() :] if local else ""
            yield (f"decoder.layers.{int(local[1]) + first}.{rest}" if local else name), parameter
