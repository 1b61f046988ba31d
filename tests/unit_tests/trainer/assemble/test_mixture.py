"""A mixture's prompts: columns, system prompt and template of each source, numbers over all, problems of every one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.loader import load
from mega_rl.config.schema import Config
from mega_rl.data.build import PromptReader
from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserErrors
from mega_rl.trainer.assemble.data import Tokens, load_data, read_tokens
from mega_rl.types import Prompt
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint

KEY = "data.mixture.sources"
TEMPLATE = "{% for turn in messages %}{{ turn.content }}={% endfor %}{{ style or '*' }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_tiny_checkpoint(folder / "m", num_hidden_layers=1)
    write_digit_tokenizer(folder / "m", vocab_size=50)
    (folder / "m" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    sums = [{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
    words = [{"question": f"word {n}", "target": str(n)} for n in range(12)]
    for name, rows in {"sums": sums, "words": words, "bad": [{"prompt": 1, "answer": "1"}, {"prompt": ""}]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def config_of(folder: Path, sources: dict[str, Any], **settings: Any) -> Config:
    chat = {"data.chat.template": True, "data.chat.system_prompt": "a"}
    run = {"model.path": str(folder / "m"), "trainer.prompts_per_step": 4}
    for source in sources.values():
        source["files"] = str(folder / source["files"])
    return load(None, {**run, **chat, **settings, KEY: sources})


def loaded(config: Config) -> tuple[Tokens, list[Prompt]]:
    tokens = read_tokens(Path(config.model.path), config.data.chat, config.rollout, skip_special_tokens=True)
    reader = PromptReader(config.data, tokens.tokenizer, 50, RewardColumns())
    return tokens, load_data(reader, {}, tokens, seed=0)[0]


def two(folder: Path, **settings: Any) -> Config:
    words = {"files": "words.jsonl", "prompt_key": "question", "answer_key": "target"}
    sources: dict[str, Any] = {
        "sums": {"files": "sums.jsonl", "template_kwargs": {"style": "-"}},
        "words": {**words, "system_prompt": ""},
    }
    return config_of(folder, sources, **settings)


def test_each_source_has_columns_and_a_template_of_its_own(folder: Path) -> None:
    tokens, prompts = loaded(two(folder))
    assert [prompt.index for prompt in prompts] == list(range(16))
    assert [prompt.source for prompt in prompts] == ["sums"] * 4 + ["words"] * 12
    assert tokens.decode(prompts[2].token_ids) == "a=2+1=-"
    assert tokens.decode(prompts[7].token_ids) == "word 3=*"
    assert (prompts[2].answer, prompts[7].answer) == ("3", "3")


def _plain(folder: Path) -> dict[str, Any]:
    return {"model.path": str(folder / "m"), "trainer.prompts_per_step": 4}


def test_problems_of_every_source_are_listed(folder: Path) -> None:
    config = config_of(folder, {"first": {"files": "bad.jsonl"}, "second": {"files": "none.jsonl"}})
    with pytest.raises(UserErrors) as caught:
        loaded(config)
    lines = list(caught.value.problems)
    assert lines[0].startswith(f"{KEY}.first: {folder}/bad.jsonl:1: 'prompt' is a number")
    assert lines[1].startswith(f"{KEY}.first: {folder}/bad.jsonl:2: has no 'answer'")
    assert lines[-1].startswith(f"{KEY}.second: {folder}/none.jsonl: no such file")
