"""Score the rewards of a recorded step again, by the run's reward functions and data."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.hub.resolve import HubNames, fetch, hub_names
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.build import build_rewards
from mega_rl.tracking import progress
from mega_rl.tracking.records.reader import Array, Record
from mega_rl.trainer.assemble.data import load_data, read_tokens
from mega_rl.trainer.rows import scored_rows
from mega_rl.types import Prompt, Rewards, Rollout
from mega_rl.verify.replay.inputs import origin_of, recorded_config
from mega_rl.verify.replay.run import ATOL, Difference, compare_tensor


def compare_rewards(record: Record, *, atol: float | None = None) -> list[Difference]:
    """Score the rewards again; return the distance of each part, then of the rewards.

    Raises UserError for rewards that are not of functions, for prompts that the data no longer have, and for functions
    that fail as they would in a run.
    """
    config = _local(recorded_config(record.description))
    if config.reward.source.name != "function":
        raise UserError(
            f"--rewards: the run has reward.source={config.reward.source}; only functions are called again, leave the "
            "option out"
        )
    with ExitStack() as resources, progress.phase("scoring the responses again", announce=True):
        rewards, rollout = _scored(record, config, resources)
    known = scored_rows(rollout, rewards).numpy()
    names = record.description.reward_parts
    replayed: dict[str, Array] = {}
    recorded: dict[str, Array] = {}
    for place, name in enumerate(names):
        own = rewards.parts.names.index(name) if rewards.parts is not None and name in rewards.parts.names else None
        recorded[f"rewards.{name}"] = record.tensors["reward_parts"][:, place]
        if own is not None and rewards.parts is not None:
            replayed[f"rewards.{name}"] = _nan_where_unknown(rewards.parts.values[:, own].numpy(), known)
    recorded["rewards"] = record.tensors["rewards"]
    replayed["rewards"] = _nan_where_unknown(rewards.totals.numpy(), known)
    if "failed" in record.tensors:  # their rewards are 0 and mean nothing
        failed = record.tensors["failed"].astype(bool)
        replayed = {name: np.where(failed, recorded[name], values) for name, values in replayed.items()}
    wide = replace(record, tensors={**record.tensors, **recorded})
    return [compare_tensor(name, wide, replayed, ATOL if atol is None else atol) for name in recorded]


def _local(config: Config) -> Config:
    """Return the config without validation, with local files for data of the Hub."""
    config = with_settings(config, {"data.val_files": [], "validation.sets": {}})
    if config.data.source.name != "files":
        raise UserError(
            f"--rewards: data.source={config.data.source} yields the rows; only those of files are read again"
        )
    config = fetch(config, HubNames(data=hub_names(config).data), admit=lambda local: None)
    return with_settings(config, {"model.path": str(origin_of(config, "actor"))})


def _scored(record: Record, config: Config, resources: ExitStack) -> tuple[Rewards, Rollout]:
    """Return the rewards of all rows as the run's function gives them now, and the rows."""
    tokens = read_tokens(config, is_writer=False)
    rewards = build_rewards(config.reward, resources=resources)
    vocab_size = read_hf_config(Path(config.model.path)).vocab_size
    columns = rewards.columns(config.data.answer_key)
    data, _ = load_data(config, tokens, vocab_size=vocab_size, columns=columns)
    prompts = _prompts(record, {prompt.index: prompt for prompt in data})
    alone, timeout_s = SingleRank(), config.trainer.timeout_s
    scorer = rewards.scorer(tokens.reader, replica=alone, everyone=alone, timeout_s=timeout_s, max_failed_share=1.0)
    names = ("loss_mask", "finished", "prompt_index", "sample_index", "failed")
    rollout = Rollout.from_rows(
        _tensor(record, "tokens").long(),
        prompt_lengths=_tensor(record, "prompt_lengths"),
        lengths=_tensor(record, "lengths"),
        **{name: _tensor(record, name) for name in names if name in record.tensors},
    )
    return scorer.score(rollout, prompts), rollout


def _prompts(record: Record, data: dict[int, Prompt]) -> list[Prompt]:
    """Return the prompts of the step's batch. Raises UserError if the data changed."""
    prompts: dict[int, Prompt] = {}
    for row, described in enumerate(record.rows):
        index, place = int(described["data_row"]), int(record.tensors["prompt_index"][row])
        prompt, length = data.get(index), int(record.tensors["prompt_lengths"][row])
        if prompt is None or prompt.token_ids != tuple(record.tensors["tokens"][row, :length].tolist()):
            raise UserError(
                f"--rewards: row {index} of the run's training data is not the prompt of the record; give the files of "
                "the run, unchanged"
            )
        prompts[place] = prompt
    blank = Prompt(index=-1, token_ids=(), text="", answer=None)  # stands for prompts that dynamic sampling dropped
    return [prompts.get(place, blank) for place in range(record.description.prompts)]


def _tensor(record: Record, name: str) -> torch.Tensor:
    return torch.from_numpy(record.tensors[name].copy())


def _nan_where_unknown(values: Array, known: Array) -> Array:
    """Return the values as a record has them: NaN where a response has no reward."""
    return np.where(known, values, np.nan)
