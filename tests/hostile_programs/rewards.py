"""Reward of a run whose answers are hostile programs; workers load this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_rl.config.schema.rollout import LocalSandboxConfig
from mega_rl.rewards.builtin import resolve
from mega_rl.rewards.code import CodeTests, specification

SETTINGS = LocalSandboxConfig(memory_mib=128, processes=12, tmp_mib=8, output_kib=64, timeout_s=2.0, total_s=10.0)
TESTS: CodeTests = resolve(specification(SETTINGS))  # type: ignore[assignment]


def of_the_row(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of its tests that the row's program passes, in the place of the response."""
    return {"passed": TESTS(f"```python\n{row['program']}\n```", row["tests"]), "length": len(response) / 100}
