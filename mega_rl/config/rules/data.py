"""Rules of training prompts, of the order in which they are drawn, and of validations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mega_rl.config.schema import Config, SuccessCurriculum
from mega_rl.config.schema.data import RESERVED

_SOURCES = "data.mixture.sources"


def data(config: Config) -> Iterator[str]:
    """Yield the problems of mixtures, curricula and streams."""
    own, mixture, trainer = config.data.curriculum, config.data.mixture, config.trainer
    if own.name != "none" and not config.data.shuffle:
        yield f"data.curriculum={own} with data.shuffle=false: prompts come in one of two orders; set data.shuffle=true"
    if isinstance(own, SuccessCurriculum) and config.reward.source.name == "none":
        yield "data.curriculum=success needs rewards, which reward.source=none does not give"
    if isinstance(own, SuccessCurriculum) and trainer.async_steps:
        yield (
            f"data.curriculum=success with trainer.async_steps={trainer.async_steps}: the prompts of the next step are "
            "drawn before this one's are scored; set trainer.async_steps=0"
        )
    if mixture.sources and config.data.source.name != "files":
        yield f"{_SOURCES} has no effect: data.source={config.data.source} yields the rows; set one of the two"
    if taken := [name for name in mixture.sources if name in RESERVED]:
        yield f"{_SOURCES}.{taken[0]}: {taken[0]} is a metric of all data, data/{taken[0]}; take another name"
    weighted = [name for name, source in mixture.named().items() if source.weight]
    if weighted and (mixture.temperature != 1.0 or len(weighted) < len(mixture.sources)):
        yield (
            f"{_SOURCES}.{weighted[0]}.weight: shares are given by the weights of all sources or by a temperature; "
            "give every source a weight, or none, and leave data.mixture.temperature out"
        )
    if config.data.stream.rows:
        yield from _stream(config)


def _stream(config: Config) -> Iterator[str]:
    """Yield what needs all prompts, or their number, and cannot go with a stream."""
    own, sources = config.data, config.data.mixture.named().values()
    refused = {
        f"data.source={own.source}, which yields the rows": own.source.name != "files",
        f"trainer.epochs={config.trainer.epochs:g}; set trainer.steps": config.trainer.epochs,
        f"data.val_size={own.val_size}; name held-out prompts in data.val_files": own.val_size,
        f"data.curriculum={own.curriculum}": own.curriculum.name != "none",
        "reward.sources; make each one a source of data.mixture.sources": config.reward.sources and not sources,
        f"{_SOURCES} without weights": sources and not any(source.weight for source in sources),
    }
    for setting in (setting for setting, given in refused.items() if given):
        yield f"data.stream.rows={own.stream.rows}: the number of prompts is not known, so it cannot go with {setting}"


def validation(config: Config) -> Iterator[str]:
    """List what is wrong with the settings of validations."""
    val, best = config.validation, config.checkpoint.keep_best
    if val.n > 1 and val.temperature == 0:
        yield f"validation.n={val.n} with validation.temperature=0: greedy samples are all the same; set n=1"
    if outside := [k for k in val.k if not 1 <= k <= val.n]:
        yield f"validation.k={val.k}: {outside[0]} is not among 1 to validation.n={val.n}, the samples of a prompt"
    for name, files in val.sets.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"validation.sets: {name!r} is no name of a set; legal: small letters, digits and _"
        if not files_of(files):
            yield f"validation.sets.{name}={files!r}: must be a file, or a list of files"
    rewarded = config.reward.source.name != "none"
    if best.startswith("reward/") and not rewarded:
        yield f"checkpoint.keep_best={best} with reward.source=none: the run has no such metric; name another"
    if best.startswith("val/"):
        *area, name = best.removeprefix("val/").split("/")
        legal = [f"{kind}_{k}{edge}" for kind, k, edge in estimates(config)]
        known = name in ("response_tokens_mean", *legal) or (rewarded and name.startswith("reward_"))
        if not config.trainer.val_interval or not known or area not in ([], *([name] for name in val.sets)):
            yield (
                f"checkpoint.keep_best={best}: validations have no such metric; legal with trainer.val_interval above "
                "0, and as val/SET/... for validation.sets: val/reward_mean, val/reward_<part>, "
                f"val/response_tokens_mean, {', '.join(f'val/{name}' for name in legal[::3]) or 'val/pass_at_k'}"
            )


def files_of(files: object) -> list[str]:
    """Return the files of a set; none where the setting is neither a file nor a list of files."""
    listed = files if isinstance(files, list) else [files]
    return [file for file in listed if isinstance(file, str) and file] if all(map(bool, listed)) else []


def estimates(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, k, edge) of every estimate of a validation; the edges are those of its 95 % interval."""
    counted = config.validation.counted
    kinds = [(kind, k) for k in counted for kind in ("pass_at", "maj_at")]
    kinds += [("avg_at", config.validation.n)] if counted else []
    yield from ((kind, k, edge) for kind, k in kinds for edge in ("", "_low", "_high"))
