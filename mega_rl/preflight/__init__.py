"""Checks before work starts: config, rules, and the files that the run will read.

Imports no torch, so that a mistake is reported at once.
"""

from mega_rl.preflight.launcher import launched_world_size
from mega_rl.preflight.run import check_run, preflight

__all__ = ["check_run", "launched_world_size", "preflight"]
