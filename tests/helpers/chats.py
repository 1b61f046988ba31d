"""A byte-level tokenizer with the special tokens that chat templates write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(
    r"<\|[\w/]{2,40}\|>|<｜[\w▁]{2,40}｜>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|ARGS|gMASK)\]"
    r"|</?s>|<sop>|<bos>|<eos>|</?(?:start_of|end_of)_turn>|<(?:start_of_turn|end_of_turn|turn\|)>|<\|turn>|<end_of_utterance>"
)
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # not special
_MERGES = [("Ċ", "Ċ"), (">", "Ċ"), (".", "Ċ"), ("Ċ", "Ġ"), ("Ġ", "Ġ"), ("h", "e"), ("l", "l"), ("<", "|"), ("|", ">")]


def byte_tokenizer(template: str, *, eos: str, more: Sequence[str] = (), first: Sequence[str] = ()) -> Any:
    """Return a tokenizer of bytes, some merges over line ends, and every special token of a template.

    first: words with the first ids, which no text is encoded to unless they are special.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*first, *letters, *("".join(pair) for pair in _MERGES)]
    model = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=_MERGES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys([eos, "<s>", *_SPECIAL.findall(template), *more])
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in _ADDED])
    bos = next((one for one in special if "begin" in one or one in ("<bos>", "<s>", "<|startoftext|>")), "<s>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return fast
