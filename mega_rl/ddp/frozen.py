"""Freezing of weights, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from mega_rl.errors import UserError
from mega_rl.protocols import Ranks

EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
# One expert's weights: a module of its own, or a parameter of a grouped matrix product.
_EXPERT = re.compile(r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")


def freeze(chunks: Sequence[GPTModel], patterns: Sequence[str], *, everyone: Ranks) -> list[str]:
    """Take the weights that a pattern names out of training; returns this rank's names of them.

    Patterns are those of the shell over the names of `named_parameters`. Call it before the chunks are wrapped for
    data parallelism: what is frozen has neither gradient nor optimizer state. Collective over `everyone`, the ranks
    of the model.

    Raises UserError: on all ranks alike, a pattern names no weight of the model, or nothing is left to train.
    """
    parameters = list(named_parameters(chunks))
    matches = [[fnmatchcase(name, pattern) for name, _ in parameters] for pattern in patterns]
    frozen = {i for row in matches for i, matched in enumerate(row) if matched}
    flags = [any(row) for row in matches] + [len(frozen) < len(parameters)]
    *used, trains = everyone.max(torch.tensor(flags, dtype=torch.int64)).tolist()
    idle = [pattern for pattern, matches_any in zip(patterns, used, strict=True) if not matches_any]
    if idle:
        raise UserError(
            f"model.frozen={idle}: no weight of the model has such a name; names are like "
            f"{', '.join(name for name, _ in parameters[:3])}"
        )
    if not trains:
        raise UserError(f"model.frozen={list(patterns)} freezes every weight: nothing is left to train")
    for i in frozen:
        parameters[i][1].requires_grad_(False)
    for chunk in chunks:
        _let_gradients_through(chunk)
    return [parameters[i][0] for i in sorted(frozen)]


def named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of every chunk by Megatron-Core's names, which do not depend on the layout here.

    Layers and experts are numbered over the whole model from 0 ("decoder.layers.3.mlp.experts.local_experts.7..."),
    and the last stage's copy of a tied embedding has the embedding's name.
    """
    for chunk in chunks:
        layers = chunk.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        ep = chunk.pg_collection.ep
        first_expert = ep.rank() * ((chunk.config.num_moe_experts or 0) // ep.size())
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = EMBEDDING
            name = _LAYER.sub(partial(_shifted, by=first), name)
            yield _EXPERT.sub(partial(_shifted, by=first_expert), name), parameter


def _shifted(match: re.Match[str], *, by: int) -> str:
    """Return the matched (text, number) with `by` added to the number."""
    return f"{match[1]}{int(match[2]) + by}"


def _let_gradients_through(chunk: GPTModel) -> None:
    """Make a frozen embedding's output require a gradient where layers behind it are recomputed.

    A recomputed block takes part in the backward only if one of its inputs requires a gradient; otherwise its own
    weights would get none.
    """
    if chunk.config.recompute_granularity is None or not chunk.pre_process:
        return
    if not any(parameter.requires_grad for parameter in chunk.embedding.parameters()):
        chunk.embedding.register_forward_hook(_require_grad)


def _require_grad(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
