"""Trainer and servers on devices with a budget: who may start when, and the sums of every turn, also after restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mega_rl.assemble.plan import engine_settings
from mega_rl.config.loader import load
from mega_rl.config.schema import RolloutConfig, TrainerConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.engines.base import EngineSettings
from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.build import Connection, check_hosts, device_share, servers_per_host, start_servers
from mega_rl.rollout.sglang.server.memory import TRAINER_RESIDUE, DeviceShare, ServersMemory
from mega_rl.rollout.sglang.server.pool import StartedServers
from mega_rl.rollout.sglang.server.process import ServerStartError
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from mega_rl.types import Rollout
from mega_rl.workers.colocation import TAGS, ColocatedCheckpoints, ColocatedRollouts, SharedDevices
from mega_rl.workers.turns import ResidentModels, ScorerOnDevice
from tests.helpers.device_budget import (
    GIB,
    BudgetAccelerator,
    BudgetEngine,
    BudgetProcess,
    DeviceMemory,
    OvercommitError,
)
from tests.helpers.fakes import FakePrompts, FakeRanks
from tests.helpers.inputs import qwen3_config
from tests.helpers.rollouts import make_rollout
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
            router=cast(Any, Fleet()), sync=self.run.sync, memory=memory, concurrency=1, max_positions=1,
            _servers=self.pool, _controls=list(self.run.controls.values()), _actor=cast(Any, self.actor),
            _transport=self.run.trainer, _resources=resources,
        )  # fmt: skip
        shared = SharedDevices(models=self.models, servers=memory, everyone=FakeRanks())
        self.run.sync.add_listener(shared)
        self.rollouts = ColocatedRollouts(cast(Any, self), self.run.sync, shared)

    def generate(self, prompts: Any, *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        """As `SglangRolloutEngine.collect`: servers that were lost come back and are sent the weights."""
        self.run.trainer.step(self.run.sync.weight_version)
        lost = [index for index, process in enumerate(self.processes) if index not in self.run.sync.ready]
        lost += [index for index, process in enumerate(self.processes) if index in self.lost]
        if lost:
            self.connection.bring_back(sorted(set(lost)))
            self.lost = []
        assert self.run.sync.ready == set(range(len(self.processes)))
        assert all(process.server.holds >= set(TAGS) for process in self.processes if process.server)
        assert not self.actor.here
        return make_rollout([1])

    def step(self, step: int) -> None:
        self.run.trainer.step(self.run.sync.weight_version + 1)
        self.rollouts.publish()
        self.rollouts.generate(FakePrompts().batch(0), step=step)

    def in_turn(self, role: str) -> Any:
        return self.models.in_turn(cast(Any, role))

    def on_device(self) -> Any:
        return self.rollouts.devices.on_device()

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


def test_colocated_servers_have_started_and_left_before_the_models_come(resources: ExitStack) -> None:
    run = Colocation(resources)
    assert used(run.devices) == [SERVER["idle"]] * RANKS
    run.build_roles()
    run.connect(resources)
    for step in range(3):
        run.step(step)
    assert all(process.starts == 1 for process in run.processes)
    assert max(device.largest for device in run.devices) <= 80 * GIB


def test_servers_of_a_run_draw_different_noise(resources: ExitStack) -> None:
    """By seeds that differ: SGLang on CUDA draws for a whole batch from one generator."""
    run = Colocation(resources, "trainer.seed=7")
    assert [process.settings.seed for process in run.processes] == [7, 8]


def test_buckets_of_a_send_have_left_before_the_servers_caches_come(resources: ExitStack) -> None:
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
    run.step(0)
    assert [held for tag, held in cached if tag == "kv_cache"] == [0] * len(run.processes)
    assert max(device.largest for device in run.devices) <= 80 * GIB


@pytest.mark.parametrize("first", ["models", "server"])
def test_the_fake_dies_in_the_order_of_before(first: str) -> None:
    """Servers start, models are built, then the servers are awaited: one of the two finds too little."""
    devices = [DeviceMemory(80 * GIB)]
    process = BudgetProcess(cast(Any, SimpleNamespace(base_gpu=0, tp=1, mem_fraction=0.0)), 0, devices, SERVER)
    process.start()
    if first == "models":
        BudgetEngine("actor", devices, **ACTOR)
        with pytest.raises(ServerStartError, match=r"server 0 kv_cache wants 51\.1 of 80\.0 GiB, held: .*'actor"):
            process.wait_ready()
    else:
        process.wait_ready()
        with pytest.raises(OvercommitError, match=r"actor parameters wants 7\.6 of 80\.0 GiB, held: .*'server 0"):
            BudgetEngine("actor", devices, **ACTOR)
        process.stop()


def test_the_sums_of_every_turn(run: Colocation) -> None:
    trainer, policy = sum(ACTOR.values()) + sum(REFERENCE.values()), ACTOR["parameters"]
    server, idle = run.processes[0].server, SERVER["idle"]
    assert server is not None
    cache = server.sizes["kv_cache"][0]
    assert cache > 20 * GIB  # what the trainer leaves is used
    seen: dict[str, set[int]] = {}
    turns, original = run.rollouts.devices, SharedDevices.go_to

    def go_to(stage: Any) -> int:
        moved = original(turns, stage)
        seen.setdefault(stage.name, set()).update(used(run.devices))
        return moved

    object.__setattr__(turns, "go_to", go_to)
    for step in range(2):
        run.step(step)
    assert seen == {
        "sending": {policy + SERVER["weights"] + idle},
        "proving": {policy + SERVER["weights"] + cache + idle},
        "generating": {SERVER["weights"] + cache + idle},
        "training": {trainer + idle},
    }


@pytest.mark.parametrize("when", ["while it generates", "before weights are sent", "while it holds on to its memory"])
def test_a_lost_server_comes_back_into_the_memory_that_is_there(run: Colocation, when: str) -> None:
    run.step(0)
    before = used(run.devices)
    if when == "while it generates":
        run.run.trainer.step(2)
        run.rollouts.publish()
        run.kill(1)
        run.lost = [1]
        run.rollouts.generate(FakePrompts().batch(0), step=1)
    elif when == "before weights are sent":
        run.kill(1)
        run.step(1)
    else:
        server = run.processes[1].server
        assert server is not None
        server.faults = {"/release_memory_occupation": ("error", server.number("/release_memory_occupation") + 1)}
        run.run.trainer.step(2)
        run.rollouts.publish()
        run.rollouts.generate(FakePrompts().batch(0), step=1)
        assert used(run.devices) == [before[0], before[1] - SERVER["idle"]]  # stopped, so that the trainer fits
        run.step(2)
    assert run.processes[1].starts == 2
    assert used(run.devices) == before
    run.step(3)
    assert max(device.largest for device in run.devices) <= 80 * GIB


def test_the_run_ends_when_no_server_is_left(run: Colocation) -> None:
    run.step(0)
    for index in range(RANKS):
        run.kill(index)
    with pytest.raises(RunError, match="no SGLang server is left: servers did not resume the memory of weights"):
        run.step(1)
    assert run.actor.here == set(ACTOR)


def test_servers_with_devices_of_their_own_keep_their_memory(resources: ExitStack) -> None:
    run = Colocation(resources, "rollout.sglang.placement=separate", devices=2 * RANKS)
    run.build_roles()  # while the servers come up
    run.pool.wait_ready()
    trainer = sum(ACTOR.values()) + sum(REFERENCE.values())
    servers = [process.server for process in run.processes]
    assert [server.sizes["kv_cache"][0] > 40 * GIB for server in servers if server] == [True] * RANKS
    assert used(run.devices)[:RANKS] == [trainer] * RANKS
    assert all(server.holds >= set(TAGS) for server in servers if server)


def test_models_that_do_not_fit_beside_each_other_take_turns(resources: ExitStack) -> None:
    """An actor, a critic, a reference and a reward model, whose sum a device does not have: every turn's sum."""
    roles = {"critic": CRITIC, "reward": REFERENCE}
    together = Colocation(resources)
    with pytest.raises(OvercommitError, match=r"reward parameters wants 7\.6 of 80\.0 GiB, held: .*'critic opt"):
        together.build_roles(**roles)
    run = Colocation(resources)
    run.build_roles(one_at_a_time=True, **roles)
    assert used(run.devices) == [SERVER["idle"]] * RANKS
    run.connect(resources)
    trained = ("actor", "critic")

    def collect(*_: Any, **__: Any) -> None:
        for name in trained:
            run.in_turn(name).state()

    store = SimpleNamespace(save=collect, save_in_memory=collect)
    checkpoints = ColocatedCheckpoints(cast(Any, store), run.rollouts.devices)
    seen: list[Any] = []
    for engine in run.models.engines.values():
        cast(Any, engine).seen = seen
    for step in range(2):
        run.step(step)
        seen.clear()
        for name in ("reward", "actor", "reference", "critic"):
            run.in_turn(name).forward(cast(Any, None))
        for name in ("critic", "critic", "actor", "actor"):
            run.in_turn(name).train_minibatch(cast(Any, None), cast(Any, None), lr=1.0)
        parameters, idle = {"parameters"}, {"server 0 idle": SERVER["idle"]}
        expected = [("reward evaluates", REFERENCE, parameters), ("actor evaluates", ACTOR, parameters)]
        expected += [("reference evaluates", REFERENCE, parameters), ("critic evaluates", CRITIC, parameters)]
        expected += [("critic trains", CRITIC, set(CRITIC))] * 2 + [("actor trains", ACTOR, set(ACTOR))] * 2
        assert seen == [
            (event, {f"{event.split()[0]} {part}": sizes[part] for part in sizes if part in parts} | idle)
            for event, sizes, parts in expected
        ]
    run.run.trainer.step(3)
    metrics = run.rollouts.publish()
    assert metrics["memory/training_bytes"] == sum(ACTOR.values())  # the largest turn's
    seen.clear()
    with_weights = used(run.devices)
    for save in (checkpoints.save, checkpoints.save_in_memory):
        seen.clear()
        save(2, {})
        for (event, held), name in zip(seen, trained, strict=True):
            assert event == f"{name} lists its state"
            assert set(held) == {f"{name} parameters", f"{name} optimizer", "server 0 weights", "server 0 idle"}
        assert used(run.devices) == with_weights  # the servers have their weights and cache again, the trainer nothing
    assert max(device.largest for device in run.devices) <= 80 * GIB


def test_a_reward_model_finds_room_after_a_validation(resources: ExitStack) -> None:
    """Servers have weights and cache then: the cache makes room, and comes back for the rollout that follows."""
    run = Colocation(resources)
    run.build_roles(one_at_a_time=True, reward=REFERENCE)
    run.connect(resources)
    model = run.in_turn("reward")
    scorer = ScorerOnDevice(cast(Any, SimpleNamespace(score=lambda *_: model.forward(cast(Any, None)))), run.on_device)
    run.run.trainer.step(1)
    run.rollouts.publish()
    before = used(run.devices)
    run.rollouts.generate(FakePrompts().batch(0), step=0, greedy=True)
    scorer.score(make_rollout([1]), [])
    ((_, held),) = cast(Any, run.models.engines["reward"]).seen
    assert set(held) == {"reward parameters", "server 0 weights", "server 0 idle"}
    assert used(run.devices) == before
    run.rollouts.generate(FakePrompts().batch(0), step=0)


def test_a_server_too_many_is_overcommitted() -> None:
    device = DeviceMemory(10)
    device.take("a", 8)
    with pytest.raises(OvercommitError):
        device.take("b", 3)
    assert (device.used, device.largest) == (8, 11)


# -- the share of a device ---------------------------------------------------------------------------------------------


def share_of(**changes: int) -> DeviceShare:
    return DeviceShare(**{"total": 80 * GIB, "policy": 8 * GIB, "weights": 15 * GIB, "tp": 1, **changes})


@pytest.mark.parametrize("total", [24, 48, 80, 141, 192])
def test_the_computed_share_leaves_the_trainer_and_the_server_their_room(total: int) -> None:
    share = share_of(total=total * GIB, policy=2 * GIB, weights=2 * GIB)
    fraction = share.fraction(0.0)
    left = share.total - fraction * share.total
    assert left >= share.policy + TRAINER_RESIDUE + share.reserve
    assert left - (share.policy + TRAINER_RESIDUE + share.reserve) < 0.002 * share.total
    assert fraction == round(fraction, 3)


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"policy": 60 * GIB}, 0.0, r"mem_fraction=0: colocated servers do not fit.* raise rollout.sglang.server.tp"),
        ({"weights": 70 * GIB}, 0.0, r"the server needs 70.0 GiB for weights"),
        ({}, 0.95, r"mem_fraction=0.95 of 80.0 GiB leaves no room .* set at most 0.862, or 0"),
        ({}, 0.1, r"mem_fraction=0.1 of 80.0 GiB does not hold the 15.0 GiB of weights"),
    ],
)
def test_a_share_that_cannot_work_is_refused(changes: dict[str, int], setting: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        share_of(**changes).fraction(setting)


def test_a_share_of_the_users_is_taken_as_it_is() -> None:
    assert share_of().fraction(0.55) == 0.55


def test_the_policy_is_counted_by_its_layout() -> None:
    """8.19e9 parameters of Qwen3-8B in bf16, in halves; norms are whole on both ranks."""

    def share(*settings: str, world_size: int = 2) -> DeviceShare:
        rollout, _, engine = sections_of(*settings)
        return device_share(rollout, engine, HF, total=80 * GIB, world_size=world_size)

    whole, half = share("engine.megatron.tp=1"), share()
    buckets = sending_bytes(HF, bucket_bytes=256 << 20, itemsize=2)
    assert whole.weights == half.weights == 2 * 8190735360
    assert whole.policy - buckets == 2 * 8190735360
    assert (whole.policy - buckets) / 2 <= half.policy - buckets < (whole.policy - buckets) / 2 * 1.001
    fsdp = share("engine.backend=fsdp", "engine.megatron.tp=null", world_size=8)
    assert fsdp.policy - buckets == 4 * 8190735360 // 8


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


def test_servers_on_several_hosts_take_a_share_of_their_ranks_on_each() -> None:
    spanning = ["rollout.sglang.server.nodes=2", "rollout.sglang.server.tp=8"]
    assert count(*spanning, visible=8, ranks=8) == 2
    assert count(*spanning, visible=8, ranks=4, colocated=False) == 1
    with pytest.raises(
        UserError, match=r"count=3 and rollout\.sglang\.server\.tp=8 over rollout\.sglang\.server\.nodes=2:"
    ):
        count(*spanning, "rollout.sglang.server.count=3", visible=8, ranks=8)
    check_hosts(2, hosts=4)
    with pytest.raises(
        UserError, match=r"nodes=2: the trainer runs on 3 host\(s\), and each server takes 2 .*legal: 1, 3"
    ):
        check_hosts(2, hosts=3)


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
