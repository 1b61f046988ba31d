"""The small model of a lockstep, its tokenizer and its prompts, in files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor
from transformers import Qwen3Config

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError
from mega_rl.verify.rl.inputs import CHARACTERS, EOS, STAND_IN, LockstepRun, rows
from mega_rl.verify.tiny_models import write_tokenizer
from mega_rl.verify.twin import random_tensors, shrink

SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD = SPECIAL.index("<pad>")
VOCABULARY = (*SPECIAL, *CHARACTERS)
# The architecture without a model: that of the quickstart, with grouped heads.
ARCHITECTURE = {
    "model_type": Qwen3Config.model_type,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "vocab_size": len(VOCABULARY),
    "tie_word_embeddings": False,
}


def read_architecture(run: LockstepRun) -> HFConfig:
    """Return the architecture of a run's model before it is shrunk. Raises UserError."""
    return parse_hf_config(ARCHITECTURE, where=STAND_IN) if run.source is None else read_hf_config(run.source)


def write_inputs(run: LockstepRun, folder: Path, *, multiple: int) -> tuple[Config, HFConfig]:
    """Write the shrunk random model, its tokenizer and the prompts; return the config with them.

    multiple: its number of layers is one of it, for pipelines. An algorithm that learns from a reference gets another
    model of random weights as model.ref_path. Raises UserError for a model that cannot be shrunk.
    """
    seed = run.config.trainer.seed
    hf = read_architecture(run)
    where = str(run.source or STAND_IN)
    if FAMILIES[hf.family].stand_in:
        raise UserError(
            f"model.path={where}: transformers has no model of model_type={hf.family} for the independent trainer; "
            "give the config of another family"
        )
    twin = shrink(hf, where=where, multiple=multiple, narrow=True)
    raw = {**twin.raw, "vocab_size": len(VOCABULARY), "eos_token_id": EOS, "pad_token_id": PAD}
    small = parse_hf_config(raw, where=f"{where}, shrunk")
    model, config_file, prompts = folder / "model", folder / "config.json", folder / "prompts.jsonl"
    config_file.write_text(json.dumps(raw), encoding="utf-8")
    write_checkpoint(model, _with_zero_row(random_tensors(small, seed=seed)), files={"config.json": config_file})
    pad, eos, unknown = SPECIAL
    write_tokenizer(model, VOCABULARY, unknown=unknown, pad_token=pad, eos_token=eos, unk_token=unknown)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows(seed)), "utf-8")
    named: dict[str, object] = {"model.path": str(model), "data.train_files": [str(prompts)]}
    named["data.source"] = "files"
    if ADVANTAGE.needs(run.config, "needs_reference"):
        teacher = folder / "teacher"
        write_checkpoint(teacher, random_tensors(small, seed=seed + 1), files={"config.json": config_file})
        write_tokenizer(teacher, VOCABULARY, unknown=unknown, pad_token=pad, eos_token=eos, unk_token=unknown)
        named["model.ref_path"] = str(teacher)
    return with_settings(run.config, named), small


def _with_zero_row(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with a zero row for padding, as transformers writes it: nobody samples it."""
    for name, tensor in tensors:
        if name.endswith("embed_tokens.weight"):
            tensor[PAD] = 0.0
        yield name, tensor
