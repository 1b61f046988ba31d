"""Settings that differ between a checkpoint's run and the one that goes on from it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mega_rl.config.keys import flattened

# What a run writes, where, how long it waits, and where it runs: nothing of what it computes.
_WITHOUT_EFFECT = (
    "checkpoint.", "metrics.", "engine.fsdp.", "trainer.run_dir", "trainer.timeout_s", "trainer.deterministic",
    "trainer.device", "trainer.microbatch.", "trainer.profile.", "trainer.val_interval", "model.path",
    "model.recompute", "model.attn_implementation", "model.critic_attn_implementation", "model.ref_attn_implementation",
    "rollout.hf.", "rollout.sglang.", "rollout.bucket_mib", "rollout.verify_interval", "rollout.mismatch.",
    "data.source", "data.stream.timeout_s", "data.train_files", "data.val_files",
    "reward.http.", "reward.model.attn_implementation",
)  # fmt: skip
# Of engine.megatron, which only says where and how things are computed, these change what is.
_WITH_EFFECT = (
    "engine.megatron.moe.", "engine.megatron.optimizer.precision_aware", "engine.megatron.optimizer.moment_dtype",
)  # fmt: skip
_SCHEDULE = "optim.schedule"


class Change(NamedTuple):
    """A setting with its value in the checkpoint and the one of this run."""

    key: str
    before: Any
    now: Any
    matters: bool  # whether the run now computes something else


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings of two resolved configs that differ, as their sections hold them.

    Settings that only one of them has are left out: another version's.
    """
    old, new = flattened(before), flattened(now)
    constant = all(config.get(_SCHEDULE, "constant") == "constant" for config in (old, new))
    return [
        Change(key, old[key], new[key], _matters(key, constant_rate=constant))
        for key in new
        if key in old and _plain(old[key]) != _plain(new[key])
    ]


def in_words(changed: Sequence[Change]) -> str:
    """Return "optim.lr 0.001 -> 0.0005, trainer.steps 4 -> 8"."""
    return ", ".join(f"{change.key} {_shown(change.before)} -> {_shown(change.now)}" for change in changed)


def _matters(key: str, *, constant_rate: bool) -> bool:
    if key == "trainer.steps":
        return not constant_rate  # the schedule ends with the run
    if key.startswith("engine.megatron."):
        return key.startswith(_WITH_EFFECT)
    return not key.startswith(_WITHOUT_EFFECT)


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)
