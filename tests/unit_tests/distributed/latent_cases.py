"""Latent attention over tensor parallelism without sequence parallelism, past our own refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mega_rl.config.schema import OptimConfig
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses


def gradients(rank: int, checkpoint: str, *layouts: str) -> dict[str, dict[str, Any]]:
    """Gradients by Hugging Face's names on each layout."""
    from mega_rl.accelerator import prepare

    prepare("auto")
    from mega_rl.engines import build

    real = build.transformer_config

    def forced(hf: Any, *, layout: Any, **kwargs: Any) -> Any:
        config = real(hf, layout=dataclasses.replace(layout, sequence_parallel=layout.tp > 1), **kwargs)
        config.sequence_parallel = layout.sequence_parallel
        return config

    build.transformer_config = forced
    try:
        optim = OptimConfig(clip_grad=0.0, distributed_optimizer=False)
        found = {}
        for name in layouts:
            config = replaced(make_config(Path(checkpoint), layout=name), "optim", **vars(optim))
            with running_engine(config) as engine:
                engine.train_minibatch(own_rows(random_experience(), engine), losses("lm"), lr=0.0)
                found[name] = exported_gradients(engine)
        return found
    finally:
        build.transformer_config = real
