"""The source of rewards: a function that is there, a service that may be spoken to, a model with one label."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.errors import UserError, no_such
from mega_rl.preflight.checkpoints import tensor_shape
from mega_rl.workers.reward_service import RewardService

REWARD_FUNCTIONS = ("exact_match", "math_verify")


def check_rewards(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """What is wrong with the source that reward.source names; the others are not looked at."""
    reward = config.reward
    if reward.source == "function":
        yield from _function(reward.function)
    elif reward.source == "http":
        yield from _service(config)
    elif "reward.model_path" in checkpoints:
        yield from _head(Path(reward.model_path), checkpoints["reward.model_path"])
        yield from _room(config)


def _service(config: Config) -> Iterator[str]:
    reward = config.reward
    try:
        if reward.url.startswith(("http://", "https://")):  # a rule between settings speaks of others
            RewardService.find(reward.url, reward.key_file)
    except UserError as error:
        yield str(error)
    if reward.timeout_s >= config.trainer.timeout_s:
        yield (
            f"reward.timeout_s={reward.timeout_s:g} must be below trainer.timeout_s={config.trainer.timeout_s:g}, the "
            "time that other ranks wait for the scores"
        )


def _head(directory: Path, hf: HFConfig) -> Iterator[str]:
    """What is wrong with the labels of a sequence-classification checkpoint, in its config and its weights."""
    fix = "a reward model is a sequence-classification checkpoint with one label"
    names = hf.raw.get("id2label")
    labels = len(names) if isinstance(names, dict) else hf.raw.get("num_labels", 1)
    if labels != 1:
        yield f"reward.model_path: {directory / 'config.json'}: has {labels} labels; {fix}"
    expected, shape = [1, hf.hidden_size], tensor_shape(directory, hf.value_head)
    if shape is None:
        yield f"reward.model_path: {directory}: has no {hf.value_head}; {fix}"
    elif shape != expected:
        yield f"reward.model_path: {directory}: {hf.value_head} has shape {shape}, not {expected}; {fix}"


def _room(config: Config) -> Iterator[str]:
    """Whether the longest row still fits a micro-batch with the one token that its score is read at."""
    trainer, cp = config.trainer, config.parallel.cp
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    multiple = 2 * cp if cp > 1 else 1
    without, needed = (-(-length // multiple) * multiple for length in (longest, longest + 1))
    if trainer.packing and without <= trainer.max_tokens_per_microbatch < needed:
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest} and one more token for the reward model; make it "
            f"at least {needed}"
        )


def _function(function: str) -> Iterator[str]:
    """Whether the reward function is there; a user's file is parsed and not run."""
    if function in REWARD_FUNCTIONS:
        return
    path_text, _, name = function.rpartition(":") if ".py:" in function else (function, "", "")
    if not path_text.endswith(".py"):
        yield f"reward.function={function!r}: legal: {', '.join(REWARD_FUNCTIONS)} or path/to/file.py:function"
        return
    path = Path(path_text)
    if not path.is_file():
        yield f"reward.function={function!r}: {path}: {no_such('file', path)}"
        return
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"reward.function={function!r}: {path} is not valid Python{where}"
        return
    names = {name for statement in tree.body for name in _defined(statement)}
    if name in names:
        return
    functions = [entry.name for entry in tree.body if isinstance(entry, ast.FunctionDef) and entry.name[0] != "_"]
    if name:
        has = ", ".join(functions or sorted(names)) or "nothing"
        yield f"reward.function={function!r}: {path} defines no {name!r}; it has {has}"
    else:
        example = functions[0] if functions else "function"
        has = ", ".join(functions) or "no function"
        yield f"reward.function={function!r}: name the function too, as {path}:{example}; {path} has {has}"


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
