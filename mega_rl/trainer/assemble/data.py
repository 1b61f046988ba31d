"""Tokenizer and prompts of a run: training prompts in memory or streamed, and held-out sets."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mega_rl.algorithms.preferences import TrainingKind
from mega_rl.config.rules.rollout import files_of
from mega_rl.config.schema import ChatConfig, DataConfig, RolloutConfig, TrainerConfig
from mega_rl.config.user_files import users_code
from mega_rl.data.build import PromptReader, build_order, build_stream_order, chat_template
from mega_rl.data.chat import ChatTemplate, check_template
from mega_rl.data.columns import RewardColumns
from mega_rl.data.examples import ExampleReading
from mega_rl.data.order import StepOrder, SuccessRates
from mega_rl.data.prompts import fingerprint, load_prompts, split
from mega_rl.data.rows import DataContext, RowSource
from mega_rl.data.stream import StreamReader
from mega_rl.data.tokenizer_identity import check_bounds
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import broadcast_json, first_failure, run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rewards.build import RunRewards, check_tests
from mega_rl.rewards.score import ResponseReader
from mega_rl.rollout.tokens import check_stop_tokens, token_endings
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """The actor's tokenizer, the ids that end a response, and whether rewards read special tokens."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    skip_special_tokens: bool
    template: ChatTemplate | None = None  # for conversations; None: prompts are text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens as rewards read it."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=self.skip_special_tokens))

    @property
    def reader(self) -> ResponseReader:
        """Return the reader of responses."""
        return ResponseReader(self.decode, frozenset(self.stop_ids))

    def render(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens with the special ones, as dumps of rollouts show it."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


def read_tokens(
    folder: Path, chat: ChatConfig, rollout: RolloutConfig, *, skip_special_tokens: bool, is_writer: bool = False
) -> Tokens:
    """Return the actor's tokenizer. Raises UserError when no token ends a response."""
    with progress.phase("reading the tokenizer"):
        tokenizer, templated = load_tokenizer(folder), chat.template != "false"
        extra = rollout.stop_token_ids
        stop_ids = check_stop_tokens(folder, tokenizer, extra=extra, chat_template=templated, is_writer=is_writer)
    return Tokens(tokenizer, stop_ids, skip_special_tokens, chat_template(tokenizer, chat))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder. Raises UserError for hostile files and templates."""
    check_bounds(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    given = tokenizer.chat_template
    try:
        for template in given.values() if isinstance(given, dict) else [given] if given else []:
            check_template(template)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    return tokenizer


@dataclass(frozen=True)
class OwnRows:
    """A user's rows, in place of data.train_files, and of data.val_files if it has held-out ones."""

    make: Callable[[object], object]  # the source from its `DataContext`
    name: str
    seed: int
    validates: bool  # the run evaluates on its held-out rows

    def read(self, tokens: Tokens, split: Literal["train", "validation"]) -> RowSource:
        """Return the rows of a split. Raises UserError for code that raises, also later."""
        setting = f"data.source={self.name!r}"

        def iterated(rows: Iterable[object]) -> Iterator[object]:
            with users_code(f"{setting} fails while it yields rows"):
                yield from rows

        with users_code(f"{setting} cannot be made"):
            made = self.make(DataContext(split, self.seed, tokens.tokenizer))
        if not isinstance(made, Iterable):
            raise UserError(f"{setting}: made {type(made).__name__}, which yields no rows; give it __iter__")
        return RowSource(f"{setting} ({split})", iterated(made))


class RunPrompts(NamedTuple):
    """Prompts of a run, with the order of those that train."""

    train: list[Prompt]  # empty for a run that streams them
    held_out: list[PromptSet]
    order: StepOrder
    rates: SuccessRates | None  # success rates that the order follows; None if it does not depend on samples
    fingerprint: str


def prompt_reader(
    kind: TrainingKind, data: DataConfig, tokens: Tokens, columns: RewardColumns, *, vocab_size: int
) -> PromptReader:
    """Return the reading of a run's rows, of prompts or with given answers."""
    tokenizer, chat = tokens.tokenizer, data.chat.template != "false"
    reader = PromptReader(data, tokenizer, vocab_size, columns)
    if kind.form == "prompts":
        return reader
    stop_ids = {*tokens.stop_ids, *dict(token_endings(tokenizer, chat_template=chat))}
    end_id = tokens.stop_ids[0] if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    how = partial(ExampleReading, form=kind.form, train_on=kind.train_on, stop_ids=frozenset(stop_ids), end_id=end_id)
    return replace(reader, as_given=how)


def build_prompts(
    reader: PromptReader, sets: Mapping[str, object], trainer: TrainerConfig, tokens: Tokens, rewards: RunRewards,
    source: OwnRows | None, *, world: Ranks,
) -> RunPrompts:  # fmt: skip
    """Read the prompts of a run, and check that its rewards can score them; collective."""
    data = reader.data
    train, held_out = load_data(reader, sets, tokens, seed=trainer.seed, source=source)
    identity = agreed_fingerprint(train, held_out, world)
    if data.stream.rows:
        readers, identity = open_streams(reader, tokens, rewards, held_out, seed=trainer.seed, ranks=world)
        order = build_stream_order(data, trainer, readers, partial(run_on_one, ranks=world))
        return RunPrompts(train, held_out, order, None, identity)
    run_on_one(partial(rewards.check, train, held_out, source_key=data.source_key), world)
    if world.rank == 0 and len(train) < trainer.prompts_per_step:
        log.warning(
            "the data have %d prompts, fewer than trainer.prompts_per_step=%d: a step has some of them more than once",
            *(len(train), trainer.prompts_per_step),
        )
    order, rates = build_order(data, trainer, train)
    return RunPrompts(train, held_out, order, rates, identity)


def load_data(
    reader: PromptReader,
    sets: Mapping[str, object],
    tokens: Tokens,
    *,
    seed: int,
    source: OwnRows | None = None,
    trains: bool = True,
) -> tuple[list[Prompt], list[PromptSet]]:
    """Return (training prompts, sets of held-out prompts), each with the columns that the reward reads.

    A run that streams its training prompts, or does not train, gets none of them. sets: as validation.sets.
    """
    data, streams = reader.data, reader.data.stream.rows

    def load(rows: Sequence[str] | RowSource) -> list[Prompt]:
        return load_prompts(rows, reader.reading())

    with progress.phase("reading and tokenizing the data", announce=True):
        prompts: list[Prompt] = []
        if data.mixture.sources and not streams:
            prompts = reader.mixture()
        elif trains and not streams:
            prompts = load(data.train_files if source is None else source.read(tokens, "train"))
        held_out: Sequence[Prompt] = []
        if source is not None and source.validates:
            held_out = load(source.read(tokens, "validation"))
        elif data.val_files:
            held_out = load(data.val_files)
        elif trains and not streams:
            prompts, held_out = split(prompts, data.val_size, seed=seed)
        warn_of_prompts(tokens, data.chat, [*prompts, *held_out])
        named = [PromptSet(name, load(files_of(files))) for name, files in sets.items()]
        return prompts, [PromptSet("", held_out), *named] if held_out else named


def open_streams(
    of_run: PromptReader, tokens: Tokens, rewards: RunRewards, held_out: Sequence[PromptSet], *, seed: int, ranks: Ranks
) -> tuple[dict[str, StreamReader], str]:
    """Read each stream's first block on rank 0; return streams (there) and fingerprint; collective.

    The rewards must be able to score the first blocks, and every block has its tests of programs tried. Raises
    UserErrors on all ranks.
    """
    readers, data = dict[str, StreamReader](), of_run.data
    streams = replace(of_run, tokenizer=copy.deepcopy(tokens.tokenizer))  # readers have a thread

    def read() -> str:
        digest, first = hashlib.sha256(), list[Prompt]()
        for name, reader in streams.streams(seed, partial(check_tests, rewards.settings)):
            readers[name] = reader
            prompts = reader.first_block()
            first += prompts
            content = [name, str(reader.plan), *(shard.identity() for shard in reader.shards), fingerprint(prompts)]
            digest.update("\n".join(content).encode() + b"\n")
        warn_of_prompts(tokens, data.chat, first)
        rewards.check(first, held_out, source_key=data.source_key)
        return digest.hexdigest()

    with progress.phase("reading the first rows of the data", announce=True):
        return readers, run_on_one(read, ranks)


def agreed_fingerprint(train: Sequence[Prompt], held_out: Sequence[PromptSet], ranks: Ranks) -> str:
    """Return the fingerprint of the training prompts; collective. Raises UserError if ranks read other prompts."""
    own = [fingerprint(train), *(fingerprint(one.prompts) for one in held_out)]
    words = f"rank {ranks.rank} and rank 0 read different prompts; give every host the same files, and let a "
    failure = None if own == broadcast_json(own, ranks) else f"{words}data.source draw only from context.seed"
    if (message := first_failure(failure, ranks)) is not None:
        raise UserError(message)
    return own[0]


def with_length(trainer: TrainerConfig, num_prompts: int, *, warmup: int) -> TrainerConfig:
    """Return the settings with the steps of trainer.epochs; warmup: steps of both warm-ups. Raises UserError."""
    if not trainer.epochs:
        return trainer
    steps = max(1, math.ceil(Fraction(repr(trainer.epochs)) * num_prompts / trainer.prompts_per_step))
    log.info("trainer.epochs=%g of %d prompts are trainer.steps=%d", trainer.epochs, num_prompts, steps)
    if 0 < warmup >= steps:
        raise UserError(
            f"trainer.epochs={trainer.epochs:g} is trainer.steps={steps}: optim.warmup_steps and "
            f"algorithm.critic_warmup_steps are {warmup} together and do not end within the run; lower them"
        )
    return replace(trainer, steps=steps, epochs=0.0)


def warn_of_prompts(tokens: Tokens, chat: ChatConfig, prompts: Sequence[Prompt]) -> None:
    """Warn of plain text without the chat template, and of control tokens in messages."""
    texts = ["\n".join(content for _, content in prompt.messages) for prompt in prompts]
    special = [str(token) for token in tokens.tokenizer.added_tokens_decoder.values() if token.special]
    present = [token for token in special if any(token in text for text in texts)]
    if count := sum(any(token in text for token in present) for text in texts):
        log.warning(
            "%d of %d prompts hold control tokens of the tokenizer in the text of a message, as %s; the model takes "
            "them for ends and beginnings of turns",
            *(count, len(texts), ", ".join(present[:3])),
        )
    if chat.template == "auto" and tokens.tokenizer.chat_template and not all(prompt.messages for prompt in prompts):
        log.warning(
            "prompts are plain text, and the tokenizer has a chat template; data.chat.template=true renders each as a "
            "message of the user, data.chat.template=false says that plain text is meant"
        )


def prompt_line(tokens: Tokens, prompts: Sequence[Prompt]) -> str:
    """Return form, mean length and end of the prompts as text; "" without prompts."""
    if not prompts:
        return ""
    kind = "chat template of the tokenizer" if prompts[0].messages else "plain text"
    mean = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
    return f"{kind}, {mean:.0f} tokens, end {tokens.render(prompts[0].token_ids)[-24:]!r}"
