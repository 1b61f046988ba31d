"""The tokenizer of a run gives rewards the texts that the settings ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mega_rl.assemble.data import Tokens, read_tokens
from mega_rl.config.loader import load
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
    return read_tokens(load(None, [f"model.path={model}", *settings]), is_writer=False)


def test_rewards_read_special_tokens_where_they_are_asked_for(model: Path) -> None:
    """All dumps show them, and either text the tag that is not special."""
    ids = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(["<48>", "<49>", "7", "<49>"])
    default, shown = tokens_of(model), tokens_of(model, "reward.skip_special_tokens=false")
    assert default.decode(ids) == "<48>7"
    assert shown.decode(ids) == default.render(ids) == shown.render(ids) == "<48><49>7<49>"
