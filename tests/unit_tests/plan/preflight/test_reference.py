"""A reference that takes in the actor's weights must be of its architecture, a teacher of its vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_rl.config.loader import load
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.preflight.checkpoints import check_reference
from tests.helpers.inputs import qwen3_config

ACTOR = parse_hf_config(qwen3_config("8b"))
TAKES_IN = ["algorithm.kl=loss", "algorithm.kl.reference_interval=5"]
FIXED = ["algorithm.kl=loss"]
DISTILLED = ["algorithm.advantage=distillation", "model.ref_path=t", "algorithm.loss=distillation"]


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (TAKES_IN, {"num_layers": 2, "norm_eps": 1e-3}, "model.path and model.ref_path differ in num_layers, norm_eps"),
        (TAKES_IN, {"dtype": "float32", "initializer_range": 0.5}, ""),
        (FIXED, {"num_layers": 2}, ""),
        (DISTILLED, {"vocab_size": 151_643, "hidden_size": 8192}, "take a teacher of the same size"),
        (DISTILLED, {"hidden_size": 8192}, ""),
        (DISTILLED[:2], {"vocab_size": 151_643}, ""),
    ],
)
def test_reference_fits_the_actor(settings: list[str], changes: dict[str, object], words: str) -> None:
    checkpoints = {"model.path": ACTOR, "model.ref_path": replace(ACTOR, **changes)}  # type: ignore[arg-type]
    problems = list(check_reference(load(None, settings), checkpoints))
    assert len(problems) == bool(words)
    assert all(words in problem for problem in problems)
