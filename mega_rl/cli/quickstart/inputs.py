"""Files of every quickstart task: rows, a folder as on the Hub, a fresh model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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
- config_name: {config}
  default: true
  data_files:
  - split: train
    path: {train}
  - split: test
    path: {test}
---

# {text}
"""


def write_folder(
    folder: Path, text: str, train: Sequence[Row], test: Sequence[Row], *, config: str, file: str, force: bool = False
) -> dict[Path, int]:
    """Write rows and a card like a repository of the Hub; return the rows by file.

    text: title and body of the card. file: name of a split's file, as "main/{split}.parquet".
    Raises UserError, before anything is written, for a file that exists, unless `force` is set.
    """
    names = {"train": file.format(split="train"), "test": file.format(split="test")}
    paths = {folder / names["train"]: train, folder / names["test"]: test}
    if not force and (taken := [path for path in (folder / "README.md", *paths) if path.exists()]):
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    for path, rows in paths.items():
        make_folder(path.parent)
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            write_rows(path, rows)
    replace_text(folder / "README.md", CARD.format(config=config, text=text, **names))
    return {path: len(rows) for path, rows in paths.items()}


def vocabulary_of(texts: Iterable[str], pattern: str) -> list[str]:
    """Return the special tokens and the texts' tokens, filled up to a multiple of 8."""
    tokens = [PAD, EOS, UNK, *sorted({token for text in texts for token in re.findall(pattern, text)})]
    return [*tokens, *(f"<unused {number}>" for number in range(-len(tokens) % 8))]


def write_fresh_model(folder: Path, tokens: Sequence[str], pattern: str, *, max_positions: int, seed: int) -> None:
    """Write a random Qwen3 of two layers, and a tokenizer that cuts by the pattern."""
    from transformers import GenerationConfig

    from mega_rl.verify.tiny_models import fresh_qwen3, write_tokenizer

    pad, eos = tokens.index(PAD), tokens.index(EOS)
    model = fresh_qwen3(
        len(tokens), width=128, initializer_range=0.05, max_positions=max_positions, eos=eos, pad=pad, seed=seed
    )
    embedding = model.model.embed_tokens.weight.data
    embedding[pad] = embedding.mean(dim=0)  # transformers leaves zeros, whose gradient is huge
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK, "padding_side": "right"}
    settings = {**special, "model_max_length": max_positions, "clean_up_tokenization_spaces": False}
    write_tokenizer(folder, tokens, pattern=pattern, unknown=UNK, **settings)
