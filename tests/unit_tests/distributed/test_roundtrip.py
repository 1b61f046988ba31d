"""Hugging Face -> Megatron-Core -> Hugging Face through live models is a permutation: bit-equal, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.converters.safetensors.reader import CheckpointReader
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, running_engine
from tests.helpers.models import DENSE, write_tiny_checkpoint
from tests.helpers.selection import covering

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

LAYOUTS = {1: ["1"], 2: ["tp2", "pp2", "pp2-vpp2"], 4: ["tp2-pp2"]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SOURCES = [(family, tied, dtype) for family in DENSE for tied in (True, False) for dtype in DTYPES]
# Every pair of two of family, ties, dtype and layout; `make test-full` has the product.
CASES = covering(((*source, name) for source in SOURCES for names in LAYOUTS.values() for name in names), strength=2)
VOCABULARY = 51  # odd: padded at TP2


def source_name(family: str, tied: bool, dtype: str) -> str:
    """Folder of a source checkpoint."""
    return f"{family}-{'tied' if tied else 'untied'}-{dtype}"


def round_trip(rank: int, root: str, layouts: list[str]) -> dict[str, Any]:
    """Whether every exported tensor equals the source's, and the names; one answer for each source and layout."""
    answers = {}
    for family, tied, dtype in SOURCES:
        source = Path(root) / source_name(family, tied, dtype)
        for layout in (name for name in layouts if (family, tied, dtype, name) in CASES):
            with running_engine(make_config(source, layout=layout, dtype=dtype), trainable=False) as engine:
                actual = exported(engine)
            with CheckpointReader(source) as reader:
                expected = {name: reader.read(name) for name in reader.tensors}
            answers[f"{source.name} {layout}"] = {
                "names": sorted(actual) == sorted(expected),
                "different": [
                    n for n in expected if n not in actual or actual[n].dtype != expected[n].dtype
                    or not torch.equal(actual[n], expected[n])
                ],
                "count": len(actual),
            }  # fmt: skip
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By source and layout, what every rank found."""
    root = tmp_path_factory.mktemp("sources")
    for family, tied, dtype in SOURCES:
        write_tiny_checkpoint(
            root / source_name(family, tied, dtype),
            family=family,
            tied=tied,
            dtype=DTYPES[dtype],
            vocab_size=VOCABULARY,
        )
    actual: dict[str, Any] = {}
    for world_size, layouts in LAYOUTS.items():
        ranks = run_ranks(world_size, round_trip, str(root), layouts, timeout_s=240)
        for key in ranks[0]:
            actual[key] = [answers[key] for answers in ranks]
    return actual


@pytest.mark.parametrize(("family", "tied", "dtype", "layout"), CASES)
def test_round_trip_is_bit_equal(answers: dict[str, Any], family: str, tied: bool, dtype: str, layout: str) -> None:
    """All ranks export the source's names, dtypes and bits."""
    for answer in answers[f"{source_name(family, tied, dtype)} {layout}"]:
        assert answer["names"]
        assert answer["different"] == []
        assert answer["count"] > 30
