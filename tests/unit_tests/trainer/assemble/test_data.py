"""The tokenizer of a run gives rewards the texts that the settings ask for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from mega_rl.data.build import PromptReader
from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserErrors
from mega_rl.trainer.assemble.data import Tokens, load_data, prompt_line, read_tokens
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the special tag <49>, and <48> among the others."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder, num_hidden_layers=1)
    write_digit_tokenizer(folder, vocab_size=50)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<49>"]})
    tokenizer.save_pretrained(folder)
    return folder


def tokens_of(model: Path, *settings: str) -> Tokens:
    config = load(None, [f"model.path={model}", *settings])
    skips = config.reward.skip_special_tokens
    return read_tokens(model, config.data.chat, config.rollout, skip_special_tokens=skips)


def test_rewards_read_special_tokens_where_they_are_asked_for(model: Path) -> None:
    """All dumps show them, and either text the tag that is not special."""
    ids = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(["<48>", "<49>", "7", "<49>"])
    default, shown = tokens_of(model), tokens_of(model, "reward.skip_special_tokens=false")
    assert default.decode(ids) == "<48>7"
    assert shown.decode(ids) == default.render(ids) == shown.render(ids) == "<48><49>7<49>"


@pytest.mark.parametrize("template", ["auto", "true", "false", ""])
@pytest.mark.parametrize("has_template", [True, False])
def test_chat_template_is_used_where_prompts_are_messages(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, has_template: bool
) -> None:
    """auto is the default: a string stays as it is, and one warning names the setting where there is a template."""
    given = [f"data.chat.template={template}"] if template else []
    config = load(None, [f"model.path={model}", "data.max_prompt_tokens=99", *given])
    tokens = tokens_of(model, *given)
    tokens.tokenizer.bos_token = "<0>"
    if has_template:
        tokens.tokenizer.chat_template = "{% for m in messages %}1+{{ m.content }}{% endfor %}="
    rows = ['{"prompt": "3", "answer": "1"}', '{"prompt": [{"role": "user", "content": "3"}], "answer": "2"}']

    def texts(*lines: str) -> list[str]:
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        own = with_settings(config, {"data.train_files": [str(tmp_path / "a.jsonl")]})
        prompts, _ = load_data(PromptReader(own.data, tokens.tokenizer, 50, RewardColumns()), {}, tokens, seed=0)
        assert prompt_line(tokens, prompts).startswith("plain text, " if not prompts[0].messages else "chat")
        return [tokens.render(prompt.token_ids) for prompt in prompts]

    with caplog.at_level(logging.WARNING):
        if template == "true" and not has_template:
            with pytest.raises(UserErrors, match="chat_template"):
                texts(rows[0])
            return
        assert texts(rows[0]) == ["1+3=" if template == "true" else "3"]
    is_warned = has_template and template in ("auto", "")
    assert sum("data.chat.template=true renders each" in line for line in caplog.messages) == is_warned
    if template == "false" or not has_template:
        with pytest.raises(
            UserErrors, match=r"is a list of messages, which needs data\.chat\.template=true or auto, and a tok"
        ):
            texts(rows[1])
        return
    assert texts(rows[1]) == ["1+3="]
    assert texts(*rows)[1] == "1+3="
