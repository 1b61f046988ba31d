"""An embedder that every pipeline stage and chunk keeps a copy of has one gradient: the sum over all copies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.test_finalize_model_grads import embed_all

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launch

EVERYWHERE = float(sum(10**chunk * (rank + 1) for rank in range(4) for chunk in range(2)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the four ranks of PP4 with two chunks each found."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), tied=False, num_hidden_layers=8)
    return run_ranks(4, embed_all, str(checkpoint), timeout_s=180)


def test_flagged_parameters_are_summed_over_stages_and_chunks(ranks: list[dict[str, Any]]) -> None:
    """Weight and bias; what is not flagged keeps the gradient of its own stage and chunk, what is frozen has none."""
    for rank, chunks in enumerate(rank["True"] for rank in ranks):
        assert len(chunks) == 2
        for number, actual in enumerate(chunks):
            assert {name for name, value in actual.items() if value == EVERYWHERE} == {
                "shared_embedder.weight",
                "shared_embedder.bias",
            }
            own = {name: value for name, value in actual.items() if not name.startswith("shared_embedder")}
            frozen = {name for name, value in own.items() if value is None}
            assert frozen == {"frozen_embedder.weight", "frozen_embedder.bias"}
            assert {value for name, value in own.items() if name not in frozen} == {10.0**number * (rank + 1)}
            assert len(own) > 10


def test_without_such_embedders_nothing_is_summed(ranks: list[dict[str, Any]]) -> None:
    """The flag alone does nothing: the config must say that there are replicated embedders."""
    for rank, chunks in enumerate(rank["False"] for rank in ranks):
        for number, actual in enumerate(chunks):
            assert {value for value in actual.values() if value is not None} == {10.0**number * (rank + 1)}
