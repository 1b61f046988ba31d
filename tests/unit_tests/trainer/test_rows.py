"""Rows that are another prompt or sample than they say are refused on all ranks, in steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from mega_rl.errors import RunError
from mega_rl.trainer.rows import check_rows
from mega_rl.types import Prompt, Rollout
from tests.helpers.fakes import FakePolicy, FakePrompts, FakeRanks, held_out
from tests.helpers.loops import FakeRun, RunSettings
from tests.unit_tests.trainer.dynamic_sampling_on_ranks import SAMPLES, collector

PROMPTS = FakePrompts().batch(0)
Change = Callable[[Rollout], Rollout]


def exchange_answers(rows: Rollout) -> Rollout:
    """Give two requests each other's prompt and answer, as servers that answer out of order would."""
    rows.tokens[[0, 2]] = rows.tokens[[2, 0]]
    return rows


def lengthen_prompt(rows: Rollout) -> Rollout:
    rows.prompt_lengths[3] = 3
    return rows


def rename(prompt: int, sample: int) -> Change:
    def renamed(rows: Rollout) -> Rollout:
        rows.prompt_index[1], rows.sample_index[1] = prompt, sample
        return rows

    return renamed


BROKEN: dict[str, tuple[Change, str]] = {
    "answers exchanged": (exchange_answers, "row 0 is called sample 0 of prompt 0, row 0 of the data, but its prompt"),
    "a token of the response": (lengthen_prompt, "row 3 is called sample 1 of prompt 1, row 1 of the data"),
    "twice": (rename(0, 0), "sample 0 of prompt 0 has 2 rows; this rank must have one row of each of 2 samples"),
    "no such prompt": (rename(4, 0), "sample 0 of prompt 4 has 1 rows; .* prompts 0 to 3, and no others"),
    "no such sample": (rename(0, 2), "sample 2 of prompt 0 has 1 rows"),
    "one is missing": (lambda rows: rows[1:], "sample 0 of prompt 0 has 0 rows"),
    "rows of two prompts": (lambda rows: rows[:4], "sample 0 of prompt 2 has 0 rows"),
    "no second samples": (lambda rows: rows[::2], "sample 1 of prompt 0 has 0 rows"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_row_of_another_prompt_is_refused(change: Change, message: str) -> None:
    """Rows in another order and wider prompts elsewhere are right."""
    rows = FakePolicy([]).generate(PROMPTS, step=0)
    check_rows(rows[torch.randperm(8)], PROMPTS, FakeRanks(), samples=2)
    with pytest.raises(RunError, match=message):
        check_rows(change(rows), PROMPTS, FakeRanks(), samples=2)


class Exchanging(FakePolicy):
    """Exchanges two prompts in generations of a kind."""

    kind = "generate"

    def generate(self, prompts: Sequence[Prompt], **how: object) -> Rollout:  # type: ignore[override]
        rows = super().generate(prompts, **how)  # type: ignore[arg-type]
        return exchange_answers(rows) if self.events[-1] == self.kind else rows


@pytest.mark.parametrize("kind", ["generate", "validate"])
def test_wrong_rows_end_steps_and_evaluations(kind: str) -> None:
    policy = Exchanging([])
    policy.kind = kind
    settings = RunSettings(steps=1, val_interval=1)
    trainer = FakeRun(grpo=True, rollout=policy, settings=settings, validation=held_out(PROMPTS))
    with pytest.raises(RunError, match="row 0 is called sample 0 of prompt 0"):
        trainer.fit()
    assert "update_actor" not in trainer.events  # type: ignore[attr-defined]


def test_rows_of_dynamic_sampling_are_checked() -> None:
    """Those of a generation before they are scored, and those that the step trains on."""
    dynamic = collector(FakeRanks())
    for step in range(3):
        samples = dynamic.take(step).samples
        check_rows(samples.rollout, samples.prompts, FakeRanks(), samples=SAMPLES)
    generate = dynamic.source.generate
    dynamic.source.generate = lambda prompts, **how: exchange_answers(generate(prompts, **how))[:12]  # type: ignore
    with pytest.raises(RunError, match="sample 0 of prompt 4 has 0 rows"):
        dynamic.take(3)
