"""Lengths of responses, and how an evaluation samples them: what all rollout engines have in common."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.errors import UserError
from mega_rl.types import Draws, Prompt


def response_limits(
    prompts: Sequence[Prompt],
    limits: Sequence[int] | None,
    draws: Draws | None,
    *,
    max_new_tokens: int,
    max_positions: int,
) -> list[int]:
    """Return the most tokens of each prompt's responses: `limits`, or those of the evaluation or the run.

    max_positions: the model's, prompt and response together.

    Raises UserError for prompts that are empty or leave no room for a response, ValueError for limits of a caller.
    """
    most = max_new_tokens if draws is None else draws.max_new_tokens or max_new_tokens
    limits = [most] * len(prompts) if limits is None else list(limits)
    if len(limits) != len(prompts) or not all(1 <= limit <= most for limit in limits):
        raise ValueError(f"limits={limits}: one for each prompt, 1 to the longest response, {most} tokens")
    lengths = ((len(prompt.token_ids), limit) for prompt, limit in zip(prompts, limits, strict=True))
    longest, limit = max(lengths, key=sum, default=(0, 0))
    if longest + limit > max_positions:
        raise UserError(
            f"the longest prompt has {longest} tokens and its response up to {limit}: together more than the model's "
            f"max_position_embeddings={max_positions}; lower data.max_prompt_tokens or the length of responses, "
            "rollout.max_new_tokens or validation.max_new_tokens"
        )
    empty = [prompt.index for prompt in prompts if not prompt.token_ids]
    if empty:
        raise UserError(f"prompts without tokens, data set rows {empty[:8]}: a prompt needs one token; remove them")
    return limits


def is_greedy(greedy: bool, draws: Draws | None) -> bool:
    """Return whether to take the most likely tokens: in greedy rollouts, and in evaluations at temperature 0."""
    return greedy or (draws is not None and not draws.temperature)
