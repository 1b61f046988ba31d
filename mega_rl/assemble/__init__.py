"""The one place that turns a Config into engines, workers, rollouts and a trainer.

`mega_rl.accelerator.prepare` must have run before this package is imported: it brings Megatron-Core in.
"""

from mega_rl.assemble.run import build_trainer, layout_of, run, session

__all__ = ["build_trainer", "layout_of", "run", "session"]
