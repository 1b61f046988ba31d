"""A reference that takes in the actor's weights must be of its architecture, a teacher of its vocabulary."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.config.loader import load
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.preflight.checkpoints import check_reference, check_teacher
from tests.helpers.inputs import qwen3_config

ACTOR = parse_hf_config(qwen3_config("8b"))


def problems(interval: int, **changes: object) -> list[str]:
    config = load(None, ["algorithm.kl=loss", f"algorithm.kl.reference_interval={interval}"])
    checkpoints = {"model.path": ACTOR, "model.ref_path": replace(ACTOR, **changes)}  # type: ignore[arg-type]
    return list(check_reference(config, checkpoints))


def test_other_architecture_is_refused() -> None:
    assert problems(5, num_layers=2, norm_eps=1e-3) == [
        "algorithm.kl.reference_interval=5: the reference takes in the actor's weights, but model.path and "
        f"model.ref_path differ in num_layers {ACTOR.num_layers} and 2; norm_eps {ACTOR.norm_eps} and 0.001; name a "
        "reference of the actor's architecture, or set it to 0"
    ]


def test_other_checkpoint_is_accepted() -> None:
    assert problems(5, eos_token_ids=(7,), dtype="float32", initializer_range=0.5) == []


def test_fixed_reference_may_have_any_architecture() -> None:
    assert problems(0, num_layers=2) == []


def test_teacher_has_the_students_vocabulary() -> None:
    """Its size; that tokens are the same is checked of every reference."""
    distilled = ["algorithm.advantage=distillation", "model.ref_path=t"]
    smaller = {"model.path": ACTOR, "model.ref_path": replace(ACTOR, vocab_size=151_643, hidden_size=8192)}
    assert list(check_teacher(load(None, [*distilled, "algorithm.loss=distillation"]), smaller)) == [
        "algorithm.loss=distillation: a divergence goes over one vocabulary, but model.path has 151936 entries and "
        "model.ref_path 151643; take a teacher of the same size, or another loss with "
        "algorithm.advantage=distillation, which compares only the sampled tokens"
    ]
    assert list(check_teacher(load(None, distilled), smaller)) == []
    wider = {"model.path": ACTOR, "model.ref_path": replace(ACTOR, hidden_size=8192)}
    assert list(check_teacher(load(None, [*distilled, "algorithm.loss=distillation"]), wider)) == []
