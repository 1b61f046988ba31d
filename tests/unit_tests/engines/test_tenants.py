"""Tenants of one engine get, bit for bit, the weights that each of them gets alone."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from mega_rl.algorithms.kl import KLController, k3
from mega_rl.algorithms.policy_losses import PPO
from mega_rl.config.schema.training import AdapterConfig
from mega_rl.workers.models import LearningWorker, PolicyLoss
from mega_rl.workers.tenants import Tenants
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, own_rows, parts, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL, without

NAMES = [f"tenant {number}" for number in range(8 if FULL else 4)]
STEPS = 3
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"layout": "1"}),
    "tp2-sp": (2, {"layout": "tp2-sp"}),
    "dp2, bf16": (2, {"layout": "dp2", "dtype": "bf16"}),
    "pp2": (2, {"layout": "pp2"}),
    "fsdp2": (2, {"layout": "1", "engine": "fsdp"}),
}


def worker_of(name: str, engine: Any) -> LearningWorker:
    """Return the learner of a tenant, with a loss and a learning rate of its own."""
    number = NAMES.index(name)
    loss = PolicyLoss(PPO(clip_low=0.1 + 0.02 * number), kl=KLController(0.1 * number), kl_estimator=k3)
    return LearningWorker("actor", engine, loss, learning_rate=lambda step: 1e-3 * (number + 1) / (step + 1))


def make_step(name: str, step: int, engine: Any) -> None:
    rows = own_rows(random_experience(seed=100 * NAMES.index(name) + step), engine)
    worker = worker_of(name, engine)
    worker.evaluate(rows)
    worker.update(rows, step=step)


def digest(engine: Any) -> str:
    """Return the SHA-256 of adapters and merged weights."""
    total = hashlib.sha256()
    for weights in (parts(engine), exported(engine)):
        for name, tensor in weights.items():
            total.update(name.encode() + tensor.view(-1).float().numpy().tobytes())
    return total.hexdigest()


def digests(rank: int, checkpoint: str, how: dict[str, Any]) -> dict[str, str]:
    """Return each tenant's digest after its steps, in random turns on one engine."""
    config = make_config(Path(checkpoint), **how)
    config = replaced(config, "model", adapter=AdapterConfig(4, 8.0, ["q_proj", "v_proj", "down_proj"]))
    with running_engine(config) as engine:
        tenants = Tenants(engine)
        turns = [name for name in NAMES for _ in range(STEPS)]
        random.Random(7).shuffle(turns)
        done = dict.fromkeys(NAMES, 0)
        for name in turns:
            tenants.select(name)
            make_step(name, done[name], engine)
            done[name] += 1
        together = {}
        for name in NAMES:
            tenants.select(name)
            together[name] = digest(engine)
        return together


def alone(rank: int, checkpoint: str, how: dict[str, Any], name: str) -> str:
    """Return a tenant's digest after its steps on an engine that knows no tenants."""
    config = make_config(Path(checkpoint), **how)
    config = replaced(config, "model", adapter=AdapterConfig(4, 8.0, ["q_proj", "v_proj", "down_proj"]))
    with running_engine(config) as engine:
        for step in range(STEPS):
            make_step(name, step, engine)
        return digest(engine)


@pytest.mark.parametrize("case", without(CASES, "tp2-sp", "pp2", "fsdp2"))
def test_tenants_get_the_weights_that_each_gets_alone(case: str, tmp_path: Path) -> None:
    ranks, how = CASES[case]
    write_tiny_checkpoint(tmp_path)
    together = run_ranks(ranks, digests, str(tmp_path), how)[0]
    each = {name: run_ranks(ranks, alone, str(tmp_path), how, name)[0] for name in (NAMES if FULL else NAMES[::2])}
    assert len(set(together.values())) == len(NAMES)
    assert {name: together[name] for name in each} == each
