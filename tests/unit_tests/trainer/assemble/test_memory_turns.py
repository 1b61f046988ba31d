"""Trainer and servers on devices with a budget: who may start when, and the sums of every turn, also after restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from mega_rl.config.loader import load
from mega_rl.config.schema import RolloutConfig, TrainerConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.engines.base import EngineSettings
from mega_rl.rollout.sglang.build import Connection, servers_per_host, start_servers
from mega_rl.rollout.sglang.server.memory import ServersMemory
from mega_rl.rollout.sglang.server.pool import StartedServers
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from mega_rl.trainer.assemble.plan import engine_settings
from mega_rl.trainer.loop import Stages
from mega_rl.types import Metrics
from mega_rl.workers.residency import TAGS, Residency, ResidentModels
from tests.helpers.device_budget import GIB, BudgetAccelerator, BudgetEngine, BudgetProcess, DeviceMemory
from tests.helpers.fakes import FakeRanks, FakeTimer
from tests.helpers.inputs import qwen3_config
from tests.unit_tests.rollout.sglang.test_sync import Run

# One of two devices of Qwen3-8B under GRPO at TP2: parameters 7.6 GiB, FP32 gradients, moments and main parameters of
# the distributed optimizer over a data-parallel size of 4, and a reference.
ACTOR = {"parameters": int(7.6 * GIB), "gradients": int(15.3 * GIB), "optimizer": int(11.5 * GIB)}
REFERENCE = {"parameters": int(7.6 * GIB)}
SERVER = {"weights": int(15.3 * GIB), "idle": 8 * GIB}
RANKS = 2


class Ranks(FakeRanks):
    """The first of the ranks of one host; the others would only follow."""

    size = RANKS


HF = parse_hf_config(qwen3_config("8b"))


class Fleet:
    """Addresses of servers: what a router does when one has moved is not at issue here."""

    def place(self, endpoint: Any) -> None: ...


def sections_of(*settings: str) -> tuple[RolloutConfig, TrainerConfig, EngineSettings]:
    config = load(None, ["rollout.backend=sglang", f"engine.megatron.tp={RANKS}", "model.dtype=bf16", *settings])
    return config.rollout, config.trainer, engine_settings(config)


class Colocation:
    """A run on two devices of 80 GB, by the package's own order."""

    def __init__(self, resources: ExitStack, *settings: str, devices: int = RANKS) -> None:
        self.devices = [DeviceMemory(80 * GIB) for _ in range(devices)]
        self.accelerator = BudgetAccelerator(self.devices)
        self.processes: list[BudgetProcess] = []
        self.lost: list[int] = []
        sections, make = sections_of(*settings), cast(Any, self.process)
        pool = start_servers(*sections, HF, self.accelerator, Ranks(), resources, process=make)
        assert isinstance(pool, StartedServers)
        self.pool = pool

    def process(self, settings: Any, index: int, folder: Any) -> BudgetProcess:
        self.processes.append(BudgetProcess(settings, index, self.devices, SERVER))
        return self.processes[-1]

    def build_roles(self) -> None:
        self.models = ResidentModels(self.accelerator, one_at_a_time=False)
        for role, sizes in {"actor": ACTOR, "reference": REFERENCE}.items():
            self.models.add(cast(Any, role), cast(Any, BudgetEngine(role, self.devices[:RANKS], **sizes)))
        self.actor = cast(BudgetEngine, self.models.engines["actor"])

    def connect(self, resources: ExitStack) -> None:
        self.pool.wait_ready()
        self.run = Run(self.pool.endpoints)
        memory = ServersMemory(Ranks(), self.run.controls, self.pool, released=TAGS)
        router, table = cast(Any, Fleet()), self.run.table
        table.pool, table.router = self.pool, router
        self.connection = Connection(
            router=router, sync=self.run.sync, memory=memory, concurrency=1, adapter="", _table=table,
            _actor=cast(Any, self.actor),
        )  # fmt: skip
        self.residency = Residency(self.models, cast(Any, FakeRanks()), memory)
        self.run.sync.after_send = self.residency.after_send
        self.stage = Stages(FakeTimer(), self.residency)

    def generate(self) -> None:
        """As `SglangRolloutEngine.collect`: servers that were lost come back and are sent the weights."""
        with self.stage("generate"):
            self.run.trainer.step(self.run.sync.weight_version)
            lost = [index for index, process in enumerate(self.processes) if index not in self.run.sync.ready]
            lost += [index for index, process in enumerate(self.processes) if index in self.lost]
            if lost:
                self.connection.bring_back(sorted(set(lost)))
                self.lost = []
            assert self.run.sync.ready == set(range(len(self.processes)))
            assert all(process.server.holds >= set(TAGS) for process in self.processes if process.server)
            assert not self.actor.here

    def publish(self, version: int) -> Metrics:
        self.run.trainer.step(version)
        return self.stage.publish(self.run.sync)

    def step(self) -> None:
        """Publish, generate and take the devices back for training."""
        self.publish(self.run.sync.weight_version + 1)
        self.generate()
        with self.stage("update_actor"):
            pass

    def kill(self, index: int) -> None:
        server = self.processes[index].server
        assert server is not None
        server.die()


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(resources: ExitStack) -> Colocation:
    run = Colocation(resources)
    run.build_roles()
    run.connect(resources)
    return run


def used(devices: Sequence[DeviceMemory]) -> list[int]:
    return [device.used for device in devices]


def test_colocated_servers_start_before_the_models(resources: ExitStack) -> None:
    run = Colocation(resources)
    assert used(run.devices) == [SERVER["idle"]] * RANKS
    run.build_roles()
    run.connect(resources)
    for _ in range(3):
        run.step()
    assert all(process.starts == 1 for process in run.processes)
    assert max(device.largest for device in run.devices) <= 80 * GIB


def test_servers_of_a_run_draw_different_noise(resources: ExitStack) -> None:
    """By seeds that differ: SGLang on CUDA draws for a whole batch from one generator."""
    run = Colocation(resources, "trainer.seed=7")
    assert [process.settings.seed for process in run.processes] == [7, 8]


def test_buckets_leave_before_the_servers_caches_come(resources: ExitStack) -> None:
    """What a send of Qwen3-8B holds at most fits next to the servers' weights, and is given back to the device."""
    run = Colocation(resources)
    run.build_roles()
    run.connect(resources)
    sending = sending_bytes(parse_hf_config(qwen3_config("8b")), bucket_bytes=256 << 20, itemsize=2)
    assert sending > 4e9, "the embedding, its parts and the bucket that it fills"
    send, cached = run.run.trainer.send, []

    def send_by_buckets(**given: Any) -> Any:
        for device in run.devices:
            device.take("buckets", sending)
        report = send(**given)
        for device in run.devices:
            device.take("cached", device.free("buckets"))
        return report

    run.run.trainer.send = send_by_buckets  # type: ignore[method-assign]
    for process in run.processes:
        server = process.server
        assert server is not None
        server.take = lambda tag, take=server.take: (  # type: ignore[method-assign, misc]
            cached.append((tag, run.devices[0].held.get("cached", 0))), take(tag)
        )  # fmt: skip
    run.step()
    assert [held for tag, held in cached if tag == "kv_cache"] == [0] * len(run.processes)
    assert max(device.largest for device in run.devices) <= 80 * GIB


@pytest.mark.parametrize("when", ["while it generates", "before weights are sent", "while it holds on to its memory"])
def test_lost_server_returns_into_the_free_memory(run: Colocation, when: str) -> None:
    run.publish(1)
    run.generate()
    before = used(run.devices)
    with run.stage("update_actor"):
        trained = used(run.devices)
    if when == "while it generates":
        run.publish(2)
        run.kill(1)
        run.lost = [1]
        run.generate()
    elif when == "before weights are sent":
        run.kill(1)
        run.publish(2)
        run.generate()
    else:
        server = run.processes[1].server
        assert server is not None
        server.faults = {"/release_memory_occupation": ("error", server.number("/release_memory_occupation") + 1)}
        run.step()
        assert used(run.devices) == [trained[0], trained[1] - SERVER["idle"]]  # stopped, so that the trainer fits
        run.publish(3)
        run.generate()
    assert run.processes[1].starts == 2
    assert used(run.devices) == before
    run.step()
    assert max(device.largest for device in run.devices) <= 80 * GIB


# -- how many servers a host has ---------------------------------------------------------------------------------------


def count(*settings: str, visible: int, ranks: int, colocated: bool = True) -> int:
    accelerator = BudgetAccelerator([DeviceMemory(80 * GIB)] * visible)
    config = load(None, ["rollout.backend=sglang", *settings])
    return servers_per_host(config.rollout.sglang.server, accelerator, ranks_per_host=ranks, colocated=colocated)


def test_servers_fill_their_host_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert count(visible=8, ranks=8) == 8
    assert count("rollout.sglang.server.tp=4", visible=8, ranks=8) == 2
    assert count(visible=8, ranks=4) == 4
    assert count("rollout.sglang.server.tp=2", visible=8, ranks=4, colocated=False) == 2
    assert not caplog.records
    assert count("rollout.sglang.server.tp=3", visible=8, ranks=8) == 2
    assert count("rollout.sglang.server.count=1", visible=8, ranks=8) == 1
    assert [record.message.split(" leave ")[1] for record in caplog.records] == [
        "2 of 8 devices of each host idle while responses are generated",
        "7 of 8 devices of each host idle while responses are generated",
    ]
