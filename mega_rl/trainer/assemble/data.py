"""Tokenizer and prompts of a run: training prompts in memory or streamed, and held-out sets."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mega_rl.config.choices import DATA, chosen
from mega_rl.config.keys import with_settings
from mega_rl.config.rules import check
from mega_rl.config.rules.rollout import files_of
from mega_rl.config.schema import ChatConfig, Config
from mega_rl.config.user_files import users_code
from mega_rl.data.build import PromptReader, build_order, build_stream_order
from mega_rl.data.chat import check_template
from mega_rl.data.columns import RewardColumns
from mega_rl.data.order import StepOrder, SuccessRates
from mega_rl.data.prompts import fingerprint, load_prompts, split
from mega_rl.data.rows import DataContext, RowSource
from mega_rl.data.stream import StreamReader
from mega_rl.data.tokenizer_identity import check_bounds
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.agreement import broadcast_json, first_failure, run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rewards.build import RunRewards, check_tests
from mega_rl.rewards.score import ResponseReader
from mega_rl.rollout.tokens import check_stop_tokens
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """The actor's tokenizer, the ids that end a response, and whether rewards read special tokens."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    skip_special_tokens: bool

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


def read_tokens(config: Config, *, is_writer: bool) -> Tokens:
    """Return the actor's tokenizer. Raises UserError when no token ends a response."""
    folder = Path(config.model.path)
    with progress.phase("reading the tokenizer"):
        tokenizer = load_tokenizer(folder)
        has_template = config.data.chat.template != "false"
        extra = config.rollout.stop_token_ids
        stop_ids = check_stop_tokens(folder, tokenizer, extra=extra, chat_template=has_template, is_writer=is_writer)
    return Tokens(tokenizer, stop_ids, config.reward.skip_special_tokens)


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


Split = Literal["train", "validation"]
ReadSource = Callable[[Tokens, Split], RowSource]


def load_data_source(config: Config) -> ReadSource | None:
    """Return the function that gives the user's rows of a split; None without a source.

    Raises UserError as `Choice.own` does; when rows are read, for code that raises.
    """
    make = DATA.maker(config)
    if make is None:
        return None
    setting = f"data.source={chosen(config, DATA)!r}"

    def iterated(rows: Iterable[object]) -> Iterator[object]:
        with users_code(f"{setting} fails while it yields rows"):
            yield from rows

    def rows(tokens: Tokens, split: Split) -> RowSource:
        with users_code(f"{setting} cannot be made"):
            made = make(DataContext(split, config.trainer.seed, tokens.tokenizer))
        if not isinstance(made, Iterable):
            raise UserError(f"{setting}: made {type(made).__name__}, which yields no rows; give it __iter__")
        return RowSource(f"{setting} ({split})", iterated(made))

    return rows


class RunPrompts(NamedTuple):
    """Prompts of a run, with the order of those that train."""

    train: list[Prompt]  # empty for a run that streams them
    held_out: list[PromptSet]
    order: StepOrder
    rates: SuccessRates | None  # success rates that the order follows; None if it does not depend on samples
    fingerprint: str


def build_prompts(
    config: Config, tokens: Tokens, rewards: RunRewards, source: ReadSource | None, vocab_size: int, world: Ranks
) -> RunPrompts:
    """Read the prompts of a run, and check that its rewards can score them; collective."""
    data, trainer = config.data, config.trainer
    columns = rewards.columns(data.answer_key)
    train, held_out = load_data(config, tokens, vocab_size=vocab_size, columns=columns, source=source)
    check = partial(rewards.check, held_out=held_out, source_key=data.source_key)
    identity = agreed_fingerprint(train, held_out, world)
    if data.stream.rows:
        readers, identity = open_streams(
            config, tokens, vocab_size=vocab_size, columns=columns, ranks=world, check=check
        )
        order = build_stream_order(data, trainer, readers, partial(run_on_one, ranks=world))
        return RunPrompts(train, held_out, order, None, identity)
    run_on_one(partial(check, train), world)
    if world.rank == 0 and len(train) < trainer.prompts_per_step:
        log.warning(
            "the data have %d prompts, fewer than trainer.prompts_per_step=%d: a step has some of them more than once",
            *(len(train), trainer.prompts_per_step),
        )
    order, rates = build_order(data, trainer, train)
    return RunPrompts(train, held_out, order, rates, identity)


def load_data(
    config: Config,
    tokens: Tokens,
    *,
    vocab_size: int,
    columns: RewardColumns,
    source: ReadSource | None = None,
    trains: bool = True,
) -> tuple[list[Prompt], list[PromptSet]]:
    """Return (training prompts, sets of held-out prompts), each with the columns that the reward reads.

    A run that streams its training prompts, or does not train, gets none of them. source: gives the rows of a split of
    a user's own data, in place of data.train_files.
    """
    data, streams = config.data, config.data.stream.rows
    key = data.source_key if config.reward.sources else ""
    reader = PromptReader(data, tokens.tokenizer, vocab_size, columns)

    def load(rows: Sequence[str] | RowSource, *, difficulty: str = "") -> list[Prompt]:
        return load_prompts(rows, reader.reading(source_key=key, difficulty=difficulty))

    with progress.phase("reading and tokenizing the data", announce=True):
        prompts: list[Prompt] = []
        if data.mixture.sources and not streams:
            prompts = reader.mixture()
        elif trains and not streams:
            rows = data.train_files if source is None else source(tokens, "train")
            prompts = load(rows, difficulty=getattr(data.curriculum, "key", ""))
        held_out: Sequence[Prompt] = []
        if source is not None and config.trainer.val_interval and DATA.needs(config, "has_validation"):
            held_out = load(source(tokens, "validation"))
        elif data.val_files:
            held_out = load(data.val_files)
        elif trains and not streams:
            prompts, held_out = split(prompts, data.val_size, seed=config.trainer.seed)
        warn_of_prompts(tokens, data.chat, [*prompts, *held_out])
        named = [PromptSet(name, load(files_of(files))) for name, files in config.validation.sets.items()]
        return prompts, [PromptSet("", held_out), *named] if held_out else named


def open_streams(
    config: Config,
    tokens: Tokens,
    *,
    vocab_size: int,
    columns: RewardColumns,
    ranks: Ranks,
    check: Callable[[list[Prompt]], None],
) -> tuple[dict[str, StreamReader], str]:
    """Read each stream's first block on rank 0; return streams (there) and fingerprint; collective.

    check: raises UserError for prompts of the first blocks that the reward cannot score; every block has its tests of
    programs tried. Raises UserErrors on all ranks.
    """
    readers = dict[str, StreamReader]()
    own = copy.deepcopy(tokens.tokenizer)  # readers have a thread

    def read() -> str:
        digest, first = hashlib.sha256(), list[Prompt]()
        streams = PromptReader(config.data, own, vocab_size, columns)
        for name, reader in streams.streams(config.trainer.seed, partial(check_tests, config.reward)):
            readers[name] = reader
            prompts = reader.first_block()
            first += prompts
            content = [name, str(reader.plan), *(shard.identity() for shard in reader.shards), fingerprint(prompts)]
            digest.update("\n".join(content).encode() + b"\n")
        warn_of_prompts(tokens, config.data.chat, first)
        check(first)
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


def with_length(config: Config, num_prompts: int, *, world_size: int) -> Config:
    """Return the config with trainer.steps computed from trainer.epochs."""
    trainer = config.trainer
    if not trainer.epochs:
        return config
    steps = max(1, math.ceil(Fraction(repr(trainer.epochs)) * num_prompts / trainer.prompts_per_step))
    config = with_settings(config, {"trainer.steps": steps, "trainer.epochs": 0.0})
    log.info("trainer.epochs=%g of %d prompts are trainer.steps=%d", trainer.epochs, num_prompts, steps)
    if problems := check(config, world_size=world_size):
        raise UserErrors([f"trainer.epochs={trainer.epochs:g} is trainer.steps={steps}: {line}" for line in problems])
    return config


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
