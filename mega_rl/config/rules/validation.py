"""Rules of validations: samples, sets of prompts, and the metric that the best checkpoint is known by."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mega_rl.config.facts import ModelFacts
from mega_rl.config.schema import Config

SET_NAME = re.compile(r"[a-z][a-z0-9_]*")
EDGES = ("", "_low", "_high")  # of an estimate and its 95 % interval


def validation(config: Config) -> Iterator[str]:
    """List what is wrong with the settings of validations."""
    val = config.validation
    if val.n > 1 and val.temperature == 0:
        yield (
            f"validation.n={val.n} with validation.temperature=0: greedy samples of a prompt are all the same; set a "
            "temperature above 0, or n=1"
        )
    if outside := [k for k in val.k if not 1 <= k <= val.n]:
        yield f"validation.k={val.k}: {outside[0]} is not among 1 to validation.n={val.n}, the samples of a prompt"
    if len(set(val.k)) < len(val.k):
        yield f"validation.k={val.k}: a number is named twice; name each once"
    if val.counted and config.reward.source.name == "none":
        yield (
            "validation.k or validation.n above 1 with reward.source=none: no reward says which samples are right; "
            "name who scores, as reward.source=function, or leave them out"
        )
    for name, files in val.sets.items():
        if not SET_NAME.fullmatch(name):
            yield f"validation.sets: {name!r} is no name of a set; legal: small letters, digits and _"
        if not files_of(files):
            yield f"validation.sets.{name}={files!r}: must be a file, or a list of files"
    yield from _room(config)
    yield from _best(config)


def fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    """List conflicts between the length of validations and a checkpoint that reads their responses."""
    longest = config.data.max_prompt_tokens + config.validation.max_new_tokens
    reads = key == "model.path" or (key == "reward.source.path" and config.reward.source.name == "model")
    if config.validation.max_new_tokens and reads:
        keys = "data.max_prompt_tokens+validation.max_new_tokens"
        yield from facts.too_long(key, keys, longest, config.rollout.backend)


def _room(config: Config) -> Iterator[str]:
    """Yield a problem if a reward model's micro-batch cannot hold the longest validated row and one token more."""
    val, trainer, cp = config.validation, config.trainer, config.engine.megatron.cp
    multiple = 2 * cp if cp > 1 else 1
    needed = -(-(config.data.max_prompt_tokens + val.max_new_tokens + 1) // multiple) * multiple
    micro = trainer.microbatch
    if val.max_new_tokens and config.reward.source.name == "model" and micro.packing and micro.max_tokens < needed:
        yield (
            f"trainer.microbatch.max_tokens={micro.max_tokens} cannot hold one sequence of "
            f"data.max_prompt_tokens+validation.max_new_tokens and one more token for the reward model; make it at "
            f"least {needed}"
        )


def files_of(files: object) -> list[str]:
    """Return the files of a set; none where the setting is neither a file nor a list of files."""
    listed = files if isinstance(files, list) else [files]
    return [file for file in listed if isinstance(file, str) and file] if all(map(bool, listed)) else []


def _best(config: Config) -> Iterator[str]:
    """Yield what keeps checkpoint.keep_best from naming a metric of validations."""
    best = config.checkpoint.keep_best
    if not best.startswith("val/"):
        return
    if not config.trainer.val_interval:
        yield f"checkpoint.keep_best={best}: there is no validation; set trainer.val_interval"
        return
    *area, name = best.removeprefix("val/").split("/")
    sets = list(config.validation.sets)
    if len(area) > 1 or (area and area[0] not in sets):
        known = ", ".join(f"val/{name}/..." for name in sets) or "it has none, so val/reward_mean"
        yield f"checkpoint.keep_best={best}: validation.sets has no such set; legal: {known}"
        return
    legal = [f"{kind}_{k}{edge}" for kind, k, edge in estimates(config)]
    if name not in ("response_tokens_mean", *legal) and not name.startswith("reward_"):
        counted = ", ".join(legal[::3]) or "pass_at_k of the numbers in validation.k"
        yield (
            f"checkpoint.keep_best={best}: a validation has no such metric; legal: reward_mean, reward_<part>, "
            f"response_tokens_mean, {counted}"
        )


def estimates(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, k, edge) of every estimate that a validation reports, whose name is their concatenation."""
    counted = config.validation.counted
    kinds = [(kind, k) for k in counted for kind in ("pass_at", "maj_at")]
    kinds += [("avg_at", config.validation.n)] if counted else []
    yield from ((kind, k, edge) for kind, k in kinds for edge in EDGES)
