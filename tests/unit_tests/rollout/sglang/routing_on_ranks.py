"""The trainer's passes over rows of a real server."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mega_rl.config.schema import RolloutConfig
from mega_rl.types import Experience
from tests.helpers.engines import make_config, replaced, running_engine


def forwards(
    _: int, checkpoint: Path, temperature: float, columns: dict[str, Tensor], routings: dict[str, Tensor | None]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by name the log-probs [B, S] and the experts [B, S, L, K] of a pass that replays this routing.

    columns: tokens, prompt_lengths and lengths of the rows.
    """
    config = make_config(checkpoint, rollout=RolloutConfig(temperature=temperature))
    config = replaced(config, "engine.megatron.moe", routing_replay=True)
    results = {}
    with running_engine(config) as engine:
        for name, routing in routings.items():
            outputs = engine.forward(Experience.from_rows(**columns, routing=routing))
            results[name] = (outputs.logprobs, outputs.routing)
    return results
