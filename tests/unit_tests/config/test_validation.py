"""Rules of validations, and the metric that the best checkpoint is known by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_rl.config.facts import ModelFacts
from mega_rl.config.loader import load
from mega_rl.config.rules.validation import fits_model, validation

SAMPLED = ("trainer.val_interval=1", "data.val_files=a.jsonl", "validation.n=4", "validation.temperature=1")
SETS = (*SAMPLED, "validation.sets.math=b.jsonl", "validation.sets.more=[c.jsonl, d.jsonl]")


def problems(*settings: str) -> str:
    return "\n".join(validation(load(None, settings)))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("validation.n=2",), "validation.n=2 with validation.temperature=0: greedy samples of a prompt are all the"),
        ((*SAMPLED, "validation.k=[1, 5]"), "5 is not among 1 to validation.n=4"),
        ((*SAMPLED, "validation.k=[2, 2]"), "a number is named twice"),
        ((*SAMPLED, "validation.sets.Ab=a.jsonl"), "'Ab' is no name of a set"),
        ((*SAMPLED, "validation.sets.a=3"), "validation.sets.a=3: must be a file, or a list of files"),
        ((*SAMPLED, "reward.source=none"), "no reward says which samples are right"),
        ((*SAMPLED, "checkpoint.keep_best=val/pass_at_2"), "a validation has no such metric; legal: reward_mean"),
        ((*SETS, "checkpoint.keep_best=val/maths/pass_at_4"), "no such set; legal: val/math/..., val/more/..."),
        (("checkpoint.keep_best=val/reward_mean",), "there is no validation; set trainer.val_interval"),
    ],
)
def test_what_cannot_work_is_named(settings: tuple[str, ...], line: str) -> None:
    assert line in problems(*settings)


def test_its_length_fits_the_models_that_read_its_responses() -> None:
    facts = ModelFacts(
        num_layers=1, num_heads=1, num_kv_heads=1, ffn_hidden_size=8, vocab_size=8, max_position_embeddings=200
    )
    config = load(None, [*SAMPLED, "data.max_prompt_tokens=100", "validation.max_new_tokens=101"])
    (line,) = fits_model(config, "model.path", facts)
    assert line == (
        "data.max_prompt_tokens+validation.max_new_tokens=201 is above the 200 positions of model.path; make them "
        "shorter"
    )
    assert not [*fits_model(config, "model.critic_path", facts)]  # reads what trains
    assert not [*fits_model(config, "model.path", replace(facts, max_position_embeddings=201))]
    scored = [*SAMPLED, "data.max_prompt_tokens=100", "validation.max_new_tokens=101", "reward.source=model"]
    assert [*fits_model(load(None, scored), "reward.source.path", facts)]
    assert "make it at least 202" in problems(*scored, "trainer.microbatch.max_tokens=201")
    assert problems(*scored, "trainer.microbatch.max_tokens=202") == ""


@pytest.mark.parametrize(
    "best",
    [
        "reward/mean",
        "val/reward_mean",
        "val/math/reward_correct",
        "val/maj_at_1",
        "val/more/pass_at_4_low",
        "val/avg_at_4",
    ],
)
def test_every_reported_metric_may_choose_the_best_checkpoint(best: str) -> None:
    assert problems(*SETS, f"checkpoint.keep_best={best}") == ""
