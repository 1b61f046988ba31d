"""Changes of weights: their coding, a server's store, and trainers of several layouts that send to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mega_rl.config.schema import MegatronConfig
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.control import Control, Endpoint, ServerError
from mega_rl.rollout.sglang.server.store import Refused, WeightStore, apply, digest_of, encode
from mega_rl.rollout.sglang.weights import choice, delta
from mega_rl.rollout.sglang.weights.reshard import changes_pay_off
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, own_rows, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.store_server import KEYS, BadNetwork, StoreServer

BUCKET_BYTES = 9_000
CASES: dict[str, tuple[int, str, MegatronConfig]] = {
    "tp1": (1, "qwen3", MegatronConfig()),
    "tp2": (2, "qwen3", MegatronConfig(tp=2)),
    "pp2": (2, "qwen3", MegatronConfig(pp=2)),
    "ep2": (2, "qwen3_moe", MegatronConfig(ep=2)),
}


def words(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-32768, 32768, size).astype(np.int16)


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("size", [0, 1, 300, 200_000])
def test_applied_changes_give_the_new_words(size: int, share: float) -> None:
    """Gaps of every width, none at all, and differences that wrap."""
    old = words(size)
    new = np.where(np.random.default_rng(1).random(size) < share, words(size, 2), old)
    changes, changed = encode(old, new)
    assert changed == int((old != new).sum())
    apply(old, changes)
    assert np.array_equal(old, new)


def test_changes_of_one_step_travel_in_a_byte_each() -> None:
    old = words(1_000_000)
    steps = np.random.default_rng(1).choice([-1, 0, 1], 1_000_000, p=[0.01, 0.98, 0.01]).astype(np.int16)
    changes, changed = encode(old, old + steps)
    assert len(changes) < 1.6 * changed


@pytest.mark.parametrize("changes", [b"", b"\x03", b"\x01junk", encode(words(9), words(9, 1))[0]])
def test_foreign_changes_are_refused(changes: bytes) -> None:
    with pytest.raises(ValueError, match=r"changes|gaps"):
        apply(words(5), changes)


def message(new: Any, version: list[int], old: Any = None, base: list[int] | None = None) -> bytes:
    head = {"bucket": 0, "version": version, "digest": digest_of(new), "base": base}
    return json.dumps(head).encode() + b"\n" + (new.tobytes() if old is None else encode(old, new)[0])


def test_store_applies_each_version_once() -> None:
    first, second, third = (words(100, seed) for seed in range(3))
    whole, change, last = (
        message(first, [7, 1]),
        message(second, [7, 2], first, [7, 1]),
        message(third, [7, 3], second, [7, 2]),
    )
    store = WeightStore()
    for early in (change, last):
        with pytest.raises(Refused, match="no version"):
            store.take(early)
    store.take(whole)
    with pytest.raises(Refused, match="no version"):
        store.take(last)
    store.ready({"0": [7, 1, digest_of(first)]}, tp=1)  # as it was
    for twice in (whole, change, change):
        store.take(twice)
    assert list(store.ready({"0": [7, 2, digest_of(second)]}, tp=1)) == ["0"]
    with pytest.raises(Refused, match="too late"):
        store.take(whole)
    with pytest.raises(Refused, match=r"version \(7, 2\)"):
        store.ready({"0": [7, 3, digest_of(third)]}, tp=1)
    with pytest.raises(Refused, match="another digest"):
        store.take(message(third, [7, 3], first, [7, 2]))
    with pytest.raises(Refused, match="digest wrong"):
        store.ready({"0": [7, 2, digest_of(second)]}, tp=1)
    with pytest.raises(Refused, match="no version"):  # the words are those of no version
        store.take(last)
    store.take(message(third, [7, 3]))
    store.ready({"0": [7, 3, digest_of(third)]}, tp=1)
    store.take(message(first, [8, 1]))  # the next trainer
    with pytest.raises(Refused, match="too late"):
        store.take(message(third, [7, 4]))


@contextmanager
def sending(root: Path, case: str, controls: list[Control]) -> Iterator[tuple[Any, Any, Any]]:
    """(engine, transport, function that takes an optimizer step) of this rank."""
    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights
    from mega_rl.workers.models import PolicyLoss

    _, family, parallel = CASES[case]
    config = make_config(root / family, dtype="bf16", megatron=parallel)
    loss = PolicyLoss(PPO(clip_low=0.2, clip_high=0.3), kl=None, kl_estimator=k3)
    with running_engine(config) as engine:
        servers = [Server(i, 1 + i, (), control) for i, control in enumerate(controls)]
        weights = TrainerWeights(engine, torch.bfloat16)
        transport = delta.DeltaTransport(weights, servers, bucket_bytes=BUCKET_BYTES, timeout_s=30.0)

        def step(lr: float, seed: int = 0) -> None:
            rows = random_experience(vocab_size=engine.sharding.hf.vocab_size, seed=seed)
            engine.train_minibatch(own_rows(rows, engine), loss, lr=lr)

        yield engine, transport, step
        transport.close()


def differences(expected: dict[str, torch.Tensor], server: StoreServer) -> list[str]:
    names = {**expected, **server.weights}
    bits = {name: (expected.get(name), server.weights.get(name)) for name in names}
    return [
        name
        for name, (own, theirs) in bits.items()
        if own is None or theirs is None or own.dtype != theirs.dtype or not torch.equal(own, theirs)
    ]


def send_changes(rank: int, root: str, cases: list[str]) -> dict[str, list[Any]]:
    """(what, failures, differences by server, metrics) of every update."""
    from mega_rl.parallel.agreement import broadcast_json
    from mega_rl.parallel.comm import GroupRanks

    updates: dict[str, list[Any]] = {}
    for case in cases:
        with ExitStack() as stack:
            servers = [stack.enter_context(StoreServer(i, tp=1 + i)) for i in range(2)]
            with sending(Path(root), case, []) as (engine, transport, step):
                world = GroupRanks(engine.groups.world)
                urls = broadcast_json([one.url for one in servers], world)
                controls = [Control(Endpoint(i, url, KEYS), 30.0) for i, url in enumerate(urls)]
                transport._servers = [
                    delta.Server(i, 1 + i, (), stack.enter_context(_closing(one))) for i, one in enumerate(controls)
                ]
                updates[case] = []

                def update(what: str, to: list[int] | None = None) -> None:
                    expected = exported(engine)
                    failed = transport.send(version=len(updates[case]) + 1, servers=to)  # noqa: B023
                    wrong = [] if rank else [differences(expected, servers[i]) for i in to or (0, 1)]  # noqa: B023
                    updates[case].append((what, failed, wrong, transport.report))  # noqa: B023

                update("first")
                for seed in range(3):
                    step(1e-5, seed)
                    update("step")
                update("no change")
                step(1e-5, 5)
                update("only one", [0])
                step(1e-5, 6)
                update("other skipped one")
                servers[1].restart()
                update("refit", [1])
                step(1e-5, 7)
                update("step after refit")
                for _ in range(3):
                    step(0.5)
                update("all")
                updates[case].append([one.versions for one in servers])
    return updates


@contextmanager
def _closing(control: Control) -> Iterator[Control]:
    yield control
    control.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        write_tiny_checkpoint(folder / family, family=family, vocab_size=51, dtype=torch.bfloat16, tied=False)
    return folder


@pytest.fixture(scope="module")
def sent(root: Path) -> dict[str, list[Any]]:
    actual: dict[str, list[Any]] = {}
    for size in (1, 2):
        cases = [case for case, (ranks, *_) in CASES.items() if ranks == size]
        actual |= run_ranks(size, send_changes, str(root), cases, timeout_s=300.0)[0]
    return actual


@pytest.mark.parametrize("case", CASES)
def test_changes_and_whole_weights_are_bit_equal(sent: dict[str, list[Any]], case: str) -> None:
    *updates, versions = sent[case]
    reports = {}
    for what, failed, wrong, report in updates:
        assert failed == {}, what
        assert not any(wrong), what
        reports[what] = report
    whole = reports["first"]["sync/bytes"]
    assert versions[0] == ["1", "2", "3", "4", "5", "6", "7", "9", "10"]
    assert versions[1] == ["8", "9", "10"]
    assert reports["first"]["sync/changed_share"] == 1.0
    assert 0.0 < reports["step"]["sync/changed_share"] < 0.05
    assert reports["step"]["sync/bytes"] < 0.2 * whole  # most of it the heads of small buckets
    assert reports["no change"]["sync/changed_share"] == 0.0
    assert reports["other skipped one"]["sync/bytes"] > whole, "changes that were refused, and all weights"
    assert reports["refit"]["sync/bytes"] > whole
    assert reports["step after refit"]["sync/bytes"] < 0.2 * whole
    assert reports["all"]["sync/changed_share"] > 0.9
    assert reports["all"]["sync/bytes"] < 1.05 * whole


def send_over_bad_network(rank: int, root: str) -> Any:
    """What 1,000 messages over a bad network did."""
    events: dict[str, int] = {}
    outcomes: list[tuple[bool, bool, list[str]]] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(StoreServer(i, tp=1 + i)) for i in range(2)]
        controls = [
            stack.enter_context(_closing(BadNetwork(Endpoint(i, one.url, KEYS), 30.0, seed=i, rate=0.1)))
            for i, one in enumerate(servers)
        ]
        with sending(Path(root), "tp1", controls) as (engine, transport, step):
            version = 0
            while sum(one.events["sent"] for one in controls) < 1000:
                version += 1
                step(1e-3 if version % 5 else 0.1, version)
                expected = exported(engine)
                failed = transport.send(version=version)
                for one in servers:
                    served = one.versions[-1:] == [str(version)]
                    outcomes.append((one.index not in failed, served, differences(expected, one) if served else []))
        for control in controls:
            events = {kind: events.get(kind, 0) + count for kind, count in control.events.items()}
    return events, outcomes


def test_no_wrong_weight_is_served_over_a_bad_network(root: Path) -> None:
    """1,000 messages, a tenth of which are lost, doubled, late or changed in a bit."""
    events, outcomes = run_ranks(1, send_over_bad_network, str(root), timeout_s=300.0)[0]
    assert events["sent"] >= 1000
    assert min(events.values()) >= 10, events
    for took, served, wrong in outcomes:
        assert not wrong
        assert took == served
    assert 10 < sum(took for took, *_ in outcomes) < len(outcomes), "some updates fail, and others succeed"


# --- the choice


@pytest.mark.parametrize(("rate", "expected"), [(12.5e6, True), (125e6, True), (1.25e9, False), (25e9, False)])
def test_slow_links_get_changes(rate: float, expected: bool) -> None:
    """100 Mbit/s, 1, 10 and 200 Gbit/s."""
    assert changes_pay_off(rate) is expected


class Answering:
    """A control of a server that takes changes, unless `status` is an error's."""

    def __init__(self, url: str = "http://10.0.0.7:1", status: int | None = 200) -> None:
        self.endpoint, self.status, self.calls = Endpoint(0, url, KEYS), status, 0

    def call(self, *_: object, **__: object) -> bytes:
        self.calls += 1
        if self.status != 200:
            raise ServerError(self.endpoint, "/", "no", status=self.status)
        return b""


@pytest.mark.parametrize(
    ("setting", "joined", "url", "status", "slow", "expected"),
    [
        ("auto", True, "http://10.0.0.7:1", 200, True, True),
        ("auto", True, "http://10.0.0.7:1", 200, False, False),
        ("auto", True, "http://10.0.0.7:1", 404, True, False),
        ("auto", True, "http://127.0.0.1:1", 200, True, False),
        ("auto", False, "http://10.0.0.7:1", 200, True, False),
        ("off", True, "http://10.0.0.7:1", 200, True, False),
        ("on", False, "http://127.0.0.1:1", 200, False, True),
    ],
)
def test_setting_and_link_choose(
    monkeypatch: pytest.MonkeyPatch, setting: str, joined: bool, url: str, status: int, slow: bool, expected: bool
) -> None:
    monkeypatch.setattr(choice, "changes_pay_off", lambda rate: slow)
    servers: Any = [delta.Server(0, 1, (), Answering(url, status)), delta.Server(1, 1, (), Answering(url))]  # type: ignore[arg-type]
    weights: Any = SimpleNamespace(buckets=lambda nbytes, by_stage: ())
    given: dict[str, Any] = {"delta": setting, "joined": joined, "shared": None, "bucket_bytes": 1, "timeout_s": 1.0}
    made = choice.transport_for(weights, servers, SingleRank(), **given)
    assert (type(made) is delta.DeltaTransport) is expected


def test_changes_that_cannot_be_are_refused() -> None:
    plain, good, gone = Answering(status=404), Answering(), Answering(status=None)
    for controls, takes_turns in (([good, plain], False), ([good], True)):
        with pytest.raises(UserError, match=r"rollout\.sglang\.sync\.delta=on: server 0 .* takes no changes"):
            choice.sends_changes("on", controls, takes_turns=takes_turns)  # type: ignore[arg-type]
    with pytest.raises(ServerError):
        choice.sends_changes("auto", [gone], takes_turns=False)  # type: ignore[list-item]
