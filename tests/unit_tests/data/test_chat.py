"""Chat templates with a run's own variables and system prompt give what transformers gives."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mega_rl.data import chat
from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RowColumns
from mega_rl.data.prompts import PromptReading, load_prompts
from mega_rl.errors import UserError
from mega_rl.types import Prompt
from tests.helpers.models import write_digit_tokenizer

# In the style of published ones: tools before the system message, thoughts that a variable leaves out.
TEMPLATE = """
{%- if tools %}tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}.{% endif %}
{%- for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}
{{- message.role + '=' + message.content + '.' }}
{%- endfor %}
{%- if add_generation_prompt %}assistant={% generation %}{% endgeneration %}
{%- if enable_thinking is defined and enable_thinking is false %}no thoughts. {% endif %}{% endif %}
{%- set depth = depth | default(3) %}{{- depth * '-' }}
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_digit_tokenizer(folder, vocab_size=50)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "2*2="}]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": own, "answer": "4"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(file: Path, tokenizer: Any, **settings: Any) -> list[Prompt]:
    template = ChatTemplate(tokenizer, **settings)
    return load_prompts([file], PromptReading(tokenizer, 50, RowColumns("prompt", "answer"), template, 200))


@pytest.mark.parametrize(
    "kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True, "depth": 2, "tools": TOOLS}]
)
def test_prompts_are_those_of_transformers(file: Path, tokenizer: Any, kwargs: dict[str, Any]) -> None:
    prompts = load(file, tokenizer, kwargs=kwargs)
    for prompt in prompts:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)
        assert list(prompt.token_ids) == expected
    text = tokenizer.decode(prompts[0].token_ids)
    assert ("no thoughts." in text) == (kwargs.get("enable_thinking") is False)
    assert text.startswith("tools add.user=1+1=.") == ("tools" in kwargs)


def test_a_system_prompt_comes_first_unless_the_row_has_its_own(file: Path, tokenizer: Any) -> None:
    plain = load(file, tokenizer)
    one, two = load(file, tokenizer, system_prompt="be short")
    assert one.messages == (("system", "be short"), ("user", "1+1="))
    assert tokenizer.decode(one.token_ids).startswith("system=be short.user=1+1=.")
    assert one.text == "1+1="
    assert two == plain[1]
    assert two.messages[0] == ("system", "own")


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer whose template writes the date, as those of Llama 3.2 and GPT-OSS do."""
    folder = tmp_path_factory.mktemp("dated")
    write_digit_tokenizer(folder, vocab_size=50)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d*%m*%Y') }}{{ messages[-1].content }}")
    return AutoTokenizer.from_pretrained(folder)


def test_a_fixed_date_makes_the_same_prompts_on_every_day(file: Path, dated: Any) -> None:
    today = f"{datetime.now():%d*%m*%Y}"
    (prompt, _), (fixed, _) = load(file, dated), load(file, dated, date=date(2026, 1, 31))
    assert dated.decode(prompt.token_ids) in (f"{today}1+1=", f"{datetime.now():%d*%m*%Y}1+1=")
    assert dated.decode(fixed.token_ids) == "31*01*20261+1="


def test_a_template_that_takes_all_memory_is_an_error_of_its_rows(file: Path, tmp_path: Path) -> None:
    write_digit_tokenizer(tmp_path, vocab_size=50)
    (tmp_path / "chat_template.jinja").write_text("{% set a = 'x' * 9999999 %}{{ a * 9999999 }}")
    with pytest.raises(UserError, match="chat template refuses it: MemoryError"):
        load(file, AutoTokenizer.from_pretrained(tmp_path))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% if j < 0 %}x{% endif %}{% endfor %}{% endfor %}"


def test_endless_template_stops_the_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_digit_tokenizer(tmp_path, vocab_size=50)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    monkeypatch.setattr(chat, "DEADLINE_S", 0.5)
    with pytest.raises(UserError, match=r"has not rendered one conversation in 0\.5 s"):
        load(file, AutoTokenizer.from_pretrained(tmp_path), of_strings=True)
    (tmp_path / "chat_template.jinja").write_text("a{{ messages | length }}")
    assert [one.text for one in load(file, AutoTokenizer.from_pretrained(tmp_path))] == ["1+1=", "2*2="]
