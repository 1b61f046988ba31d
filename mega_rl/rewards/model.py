"""Reward role as a model: a sequence-classification checkpoint that gives one number for each row."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mega_rl.data.chat import TemplateRefusal, Tokenizer, apply_template
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import ModelPasses, Ranks
from mega_rl.rewards.role import of_all_rows
from mega_rl.rewards.score import ResponseReader, RewardError, answered, no_score, rows_of_trajectories, shortened
from mega_rl.types import Metrics, Prompt, Rewards, Rollout

logger = logging.getLogger(__name__)

# (rollout, rows of it, the step's global list of prompts) -> token ids that the reward model reads for each of the rows
TokenRows = Callable[[Rollout, Sequence[int], Sequence[Prompt]], list[list[int]]]


@dataclass(frozen=True)
class RowLimits:
    """Limits of the rows that a reward model and its micro-batches take."""

    vocab_size: int
    positions: int  # max_position_embeddings of the model
    microbatch_tokens: int | None = None  # trainer.microbatch.max_tokens; None where rows are padded
    multiple: int = 1  # lengths in a micro-batch are multiples of it: 2 * cp with context parallelism

    def problem(self, token_ids: Sequence[int]) -> str:
        """Return why a row cannot be scored; "" for one that can."""
        if not token_ids:
            return "the row has no tokens"
        if max(token_ids) >= self.vocab_size:
            return f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}"
        if len(token_ids) > self.positions:
            return f"the row has {len(token_ids)} tokens, the model {self.positions} positions"
        needed = -(-(len(token_ids) + 1) // self.multiple) * self.multiple  # see `_rows_with_a_place`
        if self.microbatch_tokens is not None and needed > self.microbatch_tokens:
            return f"the row needs {needed} tokens, above trainer.microbatch.max_tokens={self.microbatch_tokens}"
        return ""


@dataclass
class ModelScorer:
    """Reward role of one replica: a frozen model's output at each row's last token."""

    engine: ModelPasses  # with a value head, the checkpoint's
    token_rows: TokenRows
    limits: RowLimits
    everyone: Ranks  # all ranks

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        """Return the reward of each row, on the rollout's device; collective over all ranks.

        `prompts` is the step's global list, which `rollout.prompt_index` points into. Failed samples are not scored: 0.
        Raises RewardError on every rank for a row that the model cannot read and a value that is not finite.
        """
        rows = answered(rollout)
        failure: RewardError | None = None
        token_ids: list[list[int]] = []
        try:
            token_ids = self.token_rows(rollout, rows, prompts)
            failure = _refused([self.limits.problem(ids) for ids in token_ids], rollout, rows, prompts)
        except RewardError as error:
            failure = error
        raise_together(failure, self.everyone, error=RewardError)
        batch = _rows_with_a_place(token_ids)
        values = self.engine.forward(batch).values
        assert values is not None, "a reward model is an engine with a value head"
        values = values[torch.arange(len(token_ids)), batch.lengths - 1].float()  # [B] on the host, at the last token
        problems = ["" if math.isfinite(value) else f"it gave {value}" for value in values.tolist()]
        raise_together(_refused(problems, rollout, rows, prompts), self.everyone, error=RewardError)
        scores = torch.zeros(len(rollout.lengths), dtype=torch.float32)
        scores[rows] = values
        return Rewards(of_all_rows(scores.to(rollout.tokens.device), rollout))

    def metrics(self) -> Metrics:
        return {}


def _refused(
    problems: Sequence[str], rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt]
) -> RewardError | None:
    """Return the error for the first row with a problem, None without one."""
    for row, problem in zip(rows, problems, strict=True):
        if problem:
            prompt = prompts[int(rollout.prompt_index[row])]
            whose = f"a response to prompt {prompt.index} ({shortened(prompt.text)})"
            return RewardError(f"the reward model cannot score {whose}: {problem}")
    return None


def token_rows(
    tokenizer: Tokenizer,
    *,
    template: object | None,
    same_tokenizer: bool,
    rollout_template: object | None,
    reader: ResponseReader,
) -> TokenRows:
    """Return the conversion of rollouts for the reward model: sampled tokens, or text.

    `tokenizer` and chat `template` (None: it has none) are the reward model's; `rollout_template` is the one that made
    the prompts, None for plain text; `reader` has the actor's tokenizer and leaves special tokens out.
    """
    if same_tokenizer and template in (None, rollout_template):
        logger.info("reward model: reads the sampled tokens")
        return own_tokens
    why = "its chat template is not that of the prompts" if same_tokenizer else "its tokenizer is not the actor's"
    logger.info("reward model: reads decoded conversations, since %s", why)
    return partial(conversation_tokens, tokenizer=tokenizer, reader=reader, chat=template is not None)


def own_tokens(rollout: Rollout, rows: Sequence[int], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return prompt and response as sampled, with the stop token; a trajectory's last row."""
    tokens, lengths, trajectories = rollout.tokens.tolist(), rollout.lengths.tolist(), rows_of_trajectories(rollout)
    return [tokens[last][: lengths[last]] for last in (trajectories[row][-1] for row in rows)]


def conversation_tokens(
    rollout: Rollout,
    rows: Sequence[int],
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer,
    reader: ResponseReader,
    chat: bool,
) -> list[list[int]]:
    """Return the token ids of each row's text as the reward model's tokenizer encodes them.

    chat: the prompt's messages (a plain prompt is one of the user) and the response as the assistant's, else the
    prompt's text followed by the response. Raises RewardError for a conversation that the template refuses.
    """
    written = []
    for prompt, response in reader.texts(rollout, rows, prompts):
        text = response.transcript or response.text
        if not chat:
            written.append(prompt.text + text)
            continue
        turns = [*(prompt.messages or (("user", prompt.text),)), ("assistant", text)]
        conversation = [{"role": role, "content": content} for role, content in turns]
        try:
            written.append(apply_template(tokenizer, conversation, add_generation_prompt=False))
        except TemplateRefusal as error:
            what = f"the reward model's chat template refuses the conversation: {error}"
            raise no_score(what, prompt, response) from error
    # A template puts special tokens by itself.
    ids: list[list[int]] = tokenizer(written, add_special_tokens=not chat)["input_ids"] if written else []
    return ids


def _rows_with_a_place(token_ids: Sequence[Sequence[int]]) -> Rollout:
    """Return the rows with one more token 0, the only one on the mask.

    A value is that of the position before the token it is aligned to (see `mega_rl.types`), so an engine's output for
    this place is the model's output at the row's last token. Nothing before it sees the token that stands there.
    """
    lengths = torch.tensor([len(ids) + 1 for ids in token_ids], dtype=torch.int64)
    count, width = len(token_ids), max(map(len, token_ids), default=0) + 1
    tokens = torch.zeros(count, width, dtype=torch.int64)
    for row, ids in enumerate(token_ids):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return Rollout.from_rows(tokens, prompt_lengths=lengths - 1, lengths=lengths)
