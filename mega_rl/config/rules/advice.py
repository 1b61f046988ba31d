"""Warnings about settings that can run together and seldom should: logged when a run starts, nothing is refused."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import Config


def advice(config: Config) -> Iterator[str]:
    """Yield a line for each such combination: the settings, what they do to the run, and what to set."""
    algorithm, trainer = config.algorithm, config.trainer
    updates = algorithm.epochs * trainer.prompts_per_step // trainer.minibatch_size
    if updates > 1 and algorithm.clip.dual == 0:
        yield (
            f"algorithm.clip.dual=0 with {updates} optimizer steps for each batch: where the advantage is negative the "
            "gradient of a token grows with its ratio, up to e^20, and is lost beyond; set algorithm.clip.dual=3"
        )
