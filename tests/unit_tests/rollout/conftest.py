"""The checkpoint that most tests of this folder share."""

from __future__ import annotations

import pytest

from tests.unit_tests.rollout.tiny_qwen3 import Checkpoint, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))
