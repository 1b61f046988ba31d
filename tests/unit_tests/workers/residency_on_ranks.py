"""Stages of a real engine with servers that look at it: what a rank does for test_residency.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_rl.types import Metrics
from tests.helpers.engines import exported, make_config, own_rows, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses
from tests.unit_tests.engines.test_offload import sizes


class Watcher:
    """Servers, sync, rollout source and checkpoint store in one: writes down what the policy's engine holds."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.seen: list[tuple[str, dict[str, int]]] = []
        self.sent: dict[str, torch.Tensor] = {}
        self.weight_version = 0
        self.make_room: Callable[[], None] = lambda: None

    def note(self, event: str) -> None:
        self.seen.append((event, sizes(self.engine)))

    def release(self, tags: Sequence[str]) -> None:
        self.note("release " + " ".join(tags))

    def resume(self, tags: Sequence[str]) -> None:
        self.note("resume " + " ".join(tags))

    def resume_at(self, version: int) -> None:
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        self.note("publish")
        self.sent = exported(self.engine)
        self.make_room()
        self.note("prove")
        self.engine.forward(own_rows(random_experience(), self.engine))
        self.weight_version += 1
        return {"rollout/weight_version": float(self.weight_version)}


def run_stages(rank: int, checkpoint: str) -> dict[str, Any]:
    """Three steps that share the devices and three that do not; what the engine held at every event."""
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.workers.residency import Residency, ResidentModels

    actual: dict[str, Any] = {}
    with running_engine(make_config(Path(checkpoint), layout="dp2")) as engine:
        rows = own_rows(random_experience(), engine)
        actual["stayed"] = [engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"] for _ in range(3)]
        actual["stayed weights"] = exported(engine)
    with running_engine(make_config(Path(checkpoint), layout="dp2")) as engine:
        watcher = Watcher(engine)
        models = ResidentModels(prepare("auto"), engines={"actor": engine})
        devices = Residency(models, GroupRanks(engine.groups.world), watcher)
        watcher.make_room = partial(devices.after_send, [0])
        actual["moved"], actual["metrics"] = [], [devices.publish(watcher)]

        def stage(name: str, note: str) -> None:
            devices.enter(name)
            watcher.note(note)

        for step in range(3):
            stage("generate", "generate")
            stage("update_actor", "train")
            actual["moved"].append(engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"])
            actual["whole"] = sizes(engine)
            actual["metrics"].append(devices.publish(watcher))
            stage("validate", "validate")
            if step == 1:
                stage("save", "save")
        stage("generate", "generate")
        stage("old_logprobs", "train")
        actual["moved weights"] = exported(engine)
        actual["sent"] = watcher.sent
        actual["seen"] = watcher.seen
    return actual
