"""Checks before work starts: config, rules, and the files that the run will read."""

from mega_rl.plan.preflight.host import launched_world_size
from mega_rl.plan.preflight.run import check_run, preflight

__all__ = ["REWARD_FUNCTIONS", "check_run", "launched_world_size", "preflight"]
