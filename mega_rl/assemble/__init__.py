"""The one place that turns a Config into engines, workers, rollouts and a trainer."""

from mega_rl.assemble.run import build_trainer, layout_of, running, session, train

__all__ = ["build_trainer", "layout_of", "running", "session", "train"]
