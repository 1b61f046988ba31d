"""Files of every quickstart task: rows, a folder as on the Hub, a fresh model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mega_rl.disk import make_folder, replace_text
from mega_rl.errors import UserError

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WORDS = r"[0-9]| ?[A-Za-z]+|[\s\S]"  # pattern of a token; a word has the space before it
Row = Mapping[str, str]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


CARD = """---
language: en
license: apache-2.0
task_categories:
- text-generation
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-00000-of-00001.parquet
  - split: test
    path: main/test-00000-of-00001.parquet
---

# {text}
"""


def write_folder(
    folder: Path, text: str, train: Sequence[Row], test: Sequence[Row], *, force: bool = False
) -> dict[Path, int]:
    """Write rows and a card like a repository of the Hub; return the rows by file.

    text: title and body of the card. Raises UserError, before anything is written, for a file that exists, unless
    `force` is set.
    """
    import pyarrow
    import pyarrow.parquet

    splits = {"train": train, "test": test}
    paths = {folder / f"main/{split}-00000-of-00001.parquet": rows for split, rows in splits.items()}
    if not force and (taken := [path for path in (folder / "README.md", *paths) if path.exists()]):
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    for path, rows in paths.items():
        make_folder(path.parent)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    replace_text(folder / "README.md", CARD.format(text=text))
    return {path: len(rows) for path, rows in paths.items()}


class TaskTokens(NamedTuple):
    """Tokens of a task's texts, and how long a text is at most."""

    names: Sequence[str]
    pattern: str  # matches a token
    max_positions: int

    @classmethod
    def of_texts(cls, texts: Iterable[str], pattern: str, max_positions: int) -> TaskTokens:
        """Return the special tokens and the texts' tokens, filled up to a multiple of 8."""
        names = [PAD, EOS, UNK, *sorted({token for text in texts for token in re.findall(pattern, text)})]
        unused = (f"<unused {number}>" for number in range(-len(names) % 8))
        return cls([*names, *unused], pattern, max_positions)


def write_fresh_model(folder: Path, tokens: TaskTokens, *, seed: int) -> None:
    """Write a random Qwen3 of two layers, and a tokenizer of the tokens."""
    from transformers import GenerationConfig

    from mega_rl.verify.tiny_models import fresh_qwen3, write_tokenizer

    names, pattern, most = tokens
    pad, eos = names.index(PAD), names.index(EOS)
    model = fresh_qwen3(len(names), width=128, initializer_range=0.05, max_positions=most, eos=eos, pad=pad, seed=seed)
    embedding = model.model.embed_tokens.weight.data
    embedding[pad] = embedding.mean(dim=0)  # transformers leaves zeros, whose gradient is huge
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK, "padding_side": "right"}
    settings = {**special, "model_max_length": most, "clean_up_tokenization_spaces": False}
    write_tokenizer(folder, names, pattern=pattern, unknown=UNK, **settings)
