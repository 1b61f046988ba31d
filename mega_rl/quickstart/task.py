"""Two-digit addition: the task, tokenizer and fresh model of the quickstart.

A prompt is a sum of two numbers of two digits, its answer the three digits of the result with the units first, as one
adds on paper: `37+45=` -> `280`. The warm start imitates demonstrations of mixed quality: some are right, the others
forget every carry (`37+45=` -> `270`). Forgetting is harmless for about three sums in ten, so the warm-started model is
mostly wrong when it decodes greedily, and PPO has to find out from the reward which of the two habits pays.

Demonstrations and training prompts share their sums. A held-out sum occurs in neither, in no order of its two numbers:
the held-out accuracy measures adding numbers that the model never saw together.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from mega_rl.errors import UserError
from mega_rl.quickstart import reward

NUM_DIGITS = 2  # of each operand

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# "-" does not occur in the task; it rounds the vocabulary up to 16, which small tensor-parallel sizes divide.
VOCABULARY = (PAD, EOS, UNK, *"0123456789=+-")
MAX_POSITIONS = 64

DEFAULT_NUM_HELD_OUT = 256
DEFAULT_NUM_DEMONSTRATIONS = 32_768
DEFAULT_RIGHT_FRACTION = 0.3


@dataclass(frozen=True)
class Problem:
    """A prompt and its right answer: `Problem("37+45=", "280")`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response the warm start imitates, right or not: `Demonstration("37+45=", "270")`."""

    prompt: str
    response: str


@dataclass(frozen=True)
class Task:
    """Problems of the quickstart; a held-out sum is in neither order in the other two sets."""

    train: tuple[Problem, ...]  # prompts of PPO, each once, in random order
    held_out: tuple[Problem, ...]  # prompts of the accuracy before and after; never trained on
    demonstrations: tuple[Demonstration, ...]  # text of the warm start: draws from the sums of `train`


@dataclass(frozen=True)
class DatasetFiles:
    """Paths of what `write_dataset` wrote: the three sets and the reward function."""

    train: Path  # rows {"prompt", "answer"}
    held_out: Path  # rows {"prompt", "answer"}
    demonstrations: Path  # rows {"prompt", "response"}
    reward: Path  # Python source of `points`


def add(left: int, right: int) -> str:
    """Return the digits of the sum, units first: 37, 45 -> `280`."""
    return f"{left + right:0{NUM_DIGITS + 1}d}"[::-1]


def add_without_carry(left: int, right: int) -> str:
    """Return the sum with every carry forgotten, units first: 37, 45 -> `270`."""
    columns = zip(f"{left:0{NUM_DIGITS}d}", f"{right:0{NUM_DIGITS}d}", strict=True)
    return "".join(str((int(a) + int(b)) % 10) for a, b in reversed(list(columns))) + "0"


def make_task(
    seed: int,
    *,
    num_held_out: int = DEFAULT_NUM_HELD_OUT,
    num_demonstrations: int = DEFAULT_NUM_DEMONSTRATIONS,
    right_fraction: float = DEFAULT_RIGHT_FRACTION,
) -> Task:
    """The task of `seed`: the same seed and sizes give the same rows in the same order.

    `right_fraction` is the probability of a demonstration to be right; the others forget the carries.

    Raises:
        UserError: a size is below 1, the fraction is not in [0, 1], or nothing is left to train on.
    """
    _check_sizes(num_held_out=num_held_out, num_demonstrations=num_demonstrations)
    if not 0.0 <= right_fraction <= 1.0:
        raise UserError(f"right_fraction={right_fraction} is not a probability; give a number from 0 to 1")
    rng = random.Random(seed)
    numbers = range(10**NUM_DIGITS)
    sums = [(left, right) for left in numbers for right in numbers]
    rng.shuffle(sums)
    held_out: dict[frozenset[int], tuple[int, int]] = {}  # the two numbers -> the one order that is asked
    for pair in sums:
        if len(held_out) == num_held_out:
            break
        held_out.setdefault(frozenset(pair), pair)
    rest = [pair for pair in sums if frozenset(pair) not in held_out]
    if not rest:
        raise UserError(f"num_held_out={num_held_out} leaves no sum to train on; give at most {len(held_out) - 1}")
    return Task(
        train=tuple(_problem(pair) for pair in rest),
        held_out=tuple(_problem(pair) for pair in held_out.values()),
        demonstrations=tuple(
            _demonstration(pair, right=rng.random() < right_fraction)
            for pair in rng.choices(rest, k=num_demonstrations)
        ),
    )


def write_dataset(directory: Path, task: Task) -> DatasetFiles:
    """Write the three JSONL files and the reward function to `directory`, created if missing; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = DatasetFiles(
        train=directory / "train.jsonl",
        held_out=directory / "held_out.jsonl",
        demonstrations=directory / "demonstrations.jsonl",
        reward=directory / "reward.py",
    )
    _write_rows(files.train, ({"prompt": row.prompt, "answer": row.answer} for row in task.train))
    _write_rows(files.held_out, ({"prompt": row.prompt, "answer": row.answer} for row in task.held_out))
    _write_rows(files.demonstrations, ({"prompt": row.prompt, "response": row.response} for row in task.demonstrations))
    shutil.copyfile(reward.__file__, files.reward)
    return files


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per character, 16 in all, which adds no special tokens.

    A character outside the vocabulary becomes `<unk>`.
    """
    return tokenizer_of(VOCABULARY, r"[\s\S]", max_positions=MAX_POSITIONS)


def tokenizer_of(tokens: Sequence[str], pattern: str, *, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole tokens, which a pattern cuts a text into; it adds no special tokens."""
    token_ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=token_ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="right",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def model_config() -> Qwen3Config:
    """The quickstart's Qwen3: two layers of width 128, about 300 thousand weights, divisible by tp=2 and by pp=2."""
    return config_of(VOCABULARY, max_positions=MAX_POSITIONS)


def config_of(tokens: Sequence[str], *, max_positions: int) -> Qwen3Config:
    """Return a Qwen3 of two layers of width 128 for a vocabulary."""
    return Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        # The usual 0.02 suits widths of thousands; at width 128 it makes the first hundred steps learn nothing.
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokens.index(EOS),
        pad_token_id=tokens.index(PAD),
    )


def write_checkpoint(directory: Path, *, seed: int) -> None:
    """Write a randomly initialised Hugging Face checkpoint (safetensors, FP32) with its tokenizer to `directory`.

    The same seed gives the same weights; the caller's random state is left as it was.
    """
    save_fresh_model(directory, model_config(), build_tokenizer(), seed=seed)


def save_fresh_model(directory: Path, config: Qwen3Config, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """Write a model with random weights of a seed, and its tokenizer; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    embedding = model.model.embed_tokens.weight.data
    embedding[config.pad_token_id] = embedding.mean(dim=0)  # transformers leaves zeros, whose gradient is huge
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    disable_progress_bar()  # of two megabytes
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size} is below 1; give a positive number of rows")


def _prompt(pair: tuple[int, int]) -> str:
    return f"{pair[0]:0{NUM_DIGITS}d}+{pair[1]:0{NUM_DIGITS}d}="


def _problem(pair: tuple[int, int]) -> Problem:
    return Problem(prompt=_prompt(pair), answer=add(*pair))


def _demonstration(pair: tuple[int, int], *, right: bool) -> Demonstration:
    return Demonstration(prompt=_prompt(pair), response=add(*pair) if right else add_without_carry(*pair))


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
