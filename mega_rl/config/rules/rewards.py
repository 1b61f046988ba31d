"""Rules of several reward functions, of the data sources that they score, and of the sandbox for programs."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import Config, RemoteSandboxConfig
from mega_rl.config.schema.sandbox import runs_code


def functions(config: Config) -> Iterator[str]:
    """Yield the problems between reward.functions, reward.sources and reward.weights."""
    reward = config.reward
    if reward.source.name != "function" or not reward.functions:
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


def sandbox(config: Config) -> Iterator[str]:
    """Yield the problems between reward.sandbox and reward.source."""
    own, pool = config.reward.sandbox, config.reward.calls
    if not runs_code(config.reward):
        return
    if isinstance(own, RemoteSandboxConfig) and not own.url.startswith(("http://", "https://")):
        yield (
            f"reward.sandbox.url={own.url!r}: reward.sandbox=remote needs an address that begins with http:// or "
            "https://"
        )
    if own.total_s < own.timeout_s:
        yield (
            f"reward.sandbox.total_s={own.total_s:g}, of all cases of a response, is below "
            f"reward.sandbox.timeout_s={own.timeout_s:g}, of one; make it at least as long"
        )
    if pool.workers and own.total_s >= pool.timeout_s:
        yield (
            f"reward.sandbox.total_s={own.total_s:g} must be below reward.source.timeout_s={pool.timeout_s:g}, or a "
            "slow program costs its worker; make the latter longer"
        )
    if 0 < pool.memory_mib < own.memory_mib and own.name == "local":
        yield (
            f"reward.sandbox.memory_mib={own.memory_mib} is above reward.source.memory_mib={pool.memory_mib}, which "
            "bounds what a worker starts, too; legal: at most that"
        )
