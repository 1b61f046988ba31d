"""Ways in which an answer of /generate is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.helpers.fake_sglang import STOP

Answer = dict[str, Any]


def _meta(**changes: Any) -> Callable[[Answer], Any]:
    def change(answer: Answer) -> Answer:
        answer["meta_info"].update(changes)
        return answer

    return change


def _without(*path: str) -> Callable[[Answer], Any]:
    def change(answer: Answer) -> Answer:
        holder = answer
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]
        return answer

    return change


def _tokens(function: Callable[[list[int]], Any], *, logprobs: bool = True) -> Callable[[Answer], Any]:
    """Other output_ids, with all else as it should be beside them."""

    def change(answer: Answer) -> Answer:
        tokens = function(answer["output_ids"])
        answer["output_ids"] = tokens
        if logprobs:
            meta = answer["meta_info"]
            meta["output_token_logprobs"] = [[-1.0, token, None] for token in tokens]
            meta["completion_tokens"] = len(tokens)
            meta["weight_versions"][-1]["end"] = len(tokens)
        return answer

    return change


def _logprob(value: Any) -> Callable[[Answer], Any]:
    def change(answer: Answer) -> Answer:
        answer["meta_info"]["output_token_logprobs"][1][0] = value
        return answer

    return change


def _entries(function: Callable[[list[Any]], Any]) -> Callable[[Answer], Any]:
    def change(answer: Answer) -> Answer:
        answer["meta_info"]["output_token_logprobs"] = function(answer["meta_info"]["output_token_logprobs"])
        return answer

    return change


def _spans(*spans: tuple[Any, Any, Any]) -> Callable[[Answer], Any]:
    return _meta(weight_versions=[{"version": v, "start": a, "end": b} for v, a, b in spans])


def _text(function: Callable[[bytes], bytes]) -> Callable[[Answer], bytes]:
    return lambda answer: function(json.dumps(answer).encode())


# name -> change of a right answer of 6 tokens without a stop token: to another answer or to bytes
MUTANTS: dict[str, Callable[[Answer], Any]] = {
    "empty body": lambda _: b"",
    "half a body": _text(lambda text: text[: len(text) // 2]),
    "cut within a string": _text(lambda text: text[: text.index(b"weight_ver") + 4]),
    "html": lambda _: b"<html>Bad gateway</html>",
    "two answers": _text(lambda text: text + text),
    "no utf-8": _text(lambda text: text.replace(b"length", b"\xff\xfe")),
    "nested a hundred thousand deep": lambda _: b"[" * 100_000,
    "number of ten thousand digits": _text(lambda text: text.replace(b"[", b"[" + b"9" * 10_000 + b",", 1)),
    "huge body": _text(lambda text: b" " * 2**20 + text),
    "list of one": lambda answer: [answer],
    "empty list": lambda _: [],
    "null": lambda _: None,
    "no meta_info": _without("meta_info"),
    "meta_info is text": lambda answer: {**answer, "meta_info": "fine"},
    "another request's id": _meta(id="somebody-else"),
    "no id": _without("meta_info", "id"),
    "another prompt": _meta(prompt_tokens=99),
    "no prompt count": _without("meta_info", "prompt_tokens"),
    "no output_ids": _without("output_ids"),
    "output_ids null": lambda answer: {**answer, "output_ids": None},
    "output_ids text": lambda answer: {**answer, "output_ids": "3 4 5"},
    "ids as floats": _tokens(lambda ids: [float(i) for i in ids], logprobs=False),
    "an id is true": _tokens(lambda ids: [True, *ids[1:]], logprobs=False),
    "ids nested": _tokens(lambda ids: [ids], logprobs=False),
    "id beyond the vocabulary": _tokens(lambda ids: [*ids[:-1], 50]),
    "negative id": _tokens(lambda ids: [-1, *ids[1:]]),
    "one token more": _tokens(lambda ids: [*ids, 7]),
    "no token": _tokens(lambda _: []),
    "another count": _meta(completion_tokens=5),
    "no count": _without("meta_info", "completion_tokens"),
    "no log-probs": _without("meta_info", "output_token_logprobs"),
    "log-probs null": _meta(output_token_logprobs=None),
    "log-probs text": _meta(output_token_logprobs="-1.5"),
    "log-probs bare": _entries(lambda entries: [entry[0] for entry in entries]),
    "log-prob without id": _entries(lambda entries: [[entry[0]] for entry in entries]),
    "log-prob is text": _logprob("-1.5"),
    "log-prob is true": _logprob(True),
    "a log-prob short": _entries(lambda entries: entries[:-1]),
    "a log-prob more": _entries(lambda entries: [*entries, entries[0]]),
    "log-probs shifted": _entries(lambda entries: [*entries[1:], entries[0]]),
    "log-prob NaN": _logprob(float("nan")),
    "log-prob null": _logprob(None),
    "log-prob -inf": _logprob(float("-inf")),
    "log-prob overflows": _text(lambda text: re.sub(rb"\[\[-[0-9.]+", b"[[-1e999", text)),
    "log-prob a whole number beyond floats": _logprob(-(10**400)),
    "log-prob positive": _logprob(0.5),
    "no finish_reason": _without("meta_info", "finish_reason"),
    "finish_reason null": _meta(finish_reason=None),
    "finish_reason unknown": _meta(finish_reason={"type": "tired"}),
    "finish_reason a list": _meta(finish_reason=["stop"]),
    "finish_reason type a list": _meta(finish_reason={"type": ["stop"]}),
    "stop without a stop token": _meta(finish_reason={"type": "stop", "matched": 7}),
    "length on a stop token": _tokens(lambda ids: [*ids[:-1], STOP]),
    "goes on after a stop token": _tokens(lambda ids: [*ids[:2], STOP, *ids[3:]]),
    "too short": _tokens(lambda ids: ids[:-1]),
    "mixed versions": _spans(("1", 0, 2), ("2", 2, 6)),
    "spans end early": _spans(("1", 0, 5)),
    "spans end late": _spans(("1", 0, 7)),
    "spans leave a gap": _spans(("1", 0, 2), ("1", 3, 6)),
    "spans overlap": _spans(("1", 0, 3), ("1", 2, 6)),
    "spans go backwards": _spans(("1", 0, 4), ("1", 4, 2), ("1", 2, 6)),
    "spans are no list": _meta(weight_versions={"1": 6}),
    "no spans": _meta(weight_versions=[]),
}

# These say that the server holds other weights: it is taken out of rotation, and no sample tried again there.
STALE_MUTANTS: dict[str, Callable[[Answer], Any]] = {
    "older version": lambda answer: _spans(("0", 0, 6))(_meta(weight_version="0")(answer)),
    "newer version": lambda answer: _spans(("2", 0, 6))(_meta(weight_version="2")(answer)),
    "never updated": lambda answer: _spans(("default", 0, 6))(_meta(weight_version="default")(answer)),
    "version a number": lambda answer: _spans((1, 0, 6))(_meta(weight_version=1)(answer)),
    "no version": lambda answer: _without("meta_info", "weight_version")(answer),
    "end version only differs": _meta(weight_version="7"),
}
