"""The loop of a run, and the parts of it that need neither an engine nor a config."""

from mega_rl.trainer.loop import Trainer

__all__ = ["Trainer"]
