"""Metrics of a step by what they are of: responses and rewards, tokens, updates; each equal on all ranks."""

from mega_rl.trainer.step_metrics.answers import AnswerTable
from mega_rl.trainer.step_metrics.responses import EQUAL_GROUPS, part_metrics, rollout_metrics
from mega_rl.trainer.step_metrics.tokens import experience_metrics
from mega_rl.trainer.step_metrics.updates import mean_metrics

__all__ = ["EQUAL_GROUPS", "AnswerTable", "experience_metrics", "mean_metrics", "part_metrics", "rollout_metrics"]
