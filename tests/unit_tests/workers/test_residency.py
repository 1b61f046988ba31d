"""Device state by stage: the table of workers/residency.py, the order of moves, errors, and whole runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mega_rl.config.needs import Role
from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import PARTS
from mega_rl.trainer.loop import Stages
from mega_rl.types import Metrics
from mega_rl.workers.residency import EVERYTHING, NOTHING, PARAMETERS, TAGS, Residency, ResidentModels
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakeTimer
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.workers.residency_on_ranks import run_stages

ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward")
ALL = dict.fromkeys(ROLES, EVERYTHING)
# stage after "generate" -> tags that shared servers have, parts of models all at once, parts of models in turn
TABLE: dict[str, tuple[Sequence[str], Mapping[Role, frozenset[str]], Mapping[Role, frozenset[str]]]] = {
    "generate": (TAGS, {}, {}),
    "baseline": (TAGS, {}, {}),
    "validate": (TAGS, {}, {}),
    "reward": (("weights",), {"reward": PARAMETERS}, {"reward": PARAMETERS}),
    "old_logprobs": ((), ALL, {"actor": PARAMETERS}),
    "ref_logprobs": ((), ALL, {"reference": PARAMETERS}),
    "values": ((), ALL, {"critic": PARAMETERS}),
    "update_critic": ((), ALL, {"critic": EVERYTHING}),
    "update_actor": ((), ALL, {"actor": EVERYTHING}),
    "save": (("weights",), ALL, {}),
    "export": (("weights",), ALL, {"actor": PARAMETERS}),
    "advantages": (TAGS, {}, {}),
    "log": (TAGS, {}, {}),
    "checkpoint": (TAGS, {}, {}),
}


class Model:
    """An engine whose parts have 10 bytes each."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.here = device, name, set(PARTS)

    def offload(self, parts: Collection[str]) -> int:
        chosen = set(parts)
        assert chosen <= self.here
        self.device.note(f"{self.name} off", chosen)
        self.here -= chosen
        return 10 * len(chosen)

    def onload(self, parts: Collection[str]) -> None:
        chosen = set(parts)
        self.device.note(f"{self.name} on", chosen)
        self.here |= chosen

    def is_offloaded(self, part: str) -> bool:
        return part not in self.here


class Device:
    """Models, servers and weight sync on one device. The event `fails` raises."""

    def __init__(self, *, roles: Sequence[Role] = ("actor",), in_turn: bool = False, shared: bool = True) -> None:
        self.events: list[str] = []
        self.fails = ""
        self.tags: set[str] = set()  # servers have released everything before the models are built
        self.models = ResidentModels(cast(Any, self), one_at_a_time=in_turn)
        for role in roles:
            self.models.add(role, cast(Any, Model(self, role)))
        self.residency = Residency(self.models, SingleRank(), self if shared else None)
        self.stage = Stages(FakeTimer(), self.residency)
        self.sync: Any = SimpleNamespace(publish=self.send)
        self.prove: Callable[[], None] = lambda: None
        self.events.clear()

    def note(self, event: str, parts: Sequence[str] | set[str] = ()) -> None:
        ordered = [part for part in (*PARTS, *TAGS) if part in parts]
        self.events.append(" ".join([event, *ordered]))
        if self.events[-1] == self.fails:
            raise RunError(f"{self.fails} failed")

    @property
    def here(self) -> dict[Role, frozenset[str]]:
        engines: dict[Role, Any] = {role: engine for role, engine in self.models.engines.items() if engine.here}  # type: ignore[attr-defined]
        return {role: frozenset(engine.here) for role, engine in engines.items()}

    def release(self, tags: Sequence[str]) -> None:
        assert self.tags >= set(tags)  # SGLang's scheduler would die of it
        self.note("release", tags)
        self.tags -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        assert not self.tags & set(tags)
        self.note("resume", tags)
        self.tags |= set(tags)

    def send(self) -> Metrics:
        self.note("publish")
        self.prove()
        return {"rollout/weight_version": 1.0}

    def publish(self) -> Metrics:
        return self.stage.publish(self.sync)

    def run(self, stage: str) -> None:
        with self.stage(stage):
            self.note(stage)

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_allocated(self) -> int:
        return 10 * sum(map(len, self.here.values()))


@pytest.mark.parametrize("stage", TABLE)
@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
@pytest.mark.parametrize("shared", [False, True], ids=["own devices", "shared devices"])
def test_a_stage_has_the_state_of_the_table(shared: bool, in_turn: bool, stage: str) -> None:
    device = Device(roles=ROLES, in_turn=in_turn, shared=shared)
    tags, at_once, one = TABLE[stage]
    device.publish()
    device.residency.enter("generate")
    before = len(device.events)
    device.residency.enter(stage)
    assert device.here == (one if in_turn else at_once if shared else ALL)
    assert device.tags == (set(tags) if shared else set())
    moved = device.events[before:]
    if not (shared or in_turn) or (one == {} and tags == TAGS):
        assert moved == []
    device.residency.enter(stage)
    assert device.events[before:] == moved, "a stage that lasts moves nothing"


@pytest.mark.parametrize("policy", [NOTHING, PARAMETERS])
def test_a_policy_in_turn_stays_for_servers_elsewhere(policy: frozenset[str]) -> None:
    """A stage of a role that the run lacks moves nothing."""
    device = Device(in_turn=True, shared=False)
    device.residency.while_generating = policy
    device.publish()
    assert device.here == {"actor": PARAMETERS}
    for stage in ("generate", "reward"):
        device.residency.enter(stage)
        assert device.here == ({"actor": policy} if policy else {})


SEND = ["actor off gradients optimizer", "resume weights", "publish", "actor off parameters", "resume kv_cache"]
TAKE_BACK = ["release weights kv_cache", "actor on parameters gradients optimizer"]


AWAY, BACK = "actor off parameters gradients optimizer", "actor on parameters gradients optimizer"


@pytest.mark.parametrize(
    ("stages", "events"),
    [
        (["generate", "old_logprobs", "update_actor"], ["generate", *TAKE_BACK, "old_logprobs", "update_actor", *SEND]),
        # A save after a validation leaves the servers their weights; after training they are lost already.
        (
            ["validate", "save", "validate", "generate", "old_logprobs", "save"],
            [
                "validate", "release kv_cache", BACK, "save", AWAY, "resume kv_cache", "validate", "generate",
                *TAKE_BACK, "old_logprobs", "save", *SEND,
            ],
        ),
        # Without a stage between them two publishes send twice.
        ([], ["release kv_cache", "actor on parameters", "publish", "actor off parameters", "resume kv_cache"]),
    ],
)  # fmt: skip
def test_the_side_that_releases_goes_first(stages: list[str], events: list[str]) -> None:
    """Servers have released everything at their start, so the first publish is like every other."""
    device = Device()
    device.publish()
    assert device.events == SEND
    for _ in range(2):
        device.events.clear()
        for stage in stages:
            device.run(stage)
        device.publish()
        assert device.events == events


def test_other_models_leave_before_weights_and_rewards() -> None:
    """The cache leaves for the parameters of a reward model, and comes back for a validation."""
    device = Device(roles=("actor", "reward"))
    device.publish()
    gone = ["actor off gradients optimizer", "reward off parameters gradients optimizer", "resume weights"]
    assert device.events[:3] == gone
    device.events.clear()
    for stage in ("validate", "reward", "validate"):
        device.run(stage)
    assert device.events == [
        "validate", "release kv_cache", "reward on parameters", "reward", "reward off parameters", "resume kv_cache",
        "validate",
    ]  # fmt: skip


def test_a_round_ends_before_servers_release_memory() -> None:
    """Once for each time: for training, for a reward model, for a checkpoint."""
    device = Device(roles=("actor", "reward"))
    device.residency.end_round = lambda: device.note("round ends")
    device.publish()
    assert "round ends" not in device.events
    for stage in ("old_logprobs", "reward", "save"):
        device.events.clear()
        device.run("generate")
        device.run(stage)
        assert device.events[:2] == ["generate", "round ends"]
        assert device.events[2].startswith("release ")
        assert device.events.count("round ends") == 1
        device.publish()


def test_a_proof_has_parameters_and_cache() -> None:
    """The sync asks for it in the middle of a publish; at another time nothing moves."""
    device = Device()

    def prove() -> None:
        device.residency.after_send([0])
        assert (device.here, device.tags) == ({"actor": PARAMETERS}, set(TAGS))

    device.prove = prove
    assert device.publish()["memory/proving_bytes"] == 10.0
    assert device.events[-3:] == ["publish", "resume kv_cache", "actor off parameters"]
    before = list(device.events)
    device.residency.after_send([0])
    assert device.events == before


def test_nothing_is_generated_without_weights() -> None:
    device = Device()
    with pytest.raises(RuntimeError, match="while start: the servers have no weights"):
        device.residency.enter("generate")
    device.publish()
    device.residency.enter("old_logprobs")
    with pytest.raises(RuntimeError, match="while training: the servers have no weights"):
        device.residency.enter("generate")


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("fails", ["generate", "old_logprobs", *TAKE_BACK[:1], *SEND])
def test_an_error_brings_the_trainer_back(fails: str, in_turn: bool) -> None:
    """In a stage, while state moves, and in a publish. Models that take turns stay on the host."""
    device = Device()
    device.publish()
    device.models.one_at_a_time = in_turn
    device.fails = fails
    device.run("save")

    def step() -> None:
        device.run("generate")
        device.run("old_logprobs")
        device.models.hold({"actor": EVERYTHING})  # as an update does
        device.publish()

    with pytest.raises(RunError, match=f"^{fails} failed"):
        step()
    assert in_turn or device.here == {"actor": EVERYTHING}


def test_memory_of_each_layout_is_a_metric() -> None:
    """Parts of ten bytes: all while training, the reward model's parameters while scoring."""
    device = Device(roles=("actor", "reward"))
    device.publish()
    for stage in ("generate", "reward", "old_logprobs"):
        device.run(stage)
    assert device.publish() == {
        "rollout/weight_version": 1.0,
        "memory/scoring_bytes": 10.0,
        "memory/training_bytes": 60.0,
        "memory/sending_bytes": 10.0,
        "memory/generating_bytes": 0.0,
        "memory/offloaded_bytes": 60.0,
        "memory/given_back_bytes": 60.0,
    }
    assert Device(shared=False).publish() == {"rollout/weight_version": 1.0}


# -- a run of four models on a device that holds one -------------------------------------------------------------------

# -- a real engine with servers that look at it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    results: list[dict[str, Any]] = run_ranks(2, run_stages, str(checkpoint), timeout_s=240)
    return results


def test_a_real_engine_holds_the_state_of_its_stage(ranks: list[dict[str, Any]]) -> None:
    """Bytes of its storages at every call of a server, sync, source or store, on both ranks."""
    expected = {
        "release kv_cache": None,
        "resume weights": {"parameters"},
        "publish": {"parameters"},
        "resume kv_cache": None,
        "prove": {"parameters"},
        "generate": set(),
        "validate": set(),
        "release kv_cache weights": set(),
        "train": set(PARTS),
        "save": set(PARTS),
    }
    for actual in ranks:
        whole = actual["whole"]
        assert all(whole[part] > 0 for part in PARTS)
        assert {event for event, _ in actual["seen"]} == set(expected)
        for event, held in actual["seen"][4:]:  # before the first step there is no optimizer state
            if (parts := expected[event]) is not None:
                early = {"optimizer": 0} if held["optimizer"] == 0 else {}
                assert held == {part: whole[part] if part in parts else 0 for part in PARTS} | early, event
        last = actual["metrics"][-1]
        assert last["memory/offloaded_bytes"] >= sum(whole.values())
        assert last["memory/training_bytes"] > 0
        assert last["rollout/weight_version"] == 4.0


def test_training_continues_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    """Gradient norms and weights of a run with devices of its own; the sent weights are the trained ones."""
    for actual in ranks:
        assert actual["moved"] == actual["stayed"]
        for name, weight in actual["stayed weights"].items():
            assert torch.equal(actual["moved weights"][name], weight), name
            assert torch.equal(actual["sent"][name], weight), name
