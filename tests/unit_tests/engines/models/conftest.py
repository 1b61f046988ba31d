"""One launch of one rank for all tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.engines.models.cases import run_all


@pytest.fixture(scope="package")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case of cases.py gave."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(folder / "qwen3", family="qwen3", tied=True)
    write_tiny_checkpoint(folder / "qwen2", family="qwen2", tied=False)
    for family in ("deepseek_v3", "gemma3_text", "glm4", "olmoe", "gpt_oss"):
        write_tiny_checkpoint(folder / family, family=family)
    return dict(run_ranks(1, run_all, str(folder), device="cpu")[0])
