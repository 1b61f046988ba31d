"""Servers that join and leave while a run goes: by scripted servers that take weights, and draw tokens by them."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mega_rl.errors import RunError, UserErrors
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.build import Connection
from mega_rl.rollout.sglang.control import Keys
from mega_rl.rollout.sglang.generation.engine import SglangRolloutEngine, SglangRolloutSettings, sampling_seed
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import Sampling, State
from mega_rl.rollout.sglang.server import fleet
from mega_rl.rollout.sglang.server.fleet import JoinedServers
from mega_rl.rollout.sglang.server.memory import ServersMemory
from mega_rl.rollout.sglang.weights.checks import LIMITS, Probe
from mega_rl.rollout.sglang.weights.sync import ServerTable, SglangWeightSync, server_of
from mega_rl.trainer.collect import Collector, SamplingPlan
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.selection import StepVersions, Stock
from mega_rl.types import Draw, Prompt, Rollout
from mega_rl.workers.rollout import RolloutWorker
from mega_rl.workers.stream import RolloutStream, ServerFlow
from tests.helpers import fleet as fleet_numbers
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_sglang import KEYS, Exchange, FakeServer, right
from tests.helpers.fakes import FakeSink, FakeTimer
from tests.helpers.selection import FULL
from tests.helpers.update_server import VOCAB_SIZE, UpdateServer, weights_of_version
from tests.unit_tests.rollout.sglang.test_faults import nothing_left_behind
from tests.unit_tests.rollout.sglang.test_sync import EXPECTED, INFO, TEMPERATURE, Trainer

LONGEST = 6
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LONGEST, stop_token_ids=(1,))
PROMPTS = [Prompt(index=10 + i, token_ids=(3, 4 + i), text="", answer="") for i in range(4)]
N = 3


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_POLL_S", 0.02)


def token_of(number: float, seed: int, position: int) -> int:
    """Return the token of a request at a position under weights whose first number is this one."""
    return 3 + (seed * 31 + position * 7 + int(abs(number) * 1e6)) % (VOCAB_SIZE - 3)


class FleetServer(FakeServer):
    """It takes weights as `UpdateServer` does, and its tokens follow from the numbers that it holds."""

    def __init__(self, *, model: str = "llama", tp: int = 1, port: int = 0, seconds_per_token: float = 0.0) -> None:
        info = {**INFO, "model": {**INFO["model"], "model_type": model}}
        self.held = UpdateServer(tp=tp, info=info, keys=KEYS)
        self.held._http.server_close()  # only what it says is used
        self.replaces = bool(port)
        self.others: list[str] = []  # samples that came without the weights they ask for
        self.cached: dict[tuple[Any, ...], str] = {}  # prefix -> version of the weights that computed it
        self.asks: Callable[[FleetServer], None] = lambda server: None  # called at each update
        super().__init__(self._checked, token=self._token, port=port, seconds_per_token=seconds_per_token)

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def version(self) -> Any:  # type: ignore[override]
        return self.held.version

    @version.setter
    def version(self, value: Any) -> None: ...

    @property
    def paused(self) -> bool:
        return self.held.paused

    def controlled(self, path: str, body: Any) -> tuple[bytes] | None:
        if (
            (path in ("/generate", "/abort_request") and "rid" in body)
            or path == "/health_generate"
            or "abort_all" in body
        ):
            return None
        if path.startswith("/update_weights"):
            self.asks(self)
        version = self.held.version
        status, answer = self.held.answer(path, body)
        if self.held.version != version and version.isdecimal():
            self.changed(version, partial(token_of, weights_of_version(int(version))["a"]))
        if path == "/pause_generation" and body["mode"] == "abort":
            for exchange in self._exchanges.values():
                exchange.aborted.set()
        if path == "/flush_cache":
            assert not self.in_flight, "SGLang refuses"
            self.cached.clear()
        assert status == 200 or path == "/begin_weight_update", (path, answer)
        return (answer.encode() if isinstance(answer, str) else json.dumps(answer).encode(),)

    def _token(self, seed: int, position: int) -> int:
        return token_of(self.held.weights.get("a", 0.0), seed, position)

    async def _checked(self, exchange: Exchange) -> None:
        if not exchange.is_probe and (self.held.version == "default" or self.held.paused or self.held.in_session):
            self.others.append(exchange.body["rid"])
        prefix = (exchange.body["extra_key"], *exchange.body["input_ids"])
        if not exchange.is_probe and self.cached.setdefault(prefix, self.held.version) != self.held.version:
            self.others.append(exchange.body["rid"])
        await right(exchange)


class Run:
    """A rank's pool, router, weight sync and engine over a registry."""

    def __init__(
        self, resources: ExitStack, folder: Path, urls: Sequence[str], *, ranks: Ranks | None = None,
        timeout_s: float = 20.0, token_versions: bool = False, keeps: bool = False,
    ) -> None:  # fmt: skip
        ranks = ranks or SingleRank()
        keys = folder / f"keys-{ranks.rank}.json"
        if not keys.exists():
            Keys(KEYS.api_key, KEYS.admin_key).write(keys)
        self.pool = JoinedServers(ranks, urls, keys, timeout_s=timeout_s)
        self.pool.wait_ready()
        servers = {one.index: server_of(self.pool, one.index, 5.0) for one in self.pool.endpoints}
        self.router = ServerRouter(
            self.pool.endpoints, vocab_size=VOCAB_SIZE, max_concurrency=4, retries=2, request_timeout_s=20.0,
            stall_timeout_s=2.0, grace_s=1.0,
        )  # fmt: skip
        resources.callback(self.router.close)
        table = ServerTable(self.pool, self.router, EXPECTED, servers, lambda _: ranks.rank == 0, 5.0)
        self.trainer = Trainer(table.own, ranks)
        probe = Probe(self.trainer.evaluate, ranks, VOCAB_SIZE, TEMPERATURE, 4, LIMITS["float32"])
        self.sync = SglangWeightSync(cast(Any, self.trainer), table, ranks, probe=probe, keeps=keeps)
        actor = SimpleNamespace(is_offloaded=lambda _: False)
        self.connection = Connection(
            self.router, self.sync, ServersMemory(ranks, table.own, self.pool), 4, "", table, cast(Any, actor)
        )
        self.engine = SglangRolloutEngine(
            self.router, everyone=ranks, weight_version=lambda: self.sync.weight_version,
            bring_back=self.connection.bring_back,
            settings=SglangRolloutSettings(
                sampling=SAMPLING, max_positions=64, timeout_s=20.0, concurrency=4, restarts=3, max_failed_share=0.0,
                token_versions=token_versions,
            ),
        )  # fmt: skip

    def publish(self) -> dict[str, float]:
        self.trainer.step(self.sync.weight_version + 1)
        return self.sync.publish()

    def generate(self, step: int) -> Rollout:
        return self.engine.generate(PROMPTS, range(len(PROMPTS)), n=N, seed=(0, step))


def check_rows(rows: Rollout, step: int, version: int) -> None:
    """Each sample is there once, and each of its tokens comes from the weights of its version."""
    keys = list(zip(rows.prompt_index.tolist(), rows.sample_index.tolist(), strict=True))
    assert keys == [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(N)]
    number = weights_of_version(version)["a"]
    for row, (prompt, sample) in enumerate(keys):
        seed = sampling_seed((0, step), prompt, sample)
        expected = [token_of(number, seed, 2 + place) for place in range(LONGEST)]
        assert rows.tokens[row, 2 : int(rows.lengths[row])].tolist() == expected, f"sample {prompt}, {sample}"
    assert rows.weight_version.tolist() == [version] * len(keys)


@dataclass
class World:
    """Servers outside of the run, and the registry that says which it may use; events change both."""

    registry: Path
    resources: ExitStack
    random: random.Random
    alive: dict[str, FleetServer] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)
    ended: list[FleetServer] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    gone: dict[str, tuple[FleetServer, int]] = field(default_factory=dict)  # off the list and alive; requests seen

    def start(self, *, port: int = 0, **given: Any) -> FleetServer:
        server = self.resources.enter_context(FleetServer(port=port, **given))
        self.alive[server.url] = server
        return server

    def write(self, urls: Sequence[str] | None = None) -> None:
        self.listed = list(self.listed if urls is None else urls)
        content = "# the fleet\n\n" + "".join(f"{url}/\n" for url in self.listed)
        self.registry.write_text(content if self.random.random() < 0.5 else json.dumps(self.listed))
        self.registry.chmod(0o600)

    def good(self) -> list[str]:
        return [
            url
            for url in self.listed
            if url in self.alive and self.alive[url].held.info["model"]["model_type"] == "llama"
        ]

    def event(self, but: str = "") -> None:
        """Change the world at random, but not the server at this address."""
        good = [url for url in self.good() if url != but]
        kinds = ["join", "leave", "kill", "garbage", "other_model", "unborn", "back", "larger"]
        kind = self.random.choices(kinds, [5, 4, 3, 2, 1, 1, 2, 1])[0]
        spare = len(good) > 1
        if kind == "join" and len(good) < 5:
            self.write([*self.listed, self.start().url])
        elif kind == "leave" and spare:
            url = self.random.choice(good)
            self.write([one for one in self.listed if one != url])
        elif kind == "kill" and spare:
            self.kill(self.random.choice(good), listed=self.random.random() < 0.5)
        elif kind == "garbage":
            noise = bytes(self.random.randrange(256) for _ in range(200))
            lines = [
                b"http://ok:1\nftp://no:2\n",
                b"[1, 2]",
                b"[" * 5000,
                b"{}",
                noise,
                b"\xff",
                b"x" * (2 << 20),
                b"http://a b:1",
            ]
            self.registry.write_bytes(self.random.choice(lines))
        elif kind == "other_model":
            self.write([*self.listed, self.start(model="qwen2").url])
        elif kind == "unborn":
            self.write([*self.listed, f"http://127.0.0.1:{self.random.randrange(1, 500)}"])
        elif kind == "back" and (
            dead := [url for url in self.listed if url not in self.alive and int(url.rsplit(":")[-1]) > 1000]
        ):
            self.start(port=int(dead[0].rsplit(":", 1)[-1]), tp=self.random.choice((1, 1, 2)))
        elif kind == "larger" and spare:
            url = self.random.choice(good)
            self.kill(url)
            self.start(port=int(url.rsplit(":", 1)[-1]), tp=2)
        else:
            return
        self.events[kind] += 1

    def kill(self, url: str, *, listed: bool = True) -> None:
        server = self.alive.pop(url)
        server.kill()
        self.ended.append(server)
        # A registry that nobody can read would hide the servers that are left.
        self.write([one for one in self.listed if listed or one != url])

    def every(self) -> list[FleetServer]:
        return [*self.alive.values(), *self.ended]


@contextmanager
def world_of(folder: Path, seed: int, num: int = 2) -> Iterator[World]:
    with ExitStack() as resources:
        world = World(folder / "fleet.txt", resources, random.Random(seed))
        world.write([world.start().url for _ in range(num)])
        yield world


@contextmanager
def run_over(folder: Path, num: int = 2, **given: Any) -> Iterator[tuple[World, Run]]:
    """A run over the registry of a world with `num` servers."""
    with world_of(folder, 0, num) as world, ExitStack() as resources:
        yield world, Run(resources, folder, [str(world.registry)], **given)


def test_late_server_serves_the_weights_that_the_trainer_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where servers are lost within a step, a new one gets the weights at once, not with the next update."""
    with run_over(tmp_path, 1) as (world, run):
        run.publish()
        (first,) = world.listed
        late = world.start()
        world.write([first, late.url])
        world.kill(first)
        check_rows(run.generate(0), 0, 1)
        assert (len(late.seen), late.others, late.held.weights) == (12, [], weights_of_version(1))
        assert run.router.states().keys() == {1}
        assert "SGLang server 0 at " + first + " leaves: " + first + ", /health: it does not answer" in caplog.text
        assert run.publish()["sglang/servers_ready"] == 1


@pytest.mark.parametrize("is_listed", [True, False])
def test_fleet_goes_on_without_a_vanished_server(tmp_path: Path, is_listed: bool) -> None:
    """It is not waited for, and one that answers at its address again joins under a new number."""
    with world_of(tmp_path, 0) as world, ExitStack() as resources:
        run = Run(resources, tmp_path, world.listed if is_listed else [str(world.registry)], timeout_s=60.0)
        run.publish()
        url = world.listed[0]
        world.kill(url)
        begin = time.monotonic()
        for step in range(3):
            check_rows(run.generate(step), step, run.sync.weight_version)
            metrics = run.publish()
        assert time.monotonic() - begin < 20.0
        assert metrics["sglang/servers_ready"] == metrics["sglang/servers_left"] == 1
        back = world.start(port=int(url.rsplit(":", 1)[-1]))
        run.publish()
        check_rows(run.generate(9), 9, run.sync.weight_version)
        assert run.router.states().keys() == {1, 2}
        assert back.seen


@pytest.mark.parametrize("comes", [True, False])
def test_fleet_without_servers_waits_for_one(tmp_path: Path, comes: bool) -> None:
    with run_over(tmp_path, timeout_s=8.0 if comes else 0.5) as (world, run):
        run.publish()
        for url in list(world.listed):
            world.kill(url)
        if comes:
            late = world.start()
            timer = threading.Timer(0.5, lambda: world.write([late.url]))
            timer.start()
            check_rows(run.generate(0), 0, 1)
            timer.join()
            assert late.seen
        else:
            said = rf"waited 0.5 s \(rollout.sglang.start_timeout_s\).*{world.registry}: .*/health: it does not answer"
            with pytest.raises(RunError, match=said):
                run.generate(0)


@pytest.mark.parametrize("is_listed", [True, False])
def test_server_of_another_model_stays_outside_of_a_fleet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_listed: bool
) -> None:
    """A registry's is refused with the reason, once; one of the settings is a user's mistake."""
    with world_of(tmp_path, 0, 1) as world, ExitStack() as resources:
        other = world.start(model="qwen2")
        world.write([*world.listed, other.url])
        run = Run(resources, tmp_path, world.listed if is_listed else [str(world.registry)])
        if is_listed:
            with pytest.raises(UserErrors, match="serves model_type='qwen2', the trainer's model is 'llama'"):
                run.publish()
            return
        for step in range(2):
            run.publish()
            check_rows(run.generate(step), step, step + 1)
        assert not other.held.weights
        assert caplog.text.count(f"{other.url}, /model_info: serves model_type='qwen2', the trainer's model is") == 1


def test_registry_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run_over(tmp_path) as (world, run):
        run.publish()
        late = world.start().url
        bad = {
            f"{late}\nftp://no:2": "'ftp://no:2' is not a server's address",
            f'["{late}", 5]': "5 is not a server's address",
            f"{late}/path": "is not a server's address",
            "x" * (1 << 20) + "x": "more than 1048576 bytes",
            '["' + late: "Unterminated string",
            "[" * 100_000: "recursion",
        }
        for content, why in bad.items():
            world.registry.write_text(content)
            assert run.publish()["sglang/servers_joined"] == 2
            assert f"{world.registry} cannot be read, and the servers stay" in caplog.text
            assert why in caplog.text
        world.registry.unlink()
        assert run.publish()["sglang/servers_ready"] == 2
        caplog.clear()
        run.publish()
        assert "cannot be read" not in caplog.text, "it was said before"
        world.write([*world.listed, late])
        world.registry.chmod(0o602)
        assert run.publish()["sglang/servers_ready"] == 2
        assert "others may write it" in caplog.text
        world.registry.chmod(0o600)
        assert run.publish()["sglang/servers_ready"] == 3


def test_silent_addresses_hold_few_updates_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked at the 1st, 3rd, 7th, ... update, all at once, and joins when it answers."""
    monkeypatch.setattr(fleet, "_HEALTH_S", 0.4)
    monkeypatch.setattr(fleet, "_FAST_S", 0.2)
    monkeypatch.setattr(fleet, "_MOST_SKIPPED", 3)
    with run_over(tmp_path, 1) as (world, run), ExitStack() as sockets:
        run.publish()
        silent = [sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64)) for _ in range(40)]
        good = world.listed
        world.write([*good, *(f"http://127.0.0.1:{one.getsockname()[1]}" for one in silent)])
        slow = []
        for update in range(16):
            begin = time.monotonic()
            assert run.sync._table.look(()) == {"sglang/servers_joined": 1, "sglang/servers_left": 0}
            took = time.monotonic() - begin
            assert took < 10.0  # 40 in turns take 16 s
            slow += [update] * (took >= 0.4)
        assert slow == [0, 2, 6, 10, 14]
        port = silent[0].getsockname()[1]
        sockets.close()
        world.start(port=port)
        joined = [run.publish()["sglang/servers_joined"] for _ in range(3)]
        assert joined == [1, 1, 2]
        check_rows(run.generate(0), 0, 4)


def test_silent_addresses_are_asked_where_no_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_HEALTH_S", 0.4)
    monkeypatch.setattr(fleet, "_FAST_S", 0.2)
    with run_over(tmp_path, 1) as (world, run), ExitStack() as sockets:
        run.publish()
        (first,) = world.listed
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = silent.getsockname()[1]
        world.write([first, f"http://127.0.0.1:{port}"])
        run.publish()
        sockets.close()
        world.start(port=port)
        world.kill(first)
        check_rows(run.generate(0), 0, 2)
        assert run.router.states().keys() == {1}


def test_registry_answers_over_http(tmp_path: Path) -> None:
    """Redirects, errors and answers without end leave the servers as they were."""
    answer: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer.get("status", 200))
            self.send_header("Location", "/other")
            self.end_headers()
            self.wfile.write(answer["content"])

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as registry, ExitStack() as resources:
        threading.Thread(target=registry.serve_forever, kwargs={"poll_interval": 0.01}).start()
        resources.callback(registry.shutdown)
        servers = [resources.enter_context(FleetServer()) for _ in range(3)]
        answer["content"] = json.dumps([one.url for one in servers[:2]]).encode()
        run = Run(resources, tmp_path, [f"http://127.0.0.1:{registry.server_address[1]}/fleet"])
        assert run.publish()["sglang/servers_ready"] == 2
        whole = json.dumps([one.url for one in servers]).encode()
        for status, content in ((302, whole), (500, whole), (200, b"[" + b" " * (2 << 20)), (200, b"<html>")):
            answer.update(status=status, content=content)
            assert run.publish()["sglang/servers_joined"] == 2
        answer.update(status=200, content=whole)
        assert run.publish()["sglang/servers_ready"] == 3


@pytest.mark.parametrize("kind", ["by_tokens", "interrupted", "kept", "kept_by_servers_that_stay"])
def test_samples_ahead_have_their_versions_while_servers_change(tmp_path: Path, kind: str) -> None:
    """What servers had begun that were lost while the trainer trains continues under the next weights."""
    quantum, keeps, stay = 3 if kind == "by_tokens" else 0, kind.startswith("kept"), kind.endswith("stay")
    steps = 15
    with run_over(tmp_path, 2, token_versions=True, keeps=keeps) as (world, run):
        engine: Any = run.engine
        worker = RolloutWorker(engine, SingleRank(), SingleRank(), N, seed=0)
        flow = ServerFlow(worker, engine, SingleRank(), lambda: run.sync.weight_version, quantum, timeout_s=20.0)
        stream = RolloutStream(flow, run.sync, worker, keeps)
        tickets: list[int] = []
        versions: set[int] = set()
        of_two, first, counts, begin = 0, list(world.alive.values()), list[dict[str, float]](), time.monotonic()
        run.publish()
        for step in range(steps):
            flow.add(Draw(step, 1, step), {step: replace(PROMPTS[step % 4], index=step)})
            for server in world.alive.values():
                server.seconds_per_token = 0.05
            flow.go_on()
            time.sleep(0.08)
            if stay:
                pass
            elif step % 3 == 1:  # all are lost at once
                dead = list(world.alive)
                world.write([world.start(seconds_per_token=0.05).url for _ in range(2)])
                for url in dead:
                    world.kill(url)
            elif step % 3 == 2:
                world.write([*world.listed[1:], world.start().url])
            else:
                for _ in range(3):
                    world.event()
            run.trainer.step(run.sync.weight_version + 1)
            stream.publish()
            counts.append(engine.metrics())
            while (arrived := flow.arrived(wait=step == steps - 1 and len(tickets) < steps)) is not None:
                rows = arrived.rollout
                assert rows.token_versions is not None
                for row in range(len(rows.tokens)):
                    ticket = arrived.tickets[int(rows.prompt_index[row])]
                    seed = sampling_seed((0, ticket), 0, int(rows.sample_index[row]))
                    own = rows.token_versions[row, 2 : int(rows.lengths[row])].tolist()
                    numbers = [weights_of_version(version)["a"] for version in own]
                    expected = [token_of(number, seed, 2 + place) for place, number in enumerate(numbers)]
                    assert rows.tokens[row, 2 : int(rows.lengths[row])].tolist() == expected
                    assert len(own) == LONGEST
                    versions |= set(own)
                    assert rows.kept is not None
                    kept = rows.kept[row, 2 : int(rows.lengths[row])].tolist()
                    assert keeps or not any(kept)
                    of_two += any(kept)
                    if stay:
                        # A request that came before an update may get its first token after it.
                        assert kept == [version > own[0] for version in own] or all(kept)
                tickets += arrived.tickets
        assert sorted(tickets) == list(range(steps))
        assert len(versions) > (3 if keeps else 6)  # a lost server has the tokens of those kept
        if stay:
            assert of_two > 6
            assert sum(len(server.seen) for server in first) == steps * N, "a request was interrupted"
            flow.pause()
            took = time.monotonic() - begin
            counts.append(engine.metrics())
            totals = {name: sum(one[f"sglang/{name}"] for one in counts) for name in ("requests", "tokens", "seconds")}
            assert (totals["requests"], totals["tokens"]) == (steps * N, steps * N * LONGEST)
            assert 0.5 * took < totals["seconds"] <= took
            assert sum(one["sglang/requests"] > 0 for one in counts) > steps // 2, "a publish reports what was done"
        assert not [rid for server in world.every() if not server.replaces for rid in server.others]


KILLS = 100 if FULL else 10


def digest_of_run(folder: Path, kills: int) -> str:
    """SHA-256 of all that a run eight steps ahead in `lock` trains on; servers die at random while others serve."""
    total, killed, over, busy = hashlib.sha256(), list[str](), threading.Event(), list[bool]()
    folder.mkdir()
    with run_over(folder, 2, token_versions=True) as (world, run):
        ranks: Any = SingleRank()
        worker = RolloutWorker(run.engine, ranks, ranks, fleet_numbers.N, seed=0)
        version = lambda: run.sync.weight_version  # noqa: E731
        flow = ServerFlow(worker, run.engine, ranks, version, 1, timeout_s=20.0)
        stream, stock = RolloutStream(flow, run.sync, worker), Stock(flow, StepVersions(8, version), flow)
        plan = SamplingPlan(fleet_numbers.N, 0, 4, 4, ahead=8, steps=KILLS)
        stage, log = Stages(FakeTimer()), StepLog(FakeSink(), FakeTimer())
        order: Any = SimpleNamespace(
            take=lambda first, count: [replace(PROMPTS[n % 4], index=n) for n in range(first, first + count)],
            metrics=lambda _: {},
            waits=dict,
        )
        collector = Collector(order, stream, fleet_numbers.Lengths(), plan, ranks, stage, log, stock=stock)

        def serve(url: str) -> bool:
            states = run.router.states()
            return any(one.url == url and states[one.index][0] is State.READY for one in run.pool.endpoints)

        def kill() -> None:
            while len(killed) < kills and not over.is_set():
                time.sleep(world.random.uniform(0.0, 0.02))
                with suppress(KeyError, RuntimeError):  # the pool changes at an update
                    if len(killed) <= done and all(map(serve, world.listed)):  # a step has three restarts
                        killed.append(world.random.choice(world.listed))
                        world.write([one if one != killed[-1] else world.start().url for one in world.listed])
                        busy.append(world.alive[killed[-1]].in_flight > 0)
                        world.kill(killed[-1])

        killer, done = threading.Thread(target=kill), 0
        stream.publish()
        killer.start()
        try:
            for done in range(KILLS):
                batch = collector.take(done)
                rows = batch.samples.rollout
                for server in world.alive.copy().values():
                    server.seconds_per_token = 0.02
                assert rows.token_versions is not None
                columns = (rows.tokens, rows.token_versions, rows.rollout_logprobs, batch.samples.tickets)
                total.update(b"".join(column.numpy().tobytes() for column in columns))
                end = time.monotonic() + 0.1
                while len(killed) < min(kills, done) and time.monotonic() < end:
                    time.sleep(0.001)  # training
                run.trainer.step(run.sync.weight_version + 1)
                stream.publish()
        finally:
            over.set()
            killer.join()
        flow.close()
    print(f"{len(killed)} kills, {sum(busy)} with requests in flight")
    assert len(killed) >= kills // 4
    assert sum(busy) >= kills // 100
    return total.hexdigest()


def test_run_in_lock_is_the_same_while_servers_die(tmp_path: Path) -> None:
    assert digest_of_run(tmp_path / "killed", KILLS) == digest_of_run(tmp_path / "undisturbed", 0)


def _fleet_on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    from mega_rl.parallel.comm import GroupRanks

    dist.init_process_group("gloo", rank=rank, world_size=2)
    root, ranks = Path(folder), GroupRanks(dist.group.WORLD)
    said: list[Any] = []
    with world_of(root / str(rank), 5, 2) as world, ExitStack() as resources:
        # Rank 1 sees another registry, as on another host: only rank 0's counts.
        run = Run(resources, root / str(rank), [str(world.registry)], ranks=ranks)
        for step in range(20):
            if rank == 0:
                for _ in range(world.random.randrange(4)):
                    world.event()
                if not world.good() or world.random.random() < 0.3:
                    world.write()
            ranks.sum(torch.zeros(1))
            metrics = run.publish()
            if rank == 0 and step % 4 == 3 and len(world.good()) > 1:
                world.kill(world.good()[0])
            check_rows(run.generate(step), step, run.sync.weight_version)
            said.append([sorted(run.router.states()), run.pool.members, metrics["sglang/servers_ready"]])
        return {
            "said": said,
            "own": [server.url for server in world.every() if server.seen],
            "all": len(run.pool.endpoints),
        }


def test_ranks_decide_alike_who_joins(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first, second = run_ranks(2, _fleet_on_two_ranks, str(tmp_path), timeout_s=120.0, device="cpu")
    assert first["said"] == second["said"]
    assert first["all"] == second["all"] > 5
    assert (len(first["own"]) > 4, second["own"]) == (True, [])


@pytest.mark.parametrize("seed", range(2))
def test_servers_come_and_go_at_random(tmp_path: Path, seed: int) -> None:
    """Hundreds of events between and within updates and generations: no sample is lost, doubled or of other weights."""
    with nothing_left_behind(), world_of(tmp_path, seed) as world, ExitStack() as resources:
        run = Run(resources, tmp_path, [str(world.registry)])

        one_at_a_time = threading.Lock()

        def during(server: FleetServer) -> None:
            if one_at_a_time.acquire(blocking=False):
                if world.random.random() < 0.1:
                    world.event(but=server.url)
                one_at_a_time.release()

        metrics, quiet = dict[str, float](), 0
        for step in range(40):
            for _ in range(world.random.randrange(1, 6)):
                world.event()
            if not world.good() or world.random.random() < 0.3:
                world.write()  # whole again
            before = world.registry.read_bytes()
            left = {url: len(one.seen) for url, one in world.alive.items() if url not in world.listed}
            for server in world.alive.values():
                server.asks = during if world.random.random() < 0.5 else lambda server: None
            metrics = run.publish()
            victim = world.random.choice(world.good()) if len(world.good()) > 1 and world.random.random() < 0.3 else ""
            timer = threading.Timer(world.random.random() * 0.02, lambda: victim and world.kill(victim))  # noqa: B023
            timer.start()
            check_rows(run.generate(step), step, run.sync.weight_version)
            timer.join()
            if before == world.registry.read_bytes() == json.dumps(world.listed).encode():
                quiet += 1
                assert all(len(world.alive[url].seen) == seen for url, seen in left.items() if url in world.alive)
        # A server at the address of one that was killed may be asked, and its answers do not count.
        assert not [rid for server in world.every() if not server.replaces for rid in server.others]
        assert quiet
        numbers = list(run.pool.members.values())
        assert len(set(numbers)) == len(numbers)
        assert 10 < metrics["sglang/servers_joined"] <= len(run.pool.endpoints)
        assert sum(world.events.values()) > 40
        assert min(world.events[kind] for kind in ("join", "leave", "garbage", "kill")) > 0, world.events
