"""Which tokens of given answers train: what the model will have to write, its end among it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mega_rl.algorithms.preferences import DPO, KTO, Supervised
from mega_rl.config.schema import DataConfig
from mega_rl.data.build import PromptReader
from mega_rl.data.columns import RewardColumns
from mega_rl.data.examples import ExampleReading
from mega_rl.data.prompts import load_prompts
from mega_rl.errors import UserError
from mega_rl.types import Given, Prompt
from mega_rl.verify.tiny_models import write_tokenizer

CHARACTERS = [*"abcdefghijklmnopqrstuvwxyzABCU012345 .:\n?", "<end>", "<eos>", "<unk>"]
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# As templates that leave the thoughts of earlier turns out.
FORGETS = CHAT.replace("m.content", "('gone' if m.role == 'assistant' and not loop.last else m.content)")
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "fgh"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    write_tokenizer(tmp_path, CHARACTERS, pattern=r"<end>|<eos>|[\s\S]", unknown="<unk>", eos_token="<eos>")
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHAT
    return tokenizer


def read(tokenizer: Any, row: object, kind: Any, **settings: Any) -> Prompt:
    """The row as one reads it for a kind of training."""
    file = Path(tokenizer.name_or_path, "rows.jsonl")
    file.write_text(json.dumps(row) + "\n")
    ends = tokenizer.convert_tokens_to_ids(["<end>", "<eos>"])
    as_given = partial(ExampleReading, form=kind.form, train_on=kind.train_on, stop_ids=ends, end_id=ends[1])
    columns = RewardColumns(answer=False)
    reader = PromptReader(DataConfig(**settings), tokenizer, len(CHARACTERS), columns, as_given)
    (prompt,) = load_prompts([file], reader.reading())
    return prompt


def trained(tokenizer: Any, given: Given) -> list[str]:
    return [tokenizer.decode(given.token_ids[first:end]) for first, end in given.spans]


@pytest.mark.parametrize(
    ("train_on", "texts"),
    [
        ("assistant", ["cd<end>", "fgh<end>"]),
        ("last", ["fgh<end>"]),
        ("all", [":be brief<end>\nu:ab<end>\na:cd<end>\nu:e<end>\na:fgh<end>\n"]),
    ],
)
def test_turns_of_a_conversation_train(tokenizer: Any, train_on: str, texts: list[str]) -> None:
    prompt = read(tokenizer, {"messages": TURNS}, Supervised(train_on=train_on))
    (given,) = prompt.given
    assert trained(tokenizer, given) == texts
    if train_on == "last":
        asked = tokenizer.apply_chat_template(TURNS[:-1], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt.token_ids) == asked, "a run would sample from another prompt"
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert whole.startswith(tokenizer.decode(given.token_ids))


@pytest.mark.parametrize(
    ("row", "text", "texts"),
    [
        ({"prompt": "ab ", "completion": "cd"}, "ab cd<eos>", ["cd<eos>"]),
        ({"prompt": "ab ", "completion": "cd<eos>"}, "ab cd<eos>", ["cd<eos>"]),
        ({"text": "abc"}, "abc<eos>", ["bc<eos>"]),
        ({"prompt": TURNS}, None, ["cd<end>", "fgh<end>"]),
        ({"prompt": TURNS[:2], "completion": "cd"}, "s:be brief<end>\nu:ab<end>\na:cd<end>", ["cd<end>"]),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, None, ["fgh<end>"]),
    ],
)
def test_completions_and_text_train(tokenizer: Any, row: object, text: str | None, texts: list[str]) -> None:
    (given,) = read(tokenizer, row, Supervised()).given
    assert trained(tokenizer, given) == texts
    assert text is None or tokenizer.decode(given.token_ids) == text


def test_template_that_breaks_prefixes_is_named_with_both_texts(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETS
    with pytest.raises(UserError) as error:
        read(tokenizer, {"messages": TURNS}, Supervised())
    message = str(error.value)
    assert "the chat template breaks prefixes: the first 3 of 5 messages end in" in message
    assert "cd<end>" in message
    assert "gone<end>" in message
    assert "algorithm.kind.train_on=last" in message
    (given,) = read(tokenizer, {"messages": TURNS}, Supervised(train_on="last")).given
    assert trained(tokenizer, given) == ["fgh<end>"]


def test_prompt_that_shares_a_token_with_its_answer_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["ab", *CHARACTERS], pattern=r"ab|[\s\S]", unknown="<unk>", eos_token="<eos>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="its tokens are others with what follows: 'xa' and 'bc' share a token"):
        read(tokenizer, {"prompt": "xa", "completion": "bc"}, Supervised())


CHOSEN, REJECTED = TURNS[4], {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TURNS[:4], "chosen": [CHOSEN], "rejected": [REJECTED], "margin": 2},
        {"prompt": TURNS[:4], "chosen": "fgh", "rejected": "a", "margin": 2},
        {"chosen": TURNS, "rejected": [*TURNS[:4], REJECTED], "margin": 2},
        {"prompt": "ignored", "chosen": TURNS, "rejected": [*TURNS[:4], REJECTED], "margin": 2},
    ],
)
def test_pairs_have_one_prompt_and_two_answers(tokenizer: Any, row: object) -> None:
    prompt = read(tokenizer, row, DPO())
    assert [trained(tokenizer, one) for one in prompt.given] == [["fgh<end>"], ["a<end>"]]
    assert prompt.worth == 2.0
    asked = tokenizer.apply_chat_template(TURNS[:4], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(prompt.token_ids) == asked


@pytest.mark.parametrize(("label", "worth"), [(True, 1.0), (False, -1.0), (1, 1.0), (0, -1.0)])
def test_labels_become_signs(tokenizer: Any, label: object, worth: float) -> None:
    assert read(tokenizer, {"prompt": "a", "completion": "b", "label": label}, KTO()).worth == worth


@pytest.mark.parametrize(
    ("row", "kind", "problem"),
    [
        (
            {"question": "a"},
            Supervised(),
            "has none of 'messages', 'answer', 'completion' and 'text'",
        ),
        ({"prompt": "a", "chosen": "b"}, DPO(), "has no 'rejected', which algorithm.kind needs of its rows"),
        ({"chosen": "b", "rejected": "c"}, DPO(), "has no 'prompt', and 'chosen' is not a whole conversation"),
        ({"prompt": "a", "completion": " "}, Supervised(), "the answer is empty"),
        ({"messages": TURNS[:2]}, Supervised(), "has no message of the assistant to train on"),
        ({"prompt": "a", "completion": "b" * 99}, Supervised(), "the row has 101 tokens with its answer, above"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, KTO(), "'label' is a string, not a number"),
    ],
)
def test_rows_that_cannot_train_are_named(tokenizer: Any, row: object, kind: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read(tokenizer, row, kind, max_prompt_tokens=60)


def test_columns_of_other_names_are_read(tokenizer: Any) -> None:
    row = {"question": "ab", "response": "cd"}
    (given,) = read(tokenizer, row, Supervised(), prompt_key="question", answer_key="response").given
    assert trained(tokenizer, given) == ["cd<eos>"]
