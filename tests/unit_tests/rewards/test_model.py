"""Reward models: the scores are those of transformers' own class, on every layout, from tokens and from texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.rewards.model import ModelScorer, RowLimits, own_tokens, token_rows
from mega_rl.rewards.score import ResponseReader, RewardError
from mega_rl.types import Experience, Rollout, TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import LAYOUTS
from tests.helpers.models import write_digit_tokenizer
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.rewards.model_cases import (
    FAILED,
    LENGTHS,
    PROMPTS,
    rollout_of_rows,
    score_on_layouts,
    transformers_scores,
    write_other_tokenizer,
    write_reward_model,
)

TOLERANCE = 1e-5  # fp32: sums in another order
ANSWERED = [row for row in range(len(LENGTHS)) if row != FAILED]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models whose tokenizers have a template and are not the actor's, which is in actor/ beside each."""
    actual = {}
    for family in ("qwen3", "llama"):
        folder = tmp_path_factory.mktemp(family)
        (folder / "actor").mkdir()
        write_digit_tokenizer(folder / "actor", vocab_size=50)
        actual[family] = write_reward_model(folder / "model", family=family)
        write_other_tokenizer(folder / "model")
    return actual


def expected_text_rows(checkpoint: Path) -> list[list[int]]:
    """The conversations' token ids, by transformers alone."""
    from transformers import AutoTokenizer

    actor = AutoTokenizer.from_pretrained(checkpoint.parent / "actor")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rollout = rollout_of_rows()
    rows = []
    for row in ANSWERED:
        prompt = PROMPTS[rollout.prompt_index[row]]
        before = [{"role": r, "content": c} for r, c in prompt.messages] or [{"role": "user", "content": prompt.text}]
        text = actor.decode(rollout.tokens[row, rollout.prompt_lengths[row] : rollout.lengths[row]])
        said = {"role": "assistant", "content": text.replace("<eos>", "")}
        rows.append(tokenizer.apply_chat_template([*before, said], return_dict=False))
    return rows


def expected_scores(checkpoint: Path, kind: str) -> torch.Tensor:
    rollout = rollout_of_rows()
    sampled = [rollout.tokens[row, : rollout.lengths[row]].tolist() for row in ANSWERED]
    scores = torch.zeros(len(LENGTHS))
    scores[ANSWERED] = transformers_scores(checkpoint, sampled if kind == "sampled" else expected_text_rows(checkpoint))
    return scores


@pytest.mark.parametrize(
    ("family", "layouts", "engine"),
    [
        ("qwen3", ["1"], "megatron"),
        ("llama", ["1"], "megatron"),
        ("qwen3", ["tp2", "dp2", "cp2", "pp2"], "megatron"),
        ("llama", ["dp2"], "fsdp"),
    ],
)
def test_scores_are_those_of_transformers(
    checkpoints: dict[str, Path], family: str, layouts: list[str], engine: str
) -> None:
    checkpoint = checkpoints[family]
    actor = checkpoint.parent / "actor"
    results = run_ranks(LAYOUTS[layouts[0]][0], score_on_layouts, str(checkpoint), str(actor), layouts, engine)
    for kind in ("sampled", "text"):
        expected = expected_scores(checkpoint, kind)
        assert expected[ANSWERED].abs().min() > 100 * TOLERANCE  # a row left at 0 would be seen
        assert expected[ANSWERED].diff().abs().min() > 100 * TOLERANCE  # as would rows in another order
        for layout in layouts:
            actual = [result[f"{layout} {kind}"] for result in results]
            scores = torch.cat(actual) if layout == "dp2" else actual[0]
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, expected, rtol=0, atol=TOLERANCE)
            if layout != "dp2":
                assert all(torch.equal(other, scores) for other in actual)  # bit for bit: they train on it
    for layout in layouts:  # the longest row is on one data-parallel rank alone: all hear of it
        for result in results:
            assert result[f"{layout} error"].endswith(
                "prompt 40 ('2+3'): the row has 23 tokens, the model 22 positions"
            )


class Readable:
    """An engine that says of a row how many tokens it has, and of one with token 49 that it is NaN."""

    def __init__(self) -> None:
        self.seen: list[Rollout] = []

    def forward(self, batch: Rollout | Experience) -> TokenOutputs:
        assert isinstance(batch, Rollout)
        self.seen.append(batch)
        values = (batch.lengths[:, None] - 1.0) * batch.loss_mask
        values[(batch.tokens == 49).any(1)] = float("nan")
        return TokenOutputs(values=values)


def worker_of(engine: Any, rows: Any = own_tokens, **limits: Any) -> ModelScorer:
    alone: Any = ThreadGroup(1).rank(0)
    return ModelScorer(engine, rows, limits=RowLimits(**{"vocab_size": 50, "positions": 256, **limits}), everyone=alone)


def test_the_place_of_a_score_is_after_the_rows_last_token() -> None:
    engine = Readable()
    scores = worker_of(engine).score(rollout_of_rows(), PROMPTS).totals
    assert scores.tolist() == [0.0 if row == FAILED else length for row, length in enumerate(LENGTHS)]
    (batch,) = engine.seen
    assert batch.loss_mask.sum(1).tolist() == [1] * len(ANSWERED)
    assert batch.loss_mask.int().argmax(1).tolist() == [LENGTHS[row] for row in ANSWERED]
    assert batch.tokens.size(1) == max(LENGTHS) + 1


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"positions": 22}, r"prompt 40 \('2\+3'\): the row has 23 tokens, the model 22 positions"),
        ({"vocab_size": 30}, r"token id \d+ is outside the vocabulary of 30"),
        ({"microbatch_tokens": 23}, "the row needs 24 tokens, above trainer.microbatch.max_tokens=23"),
        ({"microbatch_tokens": 26, "multiple": 14}, "the row needs 28 tokens, above"),
    ],
)
def test_rows_without_room_are_named(limits: dict[str, int], what: str) -> None:
    engine = Readable()
    with pytest.raises(RewardError, match=what):
        worker_of(engine, **limits).score(rollout_of_rows(), PROMPTS)
    assert not engine.seen
    enough = {"positions": 23, "vocab_size": 50, "microbatch_tokens": 28, "multiple": 14}
    worker_of(engine, **enough).score(rollout_of_rows(), PROMPTS)


class Letters:
    """A tokenizer with a token per character, 99 at the beginning of what has no template."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[99] * add_special_tokens + list(text.encode()) for text in texts]}

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert not add_generation_prompt
        if conversation[-1]["content"] == "no":
            raise ValueError("not\n no")
        return "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in conversation)


def text_of(token_ids: Sequence[int]) -> str:
    return "no" if 49 in token_ids else ",".join(map(str, token_ids))


@pytest.mark.parametrize(
    ("same_tokenizer", "template", "rollout_template", "converted"),
    [
        (True, None, None, False),
        (True, "a", "a", False),
        (True, None, "a", False),  # it has no format of its own
        (True, "a", None, True),  # plain prompts, a model of conversations
        (True, "b", "a", True),
        (False, "a", "a", True),
        (False, None, None, True),
    ],
)
def test_when_rows_are_converted(
    same_tokenizer: bool, template: str | None, rollout_template: str | None, converted: bool
) -> None:
    rows = token_rows(
        Letters(),
        template=template,
        same_tokenizer=same_tokenizer,
        rollout_template=rollout_template,
        reader=ResponseReader(text_of),
    )
    assert (rows is own_tokens) != converted
