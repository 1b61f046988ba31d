"""Tokenizers that give the same token ids have one hash, whatever their files look like; others are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl.data.tokenizer_identity import TokenizerIdentity, read_tokenizer
from tests.helpers.models import write_digit_tokenizer

BPE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 5, "content": "<a>", "special": True, "normalized": False, "lstrip": False},
        {"id": 6, "content": "<b>", "special": False, "normalized": False},
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": {"type": "ByteLevel", "trim_offsets": False},
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "dropout": None,
        "byte_fallback": False,
        "unk_token": None,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4},
        "merges": [["a", "b"], ["ab", "c"]],
    },
}


def tokenizer(
    folder: Path, content: dict[str, Any], change: Callable[[dict[str, Any]], object] = id
) -> TokenizerIdentity:
    """The identity of a tokenizer.json, changed in place before it is written."""
    content = json.loads(json.dumps(content))
    change(content)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    actual = read_tokenizer(folder)
    assert actual is not None
    return actual


def reverse(content: dict[str, Any]) -> None:
    for part in (content, content["model"], content["model"]["vocab"]):
        entries = list(part.items())[::-1]
        part.clear()
        part.update(entries)
    content["added_tokens"].reverse()


SAME: dict[str, Callable[[dict[str, Any]], object]] = {
    "listing order": reverse,
    "padding": lambda c: c.update(padding={"strategy": {"Fixed": 8}}, truncation={"max_length": 3}, version="2"),
    "merges as text": lambda c: c["model"].update(merges=["a b", "ab c"]),
    "options left out": lambda c: [c["model"].pop(name) for name in ("dropout", "byte_fallback", "unk_token")],
    "empty prefixes": lambda c: c["model"].update(continuing_subword_prefix="", end_of_word_suffix=""),
    "decoder": lambda c: c.update(decoder=None),
    "special for decoding": lambda c: c["added_tokens"][0].update(special=False),
    "added ones in the vocabulary": lambda c: c["model"]["vocab"].update({"<a>": 5}),
    "steps that move offsets": lambda c: c.update(post_processor=None),
    "a sequence of them": lambda c: c.update(
        post_processor={"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "ByteLevel"}]}
    ),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_what_does_not_decide_token_ids(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    one, other = tokenizer(tmp_path / "one", BPE), tokenizer(tmp_path / "other", BPE, change)
    assert one.digest == other.digest
    assert one.difference(other) == ""
    assert len(one.digest) == 64
    assert other.largest_id == 6


TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<a>", "type_id": 0}}]}
OTHER: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a token": (
        lambda c: c["model"].update(vocab={"a": 0, "b": 1, "é": 2, "ab": 3, "abc": 4}),
        "token id 2 is 'é' here, 'c' there",
    ),
    "two ids": (lambda c: c["model"]["vocab"].update(ab=4, abc=3), "token id 3 is 'abc' here, 'ab' there"),
    "one more": (
        lambda c: c["added_tokens"].append({"id": 7, "content": "<think>"}),
        "it has a vocabulary of 8 entries, not 7: token id 7 is '<think>' here, nothing there",
    ),
    "one less": (
        lambda c: c["model"]["vocab"].pop("b"),
        "it has a vocabulary of 6 entries, not 7: token id 1 is nothing here, 'b' there",
    ),
    "an added one": (lambda c: c["added_tokens"][1].update(content="<c>"), "token id 6 is '<c>' here, '<b>' there"),
    "its white space": (lambda c: c["added_tokens"][1].update(lstrip=True), "they differ in added_tokens"),
    "merges": (lambda c: c["model"]["merges"].reverse(), "they differ in model.merges"),
    "options": (lambda c: c["model"].update(byte_fallback=True, dropout=0.1), "in model.byte_fallback, model.dropout"),
    "kind": (lambda c: c["model"].update(type="WordPiece"), "they differ in model.type"),
    "normalizer": (lambda c: c.update(normalizer={"type": "NFKC"}), "they differ in normalizer"),
    "pre_tokenizer": (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "they differ in pre_tokenizer"),
    "post_processor": (lambda c: c.update(post_processor=TEMPLATE), "they differ in post_processor"),
    "a step in a sequence": (
        lambda c: c.update(post_processor={"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}),
        "they differ in post_processor",
    ),
}


@pytest.mark.parametrize(("change", "what"), OTHER.values(), ids=OTHER.keys())
def test_what_does(tmp_path: Path, change: Callable[[dict[str, Any]], object], what: str) -> None:
    one, other = tokenizer(tmp_path / "one", BPE), tokenizer(tmp_path / "other", BPE, change)
    assert one.digest != other.digest
    assert other.difference(one).endswith(what)


def test_it_is_the_tokenizers_librarys_view(tmp_path: Path) -> None:
    """Loading and saving, with padding set on the way, changes no id and so no hash; a token more changes both."""
    from tokenizers import Tokenizer

    write_digit_tokenizer(tmp_path, vocab_size=50)
    before = read_tokenizer(tmp_path)
    assert before is not None
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert before.tokens == {number: token for token, number in loaded.get_vocab().items()}
    loaded.enable_padding(length=5)
    loaded.enable_truncation(3)
    loaded.save(str(tmp_path / "tokenizer.json"))
    after = read_tokenizer(tmp_path)
    assert after is not None
    assert after.digest == before.digest
    loaded.add_tokens(["<new>"])
    loaded.save(str(tmp_path / "tokenizer.json"))
    more = read_tokenizer(tmp_path)
    assert more is not None
    assert more.difference(before).startswith("it has a vocabulary of 51 entries, not 50: token id 50 is '<new>' here")


def files(folder: Path, **contents: str) -> TokenizerIdentity | None:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name.replace("_json", ".json").replace("_txt", ".txt").replace("_model", ".model")).write_text(
            content
        )
    return read_tokenizer(folder)


def test_folders_without_tokenizer_json(tmp_path: Path) -> None:
    assert files(tmp_path / "none", config_json="{}") is None
    made = [
        files(tmp_path / "0", vocab_json='{"a": 0, "b": 1}', merges_txt="a b"),
        files(tmp_path / "1", vocab_json='{"b": 1,\n"a": 0}', merges_txt="a b"),
        files(tmp_path / "2", vocab_json='{"a": 0, "b": 1}', merges_txt="b a"),
        files(tmp_path / "3", vocab_json='{"a": 0, "c": 1}', merges_txt="a b"),
        files(tmp_path / "4", vocab_json='{"a": 0, "b": 1}', merges_txt="a b", added_tokens_json='{"<x>": 2}'),
        files(tmp_path / "5", tokenizer_model="\x00bytes"),
        files(tmp_path / "6", tokenizer_model="\x00bytes", vocab_txt="a\nb\n"),
        files(tmp_path / "7", vocab_txt="a\nb\n"),
    ]
    one, order, merges, tokens, added, model, with_more, words = (each for each in made if each is not None)
    assert order.digest == one.digest
    assert merges.difference(one) == "the tokens are the same, but they differ in merges.txt"
    assert tokens.difference(one) == "token id 1 is 'c' here, 'b' there"
    assert added.difference(one).startswith(
        "it is made of vocab.json + merges.txt + added_tokens.json here, of vocab.json"
    )
    assert added.largest_id == 2
    assert with_more.digest == model.digest
    assert model.largest_id == -1  # a SentencePiece model is not opened
    assert words.tokens == {0: "a", 1: "b"}
