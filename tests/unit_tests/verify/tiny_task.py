"""A learning task of two arms, for tests of what surrounds the training."""

from __future__ import annotations

from mega_rl.verify.learn.tasks import LearningTask, Measure, Statement, Variant

TINY = LearningTask(
    name="tiny",
    summary="two arms",
    vocabulary="ab",
    prompts=[("a", ""), ("b", "")],
    reward=lambda prompt, response: float(prompt == response),
    settings={},
    variants=[Variant("right"), Variant("wrong")],
    statements=[Statement("right", beats="wrong"), Statement("right", reaches=0.5)],
    measure=Measure("reward/mean"),
    unit="mean reward",
)
