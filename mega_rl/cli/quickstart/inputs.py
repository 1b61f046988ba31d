"""Files of every quickstart task: rows, a folder as on the Hub, a tokenizer, a fresh model."""

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


def write_folder(
    folder: Path, card: str, files: Mapping[str, Sequence[Row]], *, force: bool = False
) -> dict[Path, int]:
    """Write files and a card as a repository of the Hub has them; return the rows by file.

    Raises UserError, before anything is written, for a file that exists, unless `force` is set.
    """
    paths = {folder / name: rows for name, rows in files.items()}
    if not force and (taken := [file for file in (folder / "README.md", *paths) if file.exists()]):
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    for file, rows in paths.items():
        make_folder(file.parent)
        if file.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        else:
            write_rows(file, rows)
    replace_text(folder / "README.md", card)
    return {file: len(rows) for file, rows in paths.items()}


def vocabulary_of(texts: Iterable[str], pattern: str) -> list[str]:
    """Return the special tokens and all tokens of the texts, filled up to a multiple of 8."""
    tokens = [PAD, EOS, UNK, *sorted({token for text in texts for token in re.findall(pattern, text)})]
    return [*tokens, *(f"<unused {number}>" for number in range(-len(tokens) % 8))]


def write_fresh_model(folder: Path, tokens: Sequence[str], pattern: str, *, max_positions: int, seed: int) -> None:
    """Write a Qwen3 with random weights of a seed (safetensors, FP32), and a tokenizer of whole tokens.

    The model has two layers of width 128, divisible by tp=2 and by pp=2. The tokenizer cuts a text by the pattern and
    adds no special tokens. The caller's random state stays as it was.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        # The usual 0.02 suits widths of thousands; at width 128 the first hundred steps would learn nothing.
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    embedding = model.model.embed_tokens.weight.data
    embedding[ids[PAD]] = embedding.mean(dim=0)  # transformers leaves zeros, whose gradient is huge
    model.generation_config = GenerationConfig(eos_token_id=ids[EOS], pad_token_id=ids[PAD])
    disable_progress_bar()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="right",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
