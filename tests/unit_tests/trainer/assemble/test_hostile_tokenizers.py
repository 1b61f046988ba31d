"""Tokenizers and chat templates of hostile folders: one line, before a library reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl.errors import UserError
from mega_rl.trainer.assemble.data import load_tokenizer


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "decoder": None}
    return tokenizer | {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "post_processor": None}


def folder(root: Path, tokenizer: str, template: str = "") -> Path:
    (root / "tokenizer.json").write_text(tokenizer)
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if template:
        (root / "chat_template.jinja").write_text(template)
    return root


GROWTH = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["model"]["vocab"].update(c=-1), "token id -1"),
        (lambda c: c["model"]["vocab"].update(c=2**31 - 1), "token id 2147483647"),
        (lambda c: c["added_tokens"].append({"id": 2**40, "content": "x"}), "token id 1099511627776"),
        (lambda c: c.update(added_tokens=[{"id": i, "content": f"<{i}>"} for i in range(70_000)]), "70000 added"),
        (lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [GROWTH] * 3}), "over 64 times"),
    ],
)
def test_hostile_tokenizers_are_refused(
    tmp_path: Path, content: dict[str, Any], edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    changed = json.loads(json.dumps(content))
    edit(changed)
    with pytest.raises(UserError, match=words):
        load_tokenizer(folder(tmp_path, json.dumps(changed)))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not JSON"):
        load_tokenizer(folder(tmp_path, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 9**9**9 }}", "Pow"),
        ("\n{{ 'x' * 10000000000 }}", "line 2 of its chat template has the number 10000000000"),
        ("{% import 'os' as os %}", "Import"),
        ("{% include '/etc/passwd' %}", "Include"),
        ("{% if %}", "not a Jinja template"),
    ],
)
def test_hostile_templates_are_refused(tmp_path: Path, content: dict[str, Any], template: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_tokenizer(folder(tmp_path, json.dumps(content), template))


def test_usual_tokenizers_are_read(tmp_path: Path, content: dict[str, Any]) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert load_tokenizer(folder(tmp_path, json.dumps(content), template)).chat_template == template
