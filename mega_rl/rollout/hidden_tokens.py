"""Tokens that no response may hold: ids that the tokenizer does not know, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.rollout.stop_tokens import with_end_of_sequence
from mega_rl.types import IdRanges

ALL_FURTHER = 1 << 40  # end of a range without one: vocabularies of one tokenizer are padded to different sizes
NEARLY_ZERO = 1e-3  # share of the median norm of an embedding's rows


def hidden_tokens(path: Path, stop_token_ids: Sequence[int] = ()) -> IdRanges:
    """Return the ids that sampler and trainer give a probability of 0, as ranges in ascending order.

    The tokenizer of the checkpoint `path` does not know these ids; its padding token is one of them if it is a special
    token and ends no response. `stop_token_ids` end a response next to the model's own. Empty without a tokenizer.
    """
    if not any(path.glob("*token*")):
        return ()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    stops = with_end_of_sequence(path, model, stop_token_ids)
    known, pad = set(tokenizer.get_vocab().values()), tokenizer.pad_token_id
    if pad in known and pad not in stops and tokenizer.added_tokens_decoder[pad].special:
        known.remove(pad)
    known.update(stops)
    end = max(known, default=-1) + 1
    # Neighbours of a run of missing ids differ from their place in the list by the same number.
    missing = enumerate(sorted(set(range(end)) - known))
    runs = [[token for _, token in run] for _, run in groupby(missing, key=lambda pair: pair[1] - pair[0])]
    return (*((run[0], run[-1] + 1) for run in runs), (end, ALL_FURTHER))


def ids_of(ranges: IdRanges, vocab_size: int) -> list[int]:
    """Return the ids of ranges that are below `vocab_size`."""
    return [token for first, end in ranges for token in range(first, min(end, vocab_size))]


def describe_zero_rows(path: Path, hidden: IdRanges, stop_ids: Sequence[int]) -> str | None:
    """Return a line about tokens whose row of the input embedding is nearly zero, but for stop tokens; None without.

    The gradient of such a row is up to a thousand times that of a trained one: the norm divides by the row's size.
    """
    with CheckpointReader(path) as reader:
        name = next((name for name in reader.tensors if name.endswith("embed_tokens.weight")), None)
        if name is None:
            return None
        norms = torch.cat([part.float().square().sum(dim=1) for part in reader.read(name).split(1 << 14)]).sqrt()
    small = (norms < NEARLY_ZERO * norms.median()).nonzero().flatten().tolist()
    rows = [token for token in small if token not in stop_ids]
    if not rows:
        return None
    seen = set(rows) - set(ids_of(hidden, len(norms)))
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return (
        f"model.path={path}: the embedding rows of {len(rows)} tokens are nearly zero (ids {shown}); {len(seen)} of "
        "them may be sampled or stand in prompts, and one such token can dominate the gradient of its update: give "
        "these rows the mean of the others"
    )
