"""An actor that trains and a reference that takes in its weights, on each rank of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.engines import exported, make_config, own_rows, replaced
from tests.helpers.models import random_experience

UPDATES = 3


class Way(NamedTuple):
    """A way to run both models."""

    layout: str = "1"
    engine: str = "megatron"
    dtype: str = "fp32"
    rate: float = 0.3
    turns: bool = False  # models take turns on the device
    family: str = "qwen3"


def run_all(rank: int, folder: str, ways: dict[str, Way]) -> dict[str, Any]:
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    return {name: one_way(Path(folder), way, accelerator) for name, way in ways.items()}


def one_way(folder: Path, way: Way, accelerator: Any) -> dict[str, Any]:
    """Weights of both models at every update, in float64, and the distances that updates return."""
    from mega_rl.engines.weight_average import WeightAverage
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.trainer.assemble import build_actor, session
    from mega_rl.workers.residency import EVERYTHING, PARAMETERS, ResidentModels
    from tests.unit_tests.distributed.engine_cases import losses

    config = make_config(folder / way.family, layout=way.layout, engine=way.engine, dtype=way.dtype)
    with session(config, accelerator) as groups:
        models = ResidentModels(accelerator, one_at_a_time=way.turns)
        actor = models.add("actor", build_actor(config, groups, accelerator))
        other = replaced(config, "model", path=str(folder / f"{way.family} reference"))
        reference = models.add("reference", build_actor(other, groups, accelerator, trainable=False))
        stored = models.stored("reference"), models.stored("actor")
        average = WeightAverage(*stored, way.rate, GroupRanks(groups.host_world))

        def weights(role: Any) -> dict[str, torch.Tensor]:
            models.take_turn(role, PARAMETERS)
            return {name: tensor.double() for name, tensor in exported(models.engines[role]).items()}

        rows = own_rows(random_experience(), actor)
        result: dict[str, Any] = {"references": [weights("reference")], "actors": [], "distances": []}

        def logprobs(role: Any) -> torch.Tensor | None:
            models.take_turn(role, PARAMETERS)
            return models.engines[role].forward(rows).logprobs

        result["before"] = logprobs("reference")
        for _ in range(UPDATES):
            models.take_turn("actor", EVERYTHING)
            actor.train_minibatch(rows, losses("lm"), lr=1e-2)
            result["actors"].append(weights("actor"))
            result["distances"].append(average.update())
            if not way.turns:  # as servers on the same devices make it do: the host's copy is of the new weights
                reference.offload()
                reference.onload()
            result["references"].append(weights("reference"))
        result["after"] = logprobs("reference")
        result["policy"] = logprobs("actor")
        result["pieces"] = sorted({piece.name.partition("/")[0] for piece in average.state().pieces})
        assert reference.optimizer is None
        return result


def refused(rank: int, folder: str, families: Sequence[str]) -> str:
    """What is said to a reference of another shape."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.engines.weight_average import WeightAverage
    from mega_rl.errors import UserError
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.trainer.assemble import build_actor, session

    config = make_config(Path(folder) / families[0])
    with session(config, accelerator) as groups:
        actor = build_actor(config, groups, accelerator)
        other = replaced(config, "model", path=str(Path(folder) / families[1]))
        reference = build_actor(other, groups, accelerator, trainable=False)
        try:
            WeightAverage(reference, actor, 0.5, GroupRanks(groups.host_world)).update()
        except UserError as error:
            return str(error)
    return ""
