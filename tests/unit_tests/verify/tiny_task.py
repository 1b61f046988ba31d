"""A learning task of two arms, for tests of what surrounds the training."""

from __future__ import annotations

from mega_rl.verify.learn.tasks import Beats, LearningTask, Reaches, StepMetric, Variant

TINY = LearningTask(
    name="tiny",
    summary="two arms",
    vocabulary="ab",
    prompts=[("a", ""), ("b", "")],
    reward=lambda prompt, response: float(prompt == response),
    settings={},
    variants=[Variant("right"), Variant("wrong")],
    statements=[Beats("right", "wrong"), Reaches("right", 0.5)],
    measure=StepMetric("reward/mean"),
    unit="mean reward",
)
