"""Identity of a tokenizer: all that decides its token ids, from a checkpoint's files, with hash.

Two models share token ids only if their tokenizers agree. Imports neither torch nor a tokenizer library.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from mega_rl.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # each of them makes a tokenizer
_WITHOUT_JSON = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
_ADDED = "added_tokens.json"
MAX_BYTES, MAX_ADDED, MAX_GROWTH = 256 << 20, 1 << 16, 64
_TEXT_STEPS = ("normalizer", "pre_tokenizer", "decoder")


@dataclass(frozen=True)
class TokenizerIdentity:
    """Token ids of a tokenizer. Equal `digest` means equal ids, in any order of the files."""

    source: str  # "tokenizer.json", or "vocab.json + merges.txt"
    parts: Mapping[str, Any]  # part of the source -> its content in canonical form: {"model.type": "BPE", ...}
    tokens: Mapping[int, str]  # id -> token, added ones too; empty if the files do not list them

    @property
    def largest_id(self) -> int:
        """Return the largest token id; -1 if the files list no tokens."""
        return max(self.tokens, default=-1)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical form, hex."""
        text = json.dumps([self.source, self.parts], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: TokenizerIdentity) -> str:
        """Describe how this tokenizer ("here") differs from `other` ("there"); "" if it does not."""
        if self.digest == other.digest:
            return ""
        if self.source != other.source:
            return f"it is made of {self.source} here, of {other.source} there"
        here, there = len(self.tokens), len(other.tokens)
        sizes = "" if here == there else f"it has a vocabulary of {here} entries, not {there}: "
        for number in sorted(self.tokens.keys() | other.tokens.keys()):
            if self.tokens.get(number) != other.tokens.get(number):
                own, others = (repr(one.tokens[number]) if number in one.tokens else "nothing" for one in (self, other))
                return f"{sizes}token id {number} is {own} here, {others} there"
        names = sorted(self.parts.keys() | other.parts.keys())
        differing = [name for name in names if self.parts.get(name) != other.parts.get(name)]
        return f"the tokens are the same, but they differ in {', '.join(differing)}"


def read_tokenizer(folder: Path) -> TokenizerIdentity | None:
    """Return the tokenizer of a checkpoint folder; None without one. Raises UserError for damaged files."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return _of_tokenizer_json(read_json_object(path))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: not a tokenizer as the tokenizers library writes it; save it again") from None
    for names in _WITHOUT_JSON:
        if (folder / names[0]).is_file():
            return _of_files([folder / name for name in (*names, _ADDED) if (folder / name).is_file()])
    return None


def check_bounds(folder: Path) -> None:
    """Raise UserError for a tokenizer.json with which the tokenizers library would take all memory, or abort."""
    path = folder / "tokenizer.json"
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are allowed")
    content = read_json_object(path)
    identity = read_tokenizer(folder) if content else None
    if identity is None:
        return
    added, growth = len(content.get("added_tokens") or []), _growth([content.get(name) for name in _TEXT_STEPS])
    most = 2 * len(identity.tokens) + MAX_ADDED
    wrong = [number for number in identity.tokens if not 0 <= number < most]
    if wrong:
        raise UserError(f"{path}: token id {wrong[0]} of {len(identity.tokens)} tokens; ids are from 0 to {most - 1}")
    if added > MAX_ADDED or growth > MAX_GROWTH:
        what = f"{added} added tokens" if added > MAX_ADDED else "Replace steps that make a text over 64 times as long"
        raise UserError(f"{path}: {what}; at most {MAX_ADDED} tokens and {MAX_GROWTH} times are allowed")


def _growth(step: object) -> float:
    """Return the factor by which Replace steps in part of tokenizer.json can lengthen a text."""
    inner: list[object] = step if isinstance(step, list) else list(step.values()) if isinstance(step, dict) else []
    growth = math.prod(map(_growth, inner))
    if isinstance(step, dict) and step.get("type") == "Replace" and isinstance(step.get("content"), str):
        pattern = step.get("pattern")
        given = pattern.get("String") if isinstance(pattern, dict) else None
        growth *= max(1.0, len(step["content"]) / len(given or "x"))
    return growth


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON; download or copy it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object; download or copy it again")
    return content


def _of_tokenizer_json(content: Mapping[str, Any]) -> TokenizerIdentity:
    flags = ("single_word", "lstrip", "rstrip", "normalized")  # not `special`, which only matters for decoding
    added = [
        {"id": int(token["id"]), "content": token.get("content"), **{name: bool(token.get(name)) for name in flags}}
        for token in content.get("added_tokens") or []
    ]
    added.sort(key=itemgetter("id"))
    model = dict(content.get("model") or {})
    vocabulary = model.pop("vocab", {})
    ids = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
    tokens = {int(number): token for token, number in ids.items()}
    if isinstance(vocabulary, dict):
        # A token may be listed in both places or only among the added ones: its id is the same.
        again = {token["content"] for token in added if ids.get(token["content"]) == token["id"]}
        vocabulary = _by_id({token: number for token, number in ids.items() if token not in again})
    tokens |= {token["id"]: str(token["content"]) for token in added}
    if "merges" in model:  # older files join the two halves by a space
        model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    # Older versions of the library leave out options that are off; WordPiece without a prefix has "##".
    off = "" if model.get("type") == "BPE" else None
    parts = {f"model.{name}": value for name, value in model.items() if value not in (None, off) and value is not False}
    parts |= {"model.vocab": vocabulary, "added_tokens": added}
    parts |= {name: content.get(name) for name in ("normalizer", "pre_tokenizer")}
    parts["post_processor"] = _without_offsets(content.get("post_processor"))
    return TokenizerIdentity("tokenizer.json", parts, tokens)


def _by_id(ids: Mapping[str, int]) -> list[list[Any]]:
    """Return [tokens, ids] in id order; nearly sorted input and plain lists make it fast."""
    pairs = sorted(ids.items(), key=itemgetter(1, 0))
    return [[token for token, _ in pairs], [number for _, number in pairs]]


def _without_offsets(processor: Any) -> Any:
    """Return a post-processor without the steps that move offsets and add no token."""
    if not isinstance(processor, dict):
        return processor
    if processor.get("type") == "ByteLevel":
        return None
    if processor.get("type") != "Sequence":
        return processor
    kept = [step for step in map(_without_offsets, processor["processors"]) if step is not None]
    return {**processor, "processors": kept} if len(kept) > 1 else kept[0] if kept else None


def _of_files(files: list[Path]) -> TokenizerIdentity:
    parts: dict[str, Any] = {}
    tokens: dict[int, str] = {}
    for path in files:
        if path.suffix == ".json":
            ids = read_json_object(path)
            if not all(isinstance(number, int) for number in ids.values()):
                raise UserError(f"{path}: not a vocabulary of token to id; download or copy it again")
            parts[path.name] = _by_id(ids)
            tokens |= {number: token for token, number in ids.items()}
        else:
            content = path.read_bytes()
            parts[path.name] = hashlib.sha256(content).hexdigest()
            if path.name == "vocab.txt":
                tokens |= dict(enumerate(content.decode(errors="replace").splitlines()))
    return TokenizerIdentity(" + ".join(path.name for path in files), parts, tokens)
