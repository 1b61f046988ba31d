"""Settings that differ between a checkpoint's run and the one that goes on from it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# What a run writes, where, how long it waits, and where it runs: nothing of what it computes.
_WITHOUT_EFFECT = (
    "checkpoint.", "metrics.", "parallel.", "ddp.", "fsdp.", "trainer.run_dir", "trainer.timeout_s",
    "trainer.deterministic", "trainer.device", "trainer.packing", "trainer.max_tokens_per_microbatch",
    "trainer.micro_batch_size", "trainer.val_interval", "model.path", "model.recompute", "model.attn_implementation",
    "model.critic_attn_implementation", "model.ref_attn_implementation", "model.transformer_impl", "rollout.batch_size",
    "rollout.bucket_mib", "rollout.verify_interval", "rollout.logprob_diff_limit", "data.train_files", "data.val_files",
    "optim.cpu_offload", "optim.distributed_optimizer", "reward.timeout_s", "reward.retries", "reward.concurrency",
    "reward.batch_size", "reward.url", "reward.key_file", "reward.attn_implementation", "sglang.",
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
    old, new = _flat(before), _flat(now)
    constant = all(config.get(_SCHEDULE, "constant") == "constant" for config in (old, new))
    return [
        Change(key, old[key], new[key], _matters(key, constant_rate=constant))
        for key in new
        if key in old and _plain(old[key]) != _plain(new[key])
    ]


def in_words(found: Sequence[Change]) -> str:
    """Return "optim.lr 0.001 -> 0.0005, trainer.steps 4 -> 8"."""
    return ", ".join(f"{change.key} {_shown(change.before)} -> {_shown(change.now)}" for change in found)


def _matters(key: str, *, constant_rate: bool) -> bool:
    if key == "trainer.steps":
        return not constant_rate  # the schedule ends with the run
    return not key.startswith(_WITHOUT_EFFECT)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting by its dotted key."""
    flat: dict[str, Any] = {}
    for section, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{name}": each for name, each in value.items()}
        else:
            flat[section] = value
    return flat


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)
