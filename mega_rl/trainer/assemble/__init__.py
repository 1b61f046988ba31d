"""The one place that turns a Config into engines, workers, rollouts and a trainer."""

from mega_rl.trainer.assemble.plan import build_actor
from mega_rl.trainer.assemble.run import running, session, train
from mega_rl.trainer.assemble.trainer import build_trainer

__all__ = ["build_actor", "build_trainer", "running", "session", "train"]
