"""Everything that can be found wrong before work starts: config, rules, and the files that the run will read.

Imports no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl.config.facts import ModelFacts
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config, DataConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf_config import read_hf_config
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline, uneven_pipeline
from mega_rl.parity.known_bugs import known_bug
from mega_rl.rollout.sglang.installation import require_sglang
from mega_rl.rollout.sglang.keys import Keys

# Families whose gradients are tested on every layout and whose rollouts are tested against transformers.
TRAINED = (
    "deepseek_v2", "deepseek_v3", "gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
NOT_SAMPLED = {
    "gpt_oss": "the embedded rollout engine has no attention sinks",
    "kimi_k2": "transformers, whose model the embedded rollout engine samples from, does not know it",
}
# Families whose model in SGLang 0.5.20 never reads tie_word_embeddings: its output layer would have no weights.
UNTIED_IN_SGLANG = ("glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
REWARD_FUNCTIONS = ("exact_match", "math_verify")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
DATA_SUFFIXES = (".jsonl", ".parquet")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def preflight(recipe: Path | None, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """The Config of a run that can start; `world_size` defaults to the launcher's WORLD_SIZE, else 1.

    Raises UserErrors with every mistake found, one line each.
    """
    config = load(recipe, overrides)
    checkpoints, problems = _checkpoints(config)
    found = check(
        config,
        world_size=launched_world_size() if world_size is None else world_size,
        models={key: _facts(checkpoint) for key, checkpoint in checkpoints.items()},
    )
    found += [*problems, *_pipeline(config, checkpoints), *_vocabularies(config, checkpoints), *_packages(config)]
    found += [*_servers(config, checkpoints), *_data(config.data), *_reward(config.reward.function), *_folders(config)]
    if found:
        raise UserErrors(found)
    return config


def launched_world_size() -> int:
    """Ranks that the launcher started, by its WORLD_SIZE; 1 without a launcher. Raises UserError."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"environment variable WORLD_SIZE={text!r}: needs a whole number of at least 1; unset it")
    return int(text)


# --- checkpoints


def _checkpoints(config: Config) -> tuple[dict[str, HFConfig], list[str]]:
    """Architecture of every checkpoint that could be read, by config key, and what is wrong with them."""
    model = config.model
    paths = {"model.path": model.path, "model.ref_path": model.ref_path, "model.critic_path": model.critic_path}
    if not model.path:
        return {}, ["model.path is empty: name a Hugging Face checkpoint directory"]
    checkpoints: dict[str, HFConfig] = {}
    problems: list[str] = []
    for key, path in paths.items():
        if not path:
            continue
        try:
            checkpoints[key] = read_hf_config(path)
        except UserError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
            continue
        problems += [f"{key}: {path}: {problem}" for problem in _untrained(checkpoints[key])]
        problems += [f"{key}: {problem}" for problem in _weight_files(Path(path))]
    if "model.path" in checkpoints:
        problems += [f"model.path: {problem}" for problem in _tokenizer(config, checkpoints["model.path"].vocab_size)]
    return checkpoints, problems


def _untrained(hf: HFConfig) -> Iterator[str]:
    """What can be converted, but has not been shown to train as a single rank of transformers does."""
    if hf.family in NOT_SAMPLED:
        yield (
            f"model_type={hf.family} can be converted (mega-rl convert) but not trained yet: {NOT_SAMPLED[hf.family]}; "
            f"trained are {', '.join(TRAINED)}"
        )
    bug = known_bug(hf)
    if bug is not None:
        yield f"model_type={hf.family} cannot be trained: rollouts would come from another model, since {bug.what}"
    if hf.quantization is not None:
        yield f"quantization_config: {hf.quantization} weights can be converted but not trained yet"


def _facts(checkpoint: HFConfig) -> ModelFacts:
    moe = checkpoint.moe
    return ModelFacts(
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        num_kv_heads=checkpoint.num_kv_heads,
        ffn_hidden_size=checkpoint.ffn_hidden_size,
        vocab_size=checkpoint.vocab_size,
        max_position_embeddings=checkpoint.max_position_embeddings,
        multi_latent_attention=checkpoint.mla is not None,
        num_experts=0 if moe is None else moe.num_experts,
        expert_ffn_hidden_size=0 if moe is None else moe.ffn_hidden_size,
        expert_biases=moe is not None and checkpoint.linear_bias,
    )


def _pipeline(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """What is wrong with uneven stages: their notation, their number, or the sum of their layers."""
    par = config.parallel
    stages = par.pp * par.vpp
    if par.pp == 1:
        return  # said to be without effect
    for key, checkpoint in checkpoints.items():
        try:
            if par.pipeline:
                pipeline = parse_pipeline(par.pipeline)
                ParallelLayout(world_size=par.pp, pp=par.pp, vpp=par.vpp, pipeline=pipeline).layers_of(
                    0, checkpoint.num_layers
                )
            elif par.first_stage_layers or par.last_stage_layers:
                first, last = par.first_stage_layers, par.last_stage_layers
                uneven_pipeline(checkpoint.num_layers, stages, first=first, last=last)
        except ValueError as error:
            setting = "parallel.pipeline" if par.pipeline else "parallel.first_stage_layers/last_stage_layers"
            yield f"{setting}: {key}: {error}"


def _weight_files(directory: Path) -> Iterator[str]:
    """What is wrong with the weights as `mega_rl.converters.safetensors_io` finds them: one file, or an index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        yield from _shard(single)
        return
    if not index.is_file():
        yield f"{directory}: holds neither {single.name} nor {index.name}; save the model again as safetensors"
        return
    try:
        names = set(_read_json(index)["weight_map"].values())
    except (UserError, KeyError, TypeError, AttributeError):
        yield f"{index}: not an index of shards; it needs a 'weight_map' of tensor to file"
        return
    for name in sorted(names, key=str):
        yield from _indexed_shard(directory, name)


def _indexed_shard(directory: Path, name: object) -> Iterator[str]:
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"{directory}: the index names {name!r}; legal: a file inside the checkpoint"
    elif not (directory / name).is_file():
        yield f"{directory / name}: missing, though the index names it; download or copy it again"
    else:
        yield from _shard(directory / name)


def _shard(path: Path) -> Iterator[str]:
    """Whether the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > min(size - 8, MAX_HEADER_BYTES):
            yield f"{path}: truncated or not a safetensors file ({size} bytes); download or copy it again"
            return
        header = file.read(header_size)
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + header_size + max((entry["data_offsets"][1] for entry in entries), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        yield f"{path}: its header is damaged; download or copy it again"
        return
    if size != expected:
        yield f"{path}: has {size} bytes, its header says {expected}; download or copy it again"


def _tokenizer(config: Config, vocab_size: int) -> Iterator[str]:
    directory = Path(config.model.path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        yield f"{directory}: no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}"
        return
    try:
        largest = _largest_token_id(directory / "tokenizer.json")
        settings = _read_json(directory / "tokenizer_config.json")
    except UserError as error:
        yield str(error)
        return
    if largest >= vocab_size:
        yield (
            f"{directory}: the tokenizer has token id {largest}, the model a vocabulary of {vocab_size}; "
            "they do not belong together"
        )
    has_template = "chat_template" in settings or (directory / "chat_template.jinja").is_file()
    if config.data.chat_template and not has_template:
        yield f"{directory}: the tokenizer has no chat template; set data.chat_template=false"


def _largest_token_id(path: Path) -> int:
    """Largest id in a tokenizer.json; -1 where there is no such file or it does not list ids."""
    content = _read_json(path)
    try:
        vocab = content.get("model", {}).get("vocab", {})
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in content.get("added_tokens") or []]
        return int(max(ids, default=-1))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(f"{path}: not a tokenizer as the tokenizers library writes it; save it again") from None


def _vocabularies(config: Config, checkpoints: dict[str, HFConfig]) -> Iterator[str]:
    if "model.path" not in checkpoints:
        return
    actor = checkpoints["model.path"].vocab_size
    for key, checkpoint in checkpoints.items():
        if checkpoint.vocab_size != actor:
            yield (
                f"{key} has a vocabulary of {checkpoint.vocab_size}, model.path one of {actor}; "
                "they must share the tokenizer"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON; download or copy it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object; download or copy it again")
    return content


# --- data, reward, packages, folders


def _data(data: DataConfig) -> Iterator[str]:
    if not data.train_files:
        yield "data.train_files is empty: name at least one JSONL or Parquet file"
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for name in files:
            yield from (f"{key}: {problem}" for problem in _data_file(Path(name), data))


def _data_file(path: Path, data: DataConfig) -> Iterator[str]:
    if path.suffix not in DATA_SUFFIXES:
        yield f"{path}: unknown kind of file; legal: {', '.join(DATA_SUFFIXES)}"
        return
    if not path.is_file() or path.stat().st_size == 0:
        yield f"{path}: " + ("is empty" if path.is_file() else "no such file")
        return
    try:
        columns = _parquet_columns(path) if path.suffix == ".parquet" else _first_row_columns(path)
    except UserError as error:
        yield str(error)
        return
    if columns is not None and data.prompt_key not in columns:
        yield f"{path}: has no column {data.prompt_key!r} (data.prompt_key); it has {', '.join(sorted(columns))}"


def _parquet_columns(path: Path) -> set[str]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return set(read_schema(path).names)
    except (ArrowException, OSError):
        raise UserError(f"{path}: not a readable Parquet file; write it again") from None


def _first_row_columns(path: Path) -> set[str] | None:
    """Keys of the first row; None where it is malformed, which the reader of the data reports or drops by line."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return set(row) if isinstance(row, dict) else None


def _reward(function: str) -> Iterator[str]:
    """Whether the reward function is there; a user's file is parsed and not run."""
    if function in REWARD_FUNCTIONS:
        return
    path_text, colon, name = function.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        yield f"reward.function={function!r}: legal: {', '.join(REWARD_FUNCTIONS)} or path/to/file.py:function"
        return
    path = Path(path_text)
    if not path.is_file():
        yield f"reward.function={function!r}: no such file {path}"
        return
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"reward.function={function!r}: {path} is not valid Python{where}"
        return
    names = {name for statement in tree.body for name in _defined(statement)}
    if name not in names:
        has = ", ".join(sorted(names)) or "nothing"
        yield f"reward.function={function!r}: {path} defines no {name!r}; it has {has}"


def _defined(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement of a module binds to something that may be called."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _packages(config: Config) -> Iterator[str]:
    if importlib.util.find_spec("psutil") is None:
        yield "package psutil is missing: Megatron-Core hangs at a checkpoint without it; run 'pip install psutil'"
    if config.optim.precision_aware and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "optim.precision_aware=true: needs Transformer Engine's FusedAdam, which is not installed; "
            "pip install mega_rl[gpu] or set optim.precision_aware=false"
        )
    if config.model.transformer_impl != "transformer_engine":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        yield "model.transformer_impl=transformer_engine: the package is not installed; set auto or local"
    if config.trainer.device == "cpu":
        yield "model.transformer_impl=transformer_engine cannot run with trainer.device=cpu; set auto or local"


def _servers(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Whether SGLang is there to be started, or the keys of servers to be joined, and whether it serves the model."""
    sglang = config.sglang
    if config.rollout.backend != "sglang":
        return
    actor = checkpoints.get("model.path")
    if actor is not None and actor.tied and actor.family in UNTIED_IN_SGLANG:
        yield (
            f"model.path: model_type={actor.family} with tie_word_embeddings=true: SGLang 0.5.20 gives its output "
            "layer weights of its own, which the checkpoint has not; use an untied checkpoint or rollout.backend=hf"
        )
    try:
        if not sglang.urls:
            require_sglang(device="" if config.trainer.device == "auto" else config.trainer.device)
        elif sglang.keys_file:
            Keys.read(Path(sglang.keys_file))
    except UserError as error:
        yield f"sglang.keys_file: {error}" if sglang.urls else str(error)


def _folders(config: Config) -> Iterator[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield f"checkpoint.resume={resume!r}: no such directory; legal: auto, never or a checkpoint directory"
    run_dir = Path(config.trainer.run_dir).absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir():
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is a file; name a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.run_dir={config.trainer.run_dir!r}: {existing} is not writable; name another folder"
