"""Rules of several reward functions and of the data sources that they score."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import Config


def functions(config: Config) -> Iterator[str]:
    """Yield what is wrong between reward.functions, reward.sources and reward.weights."""
    reward = config.reward
    if reward.source != "function" or not reward.functions:
        return
    legal = ", ".join(reward.functions)
    for source, names in reward.sources.items():
        if not names:
            yield f"reward.sources.{source} is empty: name which of reward.functions score its rows; legal: {legal}"
        for name in names:
            if name not in reward.functions:
                yield f"reward.sources.{source}: {name!r} is not in reward.functions; legal: {legal}"
        if len(set(names)) < len(names):
            yield f"reward.sources.{source}={names}: names a function twice; name it once"
    used = {name for names in reward.sources.values() for name in names}
    for name in reward.functions:
        if reward.sources and name not in used:
            yield (
                f"reward.functions.{name} scores nothing: no entry of reward.sources names it; add it, or leave it out"
            )
    for part in reward.weights:
        if part not in reward.functions and not any(part.startswith(f"{name}_") for name in reward.functions):
            yield (
                f"reward.weights.{part} has no effect: no function of that name is in reward.functions; legal: "
                f"{legal}, or NAME_PART of a function that returns named parts"
            )
