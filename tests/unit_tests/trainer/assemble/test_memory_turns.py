"""Trainer and servers on devices with a budget: who may start when, and the sums of every turn, also after restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mega_rl.config.loader import load
from mega_rl.config.schema import RolloutConfig, TrainerConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.engines.base import EngineSettings
from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.build import Connection, colocated_bytes, servers_per_host, start_servers
from mega_rl.rollout.sglang.server.memory import TRAINER_RESIDUE, ServersMemory, memory_fraction, server_reserve
from mega_rl.rollout.sglang.server.pool import StartedServers
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from mega_rl.trainer.assemble.plan import engine_settings
from mega_rl.trainer.loop import Stages
from mega_rl.types import Metrics
from mega_rl.workers.residency import EVERYTHING, TAGS, TURNS, Residency, ResidentModels
from tests.helpers.device_budget import (
    GIB,
    BudgetAccelerator,
    BudgetEngine,
    BudgetProcess,
    DeviceMemory,
    OvercommitError,
)
from tests.helpers.fakes import FakeRanks, FakeTimer
from tests.helpers.inputs import qwen3_config
from tests.unit_tests.rollout.sglang.test_sync import Run

# One of two devices of Qwen3-8B under GRPO at TP2: parameters 7.6 GiB, FP32 gradients, moments and main parameters of
# the distributed optimizer over a data-parallel size of 4, and a reference.
ACTOR = {"parameters": int(7.6 * GIB), "gradients": int(15.3 * GIB), "optimizer": int(11.5 * GIB)}
CRITIC = ACTOR
REFERENCE = {"parameters": int(7.6 * GIB)}
SERVER = {"weights": int(15.3 * GIB), "idle": 8 * GIB}
RANKS = 2


class Ranks(FakeRanks):
    """The first of the ranks of one host; the others would only follow."""

    size = RANKS


HF = parse_hf_config(qwen3_config("8b"))


class Fleet:
    """Addresses of servers: what a router does when one has moved is not at issue here."""

    def move(self, index: int, endpoint: Any) -> None: ...


def sections_of(*settings: str) -> tuple[RolloutConfig, TrainerConfig, EngineSettings]:
    config = load(None, ["rollout.backend=sglang", f"engine.megatron.tp={RANKS}", "model.dtype=bf16", *settings])
    return config.rollout, config.trainer, engine_settings(config)


class Colocation:
    """A run on two devices of 80 GB, by the package's own order; `fail` lists what befalls servers in a generation."""

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

    def build_roles(self, *, one_at_a_time: bool = False, **others: dict[str, int]) -> None:
        self.models = ResidentModels(self.accelerator, one_at_a_time=one_at_a_time)
        for role, sizes in {"actor": ACTOR, **others, "reference": REFERENCE}.items():
            self.models.add(cast(Any, role), cast(Any, BudgetEngine(role, self.devices[:RANKS], **sizes)))
        self.actor = cast(BudgetEngine, self.models.engines["actor"])

    def connect(self, resources: ExitStack) -> None:
        self.pool.wait_ready()
        self.run = Run(self.pool.endpoints)
        memory = ServersMemory(Ranks(), self.run.controls, self.pool, released=TAGS)
        self.connection = Connection(
            router=cast(Any, Fleet()), sync=self.run.sync, memory=memory, concurrency=1,
            _pool=self.pool, _controls=list(self.run.controls.values()), _actor=cast(Any, self.actor),
        )  # fmt: skip
        self.residency = Residency(self.models, cast(Any, FakeRanks()), memory)
        self.run.sync.add_listener(self.residency.after_send)
        self.stage = Stages(FakeTimer(), self.residency)

    def generate(self, *, stage: str = "generate") -> None:
        """As `SglangRolloutEngine.collect`: servers that were lost come back and are sent the weights."""
        with self.stage(stage):
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


def test_the_sums_of_every_turn(run: Colocation) -> None:
    trainer, policy = sum(ACTOR.values()) + sum(REFERENCE.values()), ACTOR["parameters"]
    server, idle = run.processes[0].server, SERVER["idle"]
    assert server is not None
    cache = server.sizes["kv_cache"][0]
    assert cache > 20 * GIB  # what the trainer leaves is used
    seen: dict[str, set[int]] = {}
    residency, share = run.residency, Residency._share

    def shared(layout: Any) -> int:
        moved = share(residency, layout)
        seen.setdefault(residency.layout.name, set()).update(used(run.devices))
        return moved

    residency._share = shared  # type: ignore[method-assign]
    for _ in range(2):
        run.step()
    assert seen == {
        "sending": {policy + SERVER["weights"] + idle},
        "proving": {policy + SERVER["weights"] + cache + idle},
        "generating": {SERVER["weights"] + cache + idle},
        "training": {trainer + idle},
    }


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


def test_the_run_ends_when_no_server_is_left(run: Colocation) -> None:
    run.step()
    for index in range(RANKS):
        run.kill(index)
    with pytest.raises(RunError, match="no SGLang server is left: servers did not resume the memory of weights"):
        run.step()
    assert run.actor.here == set(ACTOR)


def test_separate_servers_keep_their_memory(resources: ExitStack) -> None:
    run = Colocation(resources, "rollout.sglang.placement=separate", devices=2 * RANKS)
    run.build_roles()  # while the servers come up
    run.pool.wait_ready()
    trainer = sum(ACTOR.values()) + sum(REFERENCE.values())
    servers = [process.server for process in run.processes]
    assert [server.sizes["kv_cache"][0] > 40 * GIB for server in servers if server] == [True] * RANKS
    assert used(run.devices)[:RANKS] == [trainer] * RANKS
    assert all(server.holds >= set(TAGS) for server in servers if server)


def test_models_that_do_not_fit_take_turns(resources: ExitStack) -> None:
    """An actor, a critic, a reference and a reward model, whose sum a device does not have: every turn's sum."""
    roles = {"critic": CRITIC, "reward": REFERENCE}
    together = Colocation(resources)
    with pytest.raises(OvercommitError, match=r"reward parameters wants 7\.6 of 80\.0 GiB, held: .*'critic opt"):
        together.build_roles(**roles)
    run = Colocation(resources)
    run.build_roles(one_at_a_time=True, **roles)
    assert used(run.devices) == [SERVER["idle"]] * RANKS
    run.connect(resources)
    seen: list[Any] = []
    for engine in run.models.engines.values():
        cast(Any, engine).seen = seen
    stages = {"reward": 1, "old_logprobs": 1, "ref_logprobs": 1, "values": 1, "update_critic": 2, "update_actor": 2}
    for version in (1, 2):
        run.publish(version)
        run.generate()
        seen.clear()
        expected = []
        for stage, passes in stages.items():
            role, parts = TURNS[stage]
            engine, sizes = cast(Any, run.models.engines[role]), {**roles, "actor": ACTOR, "reference": REFERENCE}[role]
            trains = parts == EVERYTHING
            held = {f"{role} {part}": sizes[part] for part in sizes if part in parts}
            held |= {"server 0 idle": SERVER["idle"]} | (
                {"server 0 weights": SERVER["weights"]} if stage == "reward" else {}
            )
            with run.stage(stage):
                for _ in range(passes):
                    engine.train_minibatch(None, None, lr=1.0) if trains else engine.forward(None)
                    expected.append((f"{role} {'trains' if trains else 'evaluates'}", held))
        assert seen == expected
    metrics = run.publish(3)
    assert metrics["memory/training_bytes"] == sum(ACTOR.values())  # the largest turn's
    assert metrics["memory/scoring_bytes"] == sum(REFERENCE.values())
    with_weights = used(run.devices)
    seen.clear()
    with run.stage("checkpoint"):
        run.stage.hold("save")
        for name in ("actor", "critic"):
            run.models.stored(cast(Any, name)).state()
    for (event, held), name in zip(seen, ("actor", "critic"), strict=True):
        assert event == f"{name} lists its state"
        assert set(held) == {f"{name} parameters", f"{name} optimizer", "server 0 weights", "server 0 idle"}
    run.generate(stage="validate")
    assert used(run.devices) == with_weights  # the servers have weights and cache again, the trainer nothing
    assert max(device.largest for device in run.devices) <= 80 * GIB


def test_a_reward_model_finds_room_after_a_validation(resources: ExitStack) -> None:
    """Servers have weights and cache then: the cache makes room, and comes back for the rollout that follows."""
    run = Colocation(resources)
    run.build_roles(one_at_a_time=True, reward=REFERENCE)
    run.connect(resources)
    run.publish(1)
    before = used(run.devices)
    run.generate(stage="validate")
    with run.stage("reward"):
        cast(Any, run.models.engines["reward"]).forward(None)
    ((_, held),) = cast(Any, run.models.engines["reward"]).seen
    assert set(held) == {"reward parameters", "server 0 weights", "server 0 idle"}
    run.generate()
    assert used(run.devices) == before


# -- the share of a device ---------------------------------------------------------------------------------------------


def fraction_of(setting: float, **changes: int) -> float:
    return memory_fraction(setting, **{"total": 80 * GIB, "policy": 8 * GIB, "weights": 15 * GIB, "tp": 1, **changes})


@pytest.mark.parametrize("gib", [24, 48, 80, 141, 192])
def test_computed_share_leaves_room_for_both(gib: int) -> None:
    total, kept = gib * GIB, 2 * GIB + TRAINER_RESIDUE + server_reserve(gib * GIB, 1)
    fraction = fraction_of(0.0, total=total, policy=2 * GIB, weights=2 * GIB)
    assert kept <= total - fraction * total < kept + 0.002 * total
    assert fraction == round(fraction, 3)
    assert fraction_of(0.55) == 0.55


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        (
            {"policy": 60 * GIB},
            0.0,
            r"mem_fraction_static=0: colocated servers do not fit.* raise rollout.sglang.server.tp",
        ),
        ({"weights": 70 * GIB}, 0.0, r"the server needs 70.0 GiB for weights"),
        ({}, 0.95, r"mem_fraction_static=0.95: of a device's 80.0 GiB .* leaves 11.0 GiB to the trainer"),
        ({}, 0.1, r"mem_fraction_static=0.1: of a device's 80.0 GiB a colocated server needs at least 15.0 GiB"),
    ],
)
def test_a_share_that_cannot_work_is_refused(changes: dict[str, int], setting: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        fraction_of(setting, **changes)


def test_the_policy_is_counted_by_its_layout() -> None:
    """8.19e9 parameters of Qwen3-8B in bf16, in halves; norms are whole on both ranks."""

    buckets = sending_bytes(HF, bucket_bytes=256 << 20, itemsize=2)

    def parts(*settings: str, world_size: int = 2) -> tuple[int, int]:
        rollout, _, engine = sections_of(*settings)
        policy, weights = colocated_bytes(rollout, engine, HF, world_size=world_size)
        return policy - buckets, weights

    assert parts("engine.megatron.tp=1") == (2 * 8190735360, 2 * 8190735360)
    half, weights = parts()
    assert weights == 2 * 8190735360
    assert 8190735360 <= half < 8190735360 * 1.001
    assert parts("engine.backend=fsdp", "engine.megatron.tp=null", world_size=8)[0] == 4 * 8190735360 // 8


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


def test_spanning_servers_take_shares_of_their_hosts() -> None:
    spanning = ["rollout.sglang.server.nodes=2", "rollout.sglang.server.tp=8"]
    assert count(*spanning, visible=8, ranks=8) == 2
    assert count(*spanning, visible=8, ranks=4, colocated=False) == 1
    with pytest.raises(
        UserError, match=r"count=3 and rollout\.sglang\.server\.tp=8 over rollout\.sglang\.server\.nodes=2:"
    ):
        count(*spanning, "rollout.sglang.server.count=3", visible=8, ranks=8)
    settings: Any = SimpleNamespace(nodes=2, start_timeout_s=1.0, memory_saver=True)
    three: Any = SimpleNamespace(rank=0, size=3)
    with pytest.raises(
        UserError, match=r"nodes=2: the trainer runs on 3 host\(s\), and each server takes 2 .*legal: 1, 3"
    ):
        StartedServers(three, settings, count=1, ranks_per_host=1, folder=Path("."))


@pytest.mark.parametrize(
    ("settings", "visible", "ranks", "colocated", "words"),
    [
        (["rollout.sglang.server.count=9"], 8, 8, True, "servers of a host share the devices of its 8 rank"),
        (["rollout.sglang.server.tp=16"], 8, 8, True, "tp=16: the servers of a host share the devices of its 8 rank"),
        ([], 8, 8, False, "have their own devices .* next to its 8 rank.* start fewer ranks per host"),
        ([], 1, 8, True, "this process sees 1 device.*a launcher must show all devices of a host"),
    ],
)
def test_servers_that_have_no_devices_are_refused(
    settings: list[str], visible: int, ranks: int, colocated: bool, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        count(*settings, visible=visible, ranks=ranks, colocated=colocated)
