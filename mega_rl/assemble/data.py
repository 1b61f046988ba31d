"""The tokenizer and the prompts of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mega_rl import progress
from mega_rl.config.schema import ChatConfig, Config
from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.prompts import load_prompts, split
from mega_rl.rollout.stop_tokens import check_stop_tokens
from mega_rl.types import Prompt

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

    def render(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens with the special ones, as dumps of rollouts show it."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


def read_tokens(config: Config, *, is_writer: bool) -> Tokens:
    """Return the actor's tokenizer. Raises UserError when no token ends a response."""
    with progress.phase("reading the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
        stop_ids = check_stop_tokens(
            Path(config.model.path),
            tokenizer,
            extra=config.rollout.stop_token_ids,
            chat_template=config.data.chat.template,
            is_writer=is_writer,
        )
    return Tokens(tokenizer, stop_ids, config.reward.skip_special_tokens)


def load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, columns: RewardColumns
) -> tuple[list[Prompt], Sequence[Prompt]]:
    """Return (training prompts, held-out prompts), each with the columns that the reward reads."""
    data, chat = config.data, config.data.chat
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        columns=RowColumns(data.prompt_key, data.answer_key, columns),
        template=_chat_template(tokenizer, chat) if chat.template else None,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        malformed=data.malformed_rows,
        vocab_size=vocab_size,
    )
    with progress.phase("reading and tokenizing the data", announce=True):
        prompts = load(data.train_files)
        if data.val_files:
            return prompts, load(data.val_files)
        return split(prompts, data.val_size, seed=config.trainer.seed)


def _chat_template(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> ChatTemplate:
    day = date.fromisoformat(chat.date) if chat.date else None
    return ChatTemplate(tokenizer, chat.template_kwargs, chat.system_prompt, day)


def warn_of_date(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> None:
    """Log a warning where prompts depend on the day of the run's start."""
    if chat.template and _chat_template(tokenizer, chat).changes_daily():
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
