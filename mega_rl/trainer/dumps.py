"""Rows of rollouts for people to read: which samples are dumped, and what is said of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mega_rl.types import Prompt, Rewards, Rollout

# (rollout, row) -> the response as rewards read it, and the same with what others wrote between the policy's turns.
ReadResponse = Callable[[Rollout, int], tuple[str, str]]


def sample_rows(
    rollout: Rollout,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    read: ReadResponse,
    *,
    render: Callable[[Sequence[int]], str],
    step: int,
    count: int,
    advantages: Tensor | None = None,
) -> list[Mapping[str, Any]]:
    """Return some rollouts of this rank as readable rows, whole groups of about `count` in all; see `group_rows`.

    advantages: [B, S] float32, 0 off the mask, None of rollouts that do not train. `prompt` is the user's
    text, `rendered_prompt` the text of the token ids that the model read, by `render`, which shows special tokens;
    `response` is the text that rewards read, by `read`, with what tools wrote. `advantage_mean` is over the policy's
    tokens.
    """
    rows: list[Mapping[str, Any]] = []
    for row in group_rows(rollout.prompt_index.tolist(), count):
        prompt = prompts[int(rollout.prompt_index[row])]
        start = int(rollout.prompt_lengths[row])
        rows.append(
            {
                "step": step,
                "prompt_index": int(rollout.prompt_index[row]),
                "sample_index": int(rollout.sample_index[row]),
                "prompt": prompt.text,
                "rendered_prompt": render(rollout.tokens[row, :start].tolist()),
                "response": read(rollout, row)[1],
                "answer": prompt.answer,
                "prompt_tokens": start,
                "response_tokens": int(rollout.loss_mask[row].sum()),
                **_rewards_of(rewards, row),
                "finished": bool(rollout.finished[row]),
                "weight_version": int(rollout.weight_version[row]),
                **_where_known(rollout, row, advantages),
            }
        )
    return rows


def group_rows(prompt_index: Sequence[int], count: int) -> list[int]:
    """Return row numbers, ascending: all samples of prompts that are spread over the batch.

    There are as many prompts as `count` samples fill, at least one unless `count` is 0. prompt_index: of each row.
    """
    samples: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_index):
        samples.setdefault(prompt, []).append(row)
    groups = list(samples.values())
    taken = min(len(groups), max(count // max(map(len, groups), default=1), min(count, 1)))
    return sorted(row for position in range(taken) for row in groups[position * len(groups) // taken])


def _rewards_of(rewards: Rewards, row: int) -> dict[str, float | None]:
    """Return a row's reward and its parts, as "reward_correct"; nothing in a run that has no reward.

    None stands for the reward of a sample that is left out, and for a part that it does not have.
    """
    if not rewards.scored:
        return {}
    names = () if rewards.parts is None else rewards.parts.names
    columns = zip(("reward", *(f"reward_{name}" for name in names)), rewards.columns()[row].tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in columns}


def _where_known(rollout: Rollout, row: int, advantages: Tensor | None) -> dict[str, Any]:
    """Return what not every rollout has: advantages, versions of tokens, samples that may fail."""
    known: dict[str, Any] = {}
    if advantages is not None:
        tokens = int(rollout.loss_mask[row].sum())
        known["advantage_mean"] = float(advantages[row].sum()) / max(tokens, 1)
    if rollout.token_versions is not None:  # 0 off the mask, as of a failed sample
        known["newest_weight_version"] = max(int(rollout.token_versions[row].max()), int(rollout.weight_version[row]))
    if rollout.failed is not None:
        known["failed"] = bool(rollout.failed[row])
    return known
