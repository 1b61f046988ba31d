"""Trainer and servers on the same devices: the order, the memory of each stage, and the state after a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from mega_rl.workers.colocation import ColocatedCheckpoints, ColocatedRollouts, SharedDevices
from mega_rl.workers.turns import ResidentModels

from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import Draws, Metrics, Rollout
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakePrompts
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.rollouts import make_rollout
from tests.unit_tests.workers.colocation_on_ranks import run_stages

PARTS = ("parameters", "gradients", "optimizer")
PROMPTS = FakePrompts().batch(0)
SEND = ["off gradients optimizer", "resume weights", "publish", "off parameters", "resume kv_cache"]
TAKE_BACK = ["release kv_cache weights", "on gradients optimizer parameters"]


class Device:
    """An engine, the servers, and everything between them; each part has 10 bytes. `fails` is the event that raises."""

    name, device, backend = "fake", torch.device("cpu"), "gloo"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.here = set(PARTS)
        self.servers: set[str] = set()  # released at their start, before the models were built
        self.fails = ""
        self.weight_version = 0

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails:
            raise RunError(f"{event} failed")

    def offload(self, **parts: bool) -> int:
        chosen = {part for part, is_chosen in parts.items() if is_chosen}
        assert chosen <= self.here
        self.note("off " + " ".join(sorted(chosen)))
        self.here -= chosen
        return 10 * len(chosen)

    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        chosen = dict(zip(PARTS, (parameters, gradients, optimizer), strict=True))
        back = {part for part, is_chosen in chosen.items() if is_chosen}
        self.note("on " + " ".join(sorted(back)))
        self.here |= back

    def is_offloaded(self, part: str) -> bool:
        return part not in self.here

    def release(self, tags: Sequence[str]) -> None:
        assert self.servers >= set(tags)  # SGLang's scheduler would die of it
        self.note("release " + " ".join(tags))
        self.servers -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        assert not self.servers & set(tags)
        self.note("resume " + " ".join(tags))
        self.servers |= set(tags)

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_allocated(self) -> int:
        return 10 * len(self.here)

    def transformer_config_overrides(self) -> dict[str, Any]:
        return {}

    def resume_at(self, version: int) -> None:
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        assert (self.here, self.servers) == ({"parameters"}, {"weights"})
        self.note("publish")
        return {"rollout/weight_version": 1.0}

    def generate(self, prompts: Any, *, step: int, greedy: bool = False, draws: Draws | None = None) -> Rollout:
        assert (self.here, self.servers) == (set(), {"weights", "kv_cache"})
        self.note("generate")
        return make_rollout([1])

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Any = None) -> None:
        assert self.here == set(PARTS)
        self.note("save")


def rollouts_of(device: Any, *, others: Sequence[Any] = ()) -> ColocatedRollouts:
    models = ResidentModels(device, engines={"actor": device, **dict(zip(("critic",), others, strict=False))})
    devices = SharedDevices(models=models, servers=device, everyone=SingleRank())
    return ColocatedRollouts(device, device, devices)


def store_of(rollouts: ColocatedRollouts) -> ColocatedCheckpoints:
    """The checkpoints of the same run; the fake device is the store too."""
    return ColocatedCheckpoints(rollouts.source, rollouts.devices)  # type: ignore[arg-type]


def test_the_order_of_a_step() -> None:
    """Servers have released everything at their start: the first publish is as every other."""
    device = Device()
    rollouts = rollouts_of(device)
    rollouts.publish()
    assert device.events == SEND
    for step in range(2):
        device.events.clear()
        rollouts.generate(PROMPTS, step=step)
        assert device.here == set(PARTS)
        rollouts.publish()
        assert device.events == ["generate", *TAKE_BACK, *SEND]


def test_validation_and_checkpoints_leave_the_servers_their_weights() -> None:
    device = Device()
    rollouts = rollouts_of(device)
    rollouts.publish()
    device.events.clear()
    rollouts.generate(PROMPTS, step=1, greedy=True)
    store_of(rollouts).save(1, {})
    rollouts.generate(PROMPTS, step=1, draws=Draws(4, 1.0))
    rollouts.generate(PROMPTS, step=1)
    store_of(rollouts).save(2, {})
    away, back = "off gradients optimizer parameters", "on gradients optimizer parameters"
    assert device.events == [
        "generate", "release kv_cache", back, "save", away, "resume kv_cache", "generate", "generate", *TAKE_BACK,
        "save",
    ]  # fmt: skip


def test_a_second_publish_sends_again() -> None:
    device = Device()
    rollouts = rollouts_of(device)
    rollouts.publish()
    device.events.clear()
    rollouts.publish()
    assert device.events == ["release kv_cache", "on parameters", "publish", "off parameters", "resume kv_cache"]


def test_a_proof_has_parameters_and_cache() -> None:
    """The sync asks for it in the middle of a publish; at another time the cache is there or nobody's to take."""
    device = Device()
    rollouts = rollouts_of(device)
    publish = device.publish

    def with_proof() -> Metrics:
        metrics = publish()
        rollouts.devices.after_send([0])
        assert (device.here, device.servers) == ({"parameters"}, {"weights", "kv_cache"})
        return metrics

    device.publish = with_proof  # type: ignore[method-assign]
    assert rollouts.publish()["memory/proving_bytes"] == 10.0
    assert device.events[-3:] == ["publish", "resume kv_cache", "off parameters"]
    before = list(device.events)
    rollouts.devices.after_send([0])
    assert device.events == before


def test_other_engines_have_left_before_weights_come() -> None:
    device, critic = Device(), Device()
    critic.events = device.events
    rollouts = rollouts_of(device, others=[critic])
    resume = device.resume

    def watched(tags: Sequence[str]) -> None:
        assert not critic.here
        resume(tags)

    device.resume = watched  # type: ignore[method-assign]
    rollouts.publish()
    rollouts.generate(PROMPTS, step=0)
    assert critic.here == set(PARTS)


def test_nothing_is_generated_without_weights() -> None:
    device = Device()
    rollouts = rollouts_of(device)
    with pytest.raises(RuntimeError, match="while start: the servers have no weights"):
        rollouts.generate(PROMPTS, step=0)
    rollouts.publish()
    rollouts.generate(PROMPTS, step=0)
    with pytest.raises(RuntimeError, match="while training: the servers have no weights"):
        rollouts.generate(PROMPTS, step=1)


@pytest.mark.parametrize("fails", ["generate", "save", *TAKE_BACK[:1], *SEND])
def test_the_trainer_has_its_state_whatever_fails(fails: str) -> None:
    device = Device()
    rollouts = rollouts_of(device)
    rollouts.publish()
    device.fails = fails
    with pytest.raises(RunError, match=f"{fails} failed"):  # noqa: PT012, the step that fails is one of these
        store_of(rollouts).save(1, {})
        rollouts.generate(PROMPTS, step=0)
        rollouts.publish()
    assert device.here == set(PARTS)


def test_memory_is_measured() -> None:
    """Three parts of ten bytes: all while training, the parameters while sending, nothing while generating."""
    device = Device()
    rollouts = rollouts_of(device)
    rollouts.publish()
    rollouts.generate(PROMPTS, step=0)
    assert rollouts.publish() == {
        "rollout/weight_version": 1.0,
        "memory/training_bytes": 30.0,
        "memory/sending_bytes": 10.0,
        "memory/generating_bytes": 0.0,
        "memory/offloaded_bytes": 30.0,
        "memory/given_back_bytes": 30.0,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    results: list[dict[str, Any]] = run_ranks(2, run_stages, str(checkpoint), timeout_s=240)
    return results


def test_a_real_engine_holds_what_its_stage_says(ranks: list[dict[str, Any]]) -> None:
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


def test_the_bytes_are_those_of_the_storages(ranks: list[dict[str, Any]]) -> None:
    for actual in ranks:
        last = actual["metrics"][-1]
        assert last["memory/offloaded_bytes"] >= sum(actual["whole"].values())
        assert last["memory/training_bytes"] > 0
        assert last["rollout/weight_version"] == 4.0


def test_training_goes_on_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    """Gradient norms and weights of a run with devices of its own; what was sent is what was trained."""
    for actual in ranks:
        assert actual["moved"] == actual["stayed"]
        for name, weight in actual["stayed weights"].items():
            assert torch.equal(actual["moved weights"][name], weight), name
            assert torch.equal(actual["sent"][name], weight), name
