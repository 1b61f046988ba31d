"""One answer of /generate: each wrong one is named, each right one taken as it is."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from mega_rl.rollout.sglang.generation.client import LOGPROB_ROUNDING, ExpectedAnswer, parse_answer
from mega_rl.rollout.sglang.generation.samples import RequestFailure
from tests.helpers.fake_sglang import STOP, VOCABULARY, right_answer
from tests.unit_tests.rollout.sglang.mutants import MUTANTS, STALE_MUTANTS

EXPECTED = ExpectedAnswer(
    rid="r-0",
    prompt_tokens=3,
    max_new_tokens=6,
    stop_token_ids=frozenset({STOP}),
    vocab_size=VOCABULARY,
    version=1,
    mixed_versions=False,
    routing=False,
)


def _right(seed: int = 1, **changes: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 6, "stop_token_ids": [STOP], "sampling_seed": seed}
    return right_answer({"rid": "r-0", "input_ids": [3, 4, 5], "sampling_params": params}, **changes)


def _parse(answer: Any, expected: ExpectedAnswer = EXPECTED) -> Any:
    return parse_answer(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), expected)


def _kind(answer: Any, expected: ExpectedAnswer = EXPECTED) -> str:
    with pytest.raises(RequestFailure) as caught:
        _parse(answer, expected)
    assert len(str(caught.value)) < 400, "a message shows enough to recognise, not all that came"
    return caught.value.kind


@pytest.mark.parametrize("name", [*MUTANTS, *STALE_MUTANTS])
def test_a_wrong_answer_is_refused(name: str) -> None:
    changed = {**MUTANTS, **STALE_MUTANTS}[name](_right())
    assert _kind(changed) == ("bad_answer" if name in MUTANTS else "other_weights")


def test_a_right_answer_is_taken_as_it_is() -> None:
    answer = _right()
    sample = _parse(answer)
    assert sample.token_ids == answer["output_ids"]
    assert sample.logprobs == [-0.125 * token for token in answer["output_ids"]]
    assert (sample.versions, sample.finish) == ([1] * 6, "length")


def test_the_stop_token_belongs_to_the_response() -> None:
    sample = _parse(_right(seed=0))
    assert (sample.token_ids[-1], sample.finish, len(sample.logprobs)) == (STOP, "stop", len(sample.token_ids))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_an_aborted_answer_is_partial(num_tokens: int) -> None:
    sample = _parse(_right(num_tokens=num_tokens))
    assert (len(sample.token_ids), len(sample.logprobs), sample.finish) == (num_tokens, num_tokens, "partial")


def test_answer_aborted_before_its_turn_has_less() -> None:
    answer = _right(num_tokens=0)
    for name in ("prompt_tokens", "output_token_logprobs", "weight_versions"):
        del answer["meta_info"][name]
    assert _parse(answer).token_ids == []


def test_tokens_of_an_aborted_answer_are_checked() -> None:
    answer = _right(num_tokens=3)
    answer["meta_info"]["output_token_logprobs"][2][0] = None
    assert _kind(answer) == "bad_answer"


def test_rounding_above_zero_is_no_error() -> None:
    answer = _right()
    answer["meta_info"]["output_token_logprobs"][0][0] = LOGPROB_ROUNDING
    assert _parse(answer).logprobs[0] == LOGPROB_ROUNDING


def test_tokens_of_a_partial_rollout_carry_their_versions() -> None:
    mixed = replace(EXPECTED, mixed_versions=True)
    answer = _right()
    answer["meta_info"]["weight_version"] = "3"
    answer["meta_info"]["weight_versions"] = [
        {"version": "1", "start": 0, "end": 2},
        {"version": "3", "start": 2, "end": 6},
    ]
    assert _parse(answer, mixed).versions == [1, 1, 3, 3, 3, 3]
    assert _kind(answer) == "bad_answer"
    assert _kind(answer, replace(mixed, version=2)) == "other_weights"
    answer["meta_info"]["weight_versions"].reverse()
    assert _kind(answer, mixed) == "bad_answer"
    del answer["meta_info"]["weight_versions"]
    assert _kind(answer, mixed) == "bad_answer"


def test_routing_has_a_row_per_input_token() -> None:
    expected = replace(EXPECTED, routing=True)
    answer = _right()
    content = bytes(range(4 * 2 * 2)) * 8  # 3 + 6 - 1 rows of two layers and two experts
    answer["meta_info"]["routed_experts"] = base64.b64encode(content).decode()
    assert _parse(answer, expected).routing == content
    for bad in (None, "!!", base64.b64encode(content[:-4]).decode(), ""):
        answer["meta_info"]["routed_experts"] = bad
        assert _kind(answer, expected) == "bad_answer"
