"""Rules of data from several sources, and of the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import ColumnCurriculum, Config, DataConfig, MixtureConfig, SuccessCurriculum
from mega_rl.config.schema.data import RESERVED, completed_sources

_SOURCES = "data.mixture.sources"


def mixture(data: DataConfig) -> Iterator[str]:
    """Yield the problems of a mixture: sources, shares, and settings of other kinds of data next to it."""
    sources = data.mixture.sources
    problems: list[str] = []
    completed_sources(_SOURCES, sources, problems)
    if problems:  # in a config that a program made, without the loader
        yield from problems
        return
    if not sources:
        if data.mixture.temperature != 1.0:
            yield f"data.mixture.temperature={data.mixture.temperature:g} has no effect: it needs {_SOURCES}"
        return
    if data.source.name != "files":
        yield f"{_SOURCES} has no effect: data.source={data.source} yields the rows; set one of the two"
    for name in sources:
        if name in RESERVED:
            yield f"{_SOURCES}.{name}: {name} is a metric of all data, data/{name}; take another name"
    yield from _shares(data.mixture)
    for name, source in data.mixture.named().items():
        for key in ("system_prompt", "template_kwargs"):
            if getattr(source, key) and data.chat.template != "true":
                yield f"{_SOURCES}.{name}.{key} has no effect: it needs data.chat.template=true"


def curriculum(config: Config) -> Iterator[str]:
    """Yield the problems of a curriculum."""
    own = config.data.curriculum
    if own.name != "none" and not config.data.shuffle:
        yield f"data.curriculum={own} with data.shuffle=false: prompts come in one of two orders; set data.shuffle=true"
    if isinstance(own, SuccessCurriculum):
        if config.reward.source.name == "none":
            yield "data.curriculum=success has no effect: reward.source=none says of no sample whether it is right"
        if config.trainer.async_steps:
            yield (
                f"data.curriculum=success with trainer.async_steps={config.trainer.async_steps}: the prompts of the "
                "next step are drawn before this one's are scored; set trainer.async_steps=0"
            )
    if isinstance(own, ColumnCurriculum) and own.start >= 1.0:
        yield f"data.curriculum.start={own.start:g}: all prompts from the start on are no curriculum; legal: below 1"
    if isinstance(own, ColumnCurriculum) and own.steps >= config.trainer.steps:
        yield (
            f"data.curriculum.steps={own.steps}: the run has trainer.steps={config.trainer.steps}, in which it would "
            "never draw from all prompts; make it smaller"
        )


def _shares(mixture: MixtureConfig) -> Iterator[str]:
    """Yield what keeps the sources' shares from being said in one way."""
    weighted = [name for name, source in mixture.named().items() if source.weight]
    if not weighted:
        return
    if mixture.temperature != 1.0:
        yield (
            f"data.mixture.temperature={mixture.temperature:g} has no effect beside {_SOURCES}.{weighted[0]}.weight: "
            "shares are given by weights or by a temperature; remove one of the two"
        )
    if lacking := [name for name in mixture.sources if name not in weighted]:
        yield (
            f"{_SOURCES}.{lacking[0]}: has no weight, and {weighted[0]} has one; give a weight to every source, or to "
            "none, so that the number of prompts decides"
        )
