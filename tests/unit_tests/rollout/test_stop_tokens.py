"""A model whose responses cannot end is refused, and one that may run over its end gets a warning with the setting."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mega_rl.errors import UserError
from mega_rl.rollout.tokens import check_stop_tokens, name_stop_tokens
from tests.helpers.inputs import qwen3_config
from tests.helpers.models import write_digit_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}=+{% endfor %}{% if add_generation_prompt %}*{% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose eos_token is <eos>, id 1; "=" (14) is a special token too."""
    write_digit_tokenizer(tmp_path, vocab_size=50)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["="]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, generation: Any = None, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(qwen3_config() | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))


def check(
    folder: Path, caplog: pytest.LogCaptureFixture, *, stop: list[int] | None = None, chat: bool = False
) -> tuple[tuple[int, ...], list[str]]:
    """(stop ids, warnings) of a run of this model."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        actual = check_stop_tokens(folder, tokenizer, extra=stop or [], chat_template=chat, is_writer=True)
    return actual, [record.getMessage() for record in caplog.records if record.name.startswith("mega_rl")]


def test_a_model_that_ends_where_its_tokenizer_does(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(model, eos_token_id=1)
    assert check(model, caplog) == ((1,), [])
    write_config(model, [1, 14], eos_token_id=None)
    actual, lines = check(model, caplog, chat=True)
    assert (actual, lines) == ((1, 14), [])
    assert name_stop_tokens(AutoTokenizer.from_pretrained(model), actual) == "<eos> (id 1) or = (id 14)"


def test_a_tokenizer_that_ends_elsewhere(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(model, eos_token_id=5)
    actual, lines = check(model, caplog, stop=[7])
    assert actual == (5, 7)
    assert lines[0] == (
        "<eos> (id 1) ends a sequence of the tokenizer and does not end a response; if the model is to stop there, set "
        "rollout.stop_token_ids=[7,1]"
    )


def test_a_chat_template_that_closes_turns_with_another_token(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of base models, whose end of sequence is not that of a turn; without the template it is no matter."""
    write_config(model, eos_token_id=1)
    _, lines = check(model, caplog, chat=True)
    assert lines[0].startswith("= (id 14) ends a turn of the chat template and does not end a response; ")
    assert lines[0].endswith("set rollout.stop_token_ids=[14]")
    assert check(model, caplog)[1] == []
    assert check(model, caplog, chat=True, stop=[14])[1] == []


def test_nothing_ends_a_response(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(model, eos_token_id=None)
    with pytest.raises(UserError, match=r"no token ends a response .*<eos> \(id 1\) ends a sequence of the tokenizer"):
        check(model, caplog)
    with pytest.raises(UserError, match=r"set rollout.stop_token_ids=\[14,1\]"):
        check(model, caplog, chat=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"rollout.stop_token_ids=\[\]"):
        check(model, caplog)
    assert check(model, caplog, stop=[7])[0] == (7,)
