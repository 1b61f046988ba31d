"""The tokenizer and the prompts of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from jinja2 import nodes as nodes_of
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from mega_rl.config.choices import DATA
from mega_rl.config.keys import with_settings
from mega_rl.config.rules import check
from mega_rl.config.rules.validation import files_of
from mega_rl.config.schema import ChatConfig, Config, DataConfig, SourceConfig
from mega_rl.config.values import shown
from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.prompts import fingerprint, load_prompts, split
from mega_rl.data.rows import RowSource
from mega_rl.data.tokenizer_identity import check_bounds
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.agreement import broadcast_json, first_failure
from mega_rl.protocols import Ranks
from mega_rl.rewards.responses import ResponseReader
from mega_rl.rollout.stop_tokens import check_stop_tokens
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet

log = logging.getLogger(__name__)


_REFUSED = (nodes_of.Pow, nodes_of.Import, nodes_of.FromImport, nodes_of.Include, nodes_of.Extends, nodes_of.Const)
MAX_CONSTANT = 10**7  # largest whole number in a chat template


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
    with progress.phase("reading the tokenizer"):
        tokenizer = load_tokenizer(Path(config.model.path))
        stop_ids = check_stop_tokens(
            Path(config.model.path),
            tokenizer,
            extra=config.rollout.stop_token_ids,
            chat_template=config.data.chat.template != "false",
            is_writer=is_writer,
        )
    return Tokens(tokenizer, stop_ids, config.reward.skip_special_tokens)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder. Raises UserError for files or templates that would take all memory or time.

    A template is a program: of what a sandbox of Jinja lets it do, powers and numbers of many digits hang or abort.
    """
    check_bounds(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    given = tokenizer.chat_template
    environment = _compile_jinja_template("").environment  # to compile the template itself would compute its constants
    for template in given.values() if isinstance(given, dict) else [given] if given else []:
        try:
            nodes = list(environment.parse(template).find_all(_REFUSED))
        except (TemplateError, RecursionError) as error:
            raise UserError(f"{folder}: its chat template is no Jinja template: {error}") from error
        for node in nodes:
            constant = getattr(node, "value", None)
            if not isinstance(node, nodes_of.Const) or (isinstance(constant, int) and abs(constant) > MAX_CONSTANT):
                what = type(node).__name__ if constant is None else f"the number {shown(constant)}"
                raise UserError(f"{folder}: line {node.lineno} of its chat template has {what}, which is never run")
    return tokenizer


Split = Literal["train", "validation"]
ReadSource = Callable[[Tokens, Split], RowSource]


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

    Without training prompts of a run that streams them.

    source: gives the rows of a split, of a user's own data, in place of data.train_files. trains: False of an
    evaluation, which has no training prompts.
    """
    data = config.data
    load_with = partial(
        load_prompts,
        tokenizer=tokens.tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        malformed=data.malformed_rows,
        vocab_size=vocab_size,
    )
    source_key = data.source_key if config.reward.sources else ""
    of_rows = RowColumns(data.prompt_key, data.answer_key, columns, source=source_key)
    to_train = replace(of_rows, difficulty=getattr(data.curriculum, "key", ""))
    load = partial(
        load_with,
        columns=of_rows,
        template=chat_template(tokens.tokenizer, data.chat),
    )
    with progress.phase("reading and tokenizing the data", announce=True):
        prompts: list[Prompt] = []
        if data.stream.rows:
            log.info("data.stream.rows=%d: training prompts are read while the run goes on", data.stream.rows)
        elif data.mixture.sources:
            prompts = _load_mixture(data, tokens, columns, load_with)
        elif trains:
            prompts = load(data.train_files if source is None else source(tokens, "train"), columns=to_train)
        if source is not None and config.trainer.val_interval and DATA.needs(config, "has_validation"):
            held_out: Sequence[Prompt] = load(source(tokens, "validation"))
        elif data.val_files:
            held_out = load(data.val_files)
        elif data.stream.rows or not trains:
            held_out = []
        else:
            prompts, held_out = split(prompts, data.val_size, seed=config.trainer.seed)
        warn_of_prompts(tokens, data.chat, [*prompts, *held_out])
        main = [PromptSet("", held_out)] if held_out else []
        return prompts, main + [
            PromptSet(name, load(files_of(files))) for name, files in config.validation.sets.items()
        ]


def _load_mixture(
    data: DataConfig, tokens: Tokens, columns: RewardColumns, load: Callable[..., list[Prompt]]
) -> list[Prompt]:
    """Return the prompts of all sources, one source after the other, each with its name; rows are numbered over all.

    Raises UserErrors with the problems of every source.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for name, source in data.mixture.named().items():
        prompt_key, answer_key = source.prompt_key or data.prompt_key, source.answer_key or data.answer_key
        chat = chat_of(data.chat, source)
        try:
            own = load(
                source.files,
                columns=RowColumns(prompt_key, answer_key, columns, getattr(data.curriculum, "key", "")),
                template=chat_template(tokens.tokenizer, chat),
            )
        except UserError as error:
            problems += [f"data.mixture.sources.{name}: {line}" for line in str(error).splitlines()]
            continue
        first = prompts[-1].index + 1 if prompts else 0
        prompts += [replace(prompt, index=first + prompt.index, source=name) for prompt in own]
    if problems:
        raise UserErrors(problems)
    return prompts


def chat_of(chat: ChatConfig, source: SourceConfig) -> ChatConfig:
    """Return how conversations of a source of a mixture are rendered."""
    system_prompt = chat.system_prompt if source.system_prompt is None else source.system_prompt
    return replace(
        chat, system_prompt=system_prompt, template_kwargs={**chat.template_kwargs, **source.template_kwargs}
    )


def with_length(config: Config, num_prompts: int, *, world_size: int) -> Config:
    """Return the config of a run whose length is known with its data: trainer.steps in place of trainer.epochs.

    Raises UserErrors for settings that do not fit this length, as a warm-up that outlasts it.
    """
    trainer = config.trainer
    if not trainer.epochs:
        return config
    steps = max(1, math.ceil(Fraction(repr(trainer.epochs)) * num_prompts / trainer.prompts_per_step))
    config = with_settings(config, {"trainer.steps": steps, "trainer.epochs": 0.0})
    log.info("trainer.epochs=%g of %d prompts are trainer.steps=%d", trainer.epochs, num_prompts, steps)
    if problems := check(config, world_size=world_size):
        raise UserErrors([f"trainer.epochs={trainer.epochs:g} is trainer.steps={steps}: {line}" for line in problems])
    return config


def agreed_fingerprint(train: Sequence[Prompt], held_out: Sequence[PromptSet], ranks: Ranks) -> str:
    """Return the fingerprint of the training prompts; collective. Raises UserError on all ranks for ranks that differ.

    Every rank reads the data for itself, and each generates for its own prompts of what must be one list.
    """
    own = [fingerprint(train), *(fingerprint(one.prompts) for one in held_out)]
    message = None
    if own != broadcast_json(own, ranks):
        message = (
            f"rank {ranks.rank} and rank 0 read different prompts; give every host the same files, and let a "
            "data.source draw from context.seed alone"
        )
    message = first_failure(message, ranks)
    if message is not None:
        raise UserError(message)
    return own[0]


def chat_template(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> ChatTemplate | None:
    """Return the rendering of conversations, None without a chat template."""
    if chat.template == "false" or (chat.template == "auto" and not tokenizer.chat_template):
        return None
    day = date.fromisoformat(chat.date) if chat.date else None
    of_strings = chat.template == "true"
    return ChatTemplate(tokenizer, chat.template_kwargs, chat.system_prompt, day, of_strings=of_strings)


def warn_of_prompts(tokens: Tokens, chat: ChatConfig, prompts: Sequence[Prompt]) -> None:
    """Log a warning for plain text without the tokenizer's chat template, and for control tokens in messages."""
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
    """Return how the prompts are written, their mean length, and how the first one ends; "" without prompts."""
    if not prompts:
        return ""
    kind = "chat template of the tokenizer" if prompts[0].messages else "plain text"
    mean = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
    return f"{kind}, {mean:.0f} tokens, end {tokens.render(prompts[0].token_ids)[-24:]!r}"


def warn_of_date(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> None:
    """Log a warning where prompts depend on the day of the run's start."""
    template = chat_template(tokenizer, chat)
    if template is not None and template.of_strings and template.changes_daily():
        log.warning(
            "the chat template writes today's date into the prompts, so a checkpoint cannot be resumed on another day; "
            "set data.chat.date=%s",
            date.today().isoformat(),
        )


def warn_of_few(prompts: Sequence[Prompt], *, prompts_per_step: int) -> None:
    """Log a warning where a step has some prompts more than once."""
    if len(prompts) < prompts_per_step:
        log.warning(
            "the data have %d prompts, fewer than trainer.prompts_per_step=%d: a step has some of them more than once",
            *(len(prompts), prompts_per_step),
        )
