"""The loop of a run and its parts; `assemble` builds a run from a Config."""

from mega_rl.trainer.loop import Trainer

__all__ = ["Trainer"]
