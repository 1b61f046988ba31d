"""The learning tasks by name."""

from __future__ import annotations

from mega_rl.bench.learn.task import LearningTask
from mega_rl.bench.learn.tasks.bandit import BANDIT
from mega_rl.bench.learn.tasks.delayed_credit import DELAYED_CREDIT
from mega_rl.bench.learn.tasks.off_policy import OFF_POLICY
from mega_rl.bench.learn.tasks.reused_batch import REUSED_BATCH
from mega_rl.bench.learn.tasks.sorting import SORTING

TASKS: dict[str, LearningTask] = {
    task.name: task for task in (BANDIT, DELAYED_CREDIT, SORTING, OFF_POLICY, REUSED_BATCH)
}
