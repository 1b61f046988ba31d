"""Tokens that end a response, and tokens that no response may hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mega_rl.converters.live.load import model_config
from mega_rl.data.chat import TemplateRefusal, apply_template
from mega_rl.errors import UserError
from mega_rl.types import IdRanges

log = logging.getLogger(__name__)

_ANSWER = "Zq7answer"  # stands for an answer in a rendered turn; no template has it


def with_end_of_sequence(model_path: Path, config: PreTrainedConfig, extra: Sequence[int] = ()) -> tuple[int, ...]:
    """Sorted: generation_config.json's end-of-sequence ids where it names any, else config.json's; and `extra`."""
    ids: int | list[int] | None = None
    if (model_path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
    if ids is None:
        ids = config.eos_token_id
    return tuple(sorted({*([ids] if isinstance(ids, int) else ids or ()), *extra}))


def check_stop_tokens(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    extra: Sequence[int],
    chat_template: bool,
    is_writer: bool,
) -> tuple[int, ...]:
    """Return the ids that end a response of the model at `path`, `extra` ones among them.

    Logs a warning, on the rank that writes, for each token that ends a sequence or a turn and is not one of them.

    Raises:
        UserError: no token ends a response.
    """
    model = model_config(path)
    stop_ids = with_end_of_sequence(path, model, extra)
    endings = dict(token_endings(tokenizer, chat_template=chat_template))
    if not stop_ids:
        raise UserError(_nothing_ends(path, tokenizer, endings))
    if not is_writer:
        return stop_ids
    for token_id, what in endings.items():
        if token_id not in stop_ids:
            log.warning(
                "%s ends %s and does not end a response; if the model is to stop there, set rollout.stop_token_ids=%s",
                *(_named(tokenizer, token_id), what, _setting([*extra, token_id])),
            )
    return stop_ids


def name_stop_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> str:
    """Return the stop tokens with ids, as "<|endoftext|> (id 151643) or <|im_end|> (id 151645)"."""
    return " or ".join(_named(tokenizer, token_id) for token_id in stop_ids)


def token_endings(tokenizer: PreTrainedTokenizerBase, *, chat_template: bool) -> Iterator[tuple[int, str]]:
    """Yield (id, "a sequence" or "a turn" in words) of the tokens that end one."""
    closing = _closing_token(tokenizer) if chat_template else None
    if closing is not None:
        yield closing, "a turn of the chat template"
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id != closing:
        yield int(tokenizer.eos_token_id), "a sequence of the tokenizer"


def _closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the first special token after an assistant's answer; None where the template puts none there."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = apply_template(tokenizer, turns)
    except TemplateRefusal:  # a template that refuses such turns says so of the data's
        return None
    _, separator, rest = rendered.rpartition(_ANSWER)
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if separator and rest else []
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    return next((int(token_id) for token_id in ids if token_id in special), None)


def _nothing_ends(path: Path, tokenizer: PreTrainedTokenizerBase, endings: dict[int, str]) -> str:
    names = ", ".join(f"{_named(tokenizer, token_id)} ends {what}" for token_id, what in endings.items())
    return (
        f"model.path={path}: no token ends a response (eos_token_id is null in config.json and generation_config.json, "
        f"and rollout.stop_token_ids is empty); set rollout.stop_token_ids={_setting([*endings])}"
        + (f": {names}" if names else "")
    )


def _named(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return "<|im_end|> (id 151645)"."""
    return f"{tokenizer.convert_ids_to_tokens(token_id)} (id {token_id})"


def _setting(ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


ALL_FURTHER = 1 << 40  # end of a range without one: vocabularies of one tokenizer are padded to different sizes


def hidden_tokens(path: Path, stop_token_ids: Sequence[int] = ()) -> IdRanges:
    """Return the ids to which sampler and trainer give probability 0, as ranges in ascending order.

    The tokenizer of the checkpoint `path` does not know these ids; its padding token is one of them if it is a special
    token and ends no response. `stop_token_ids` end a response next to the model's own. Empty without a tokenizer.
    """
    if not any(path.glob("*token*")):
        return ()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model = model_config(path)
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
