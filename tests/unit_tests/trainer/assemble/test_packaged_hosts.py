"""Packaged recipes of several hosts: who starts, steers and asks which server."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mega_rl.config import packaged
from mega_rl.rollout.sglang.control import Control, Endpoint, Keys
from mega_rl.rollout.sglang.server.process import ServerSettings
from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
from mega_rl.rollout.sglang.weights.transport import Server, ServerRequests, open_ranks
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_sglang import right_answer
from tests.helpers.fakes import FakePrompts
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.update_server import UpdateServer

SMALL = (
    "engine.megatron.tp=2", "engine.megatron.ep=1", "engine.megatron.pp=2",
    "engine.megatron.vpp=1",
    "data.max_prompt_tokens=16", "rollout.max_new_tokens=8", "rollout.n=2", "rollout.sglang.server.tp=1",
    "rollout.sglang.server.count=2", "rollout.sglang.sync.probe_tokens=0", "rollout.sglang.sync.timeout_s=60",
    "trainer.timeout_s=60", "rollout.sglang.return_routing=false",
)  # fmt: skip
PROMPTS = 4  # of `FakePrompts`


class HostServer(UpdateServer):
    """A server that takes weights of any kind and generates what a seed says, under keys of its own."""

    def __init__(self, settings: ServerSettings, index: int) -> None:
        model = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "is_generation": True}
        info = {
            "model": {**model, "model_path": str(settings.model_path)},
            "server": {"version": "0.5.21", "dtype": settings.dtype, "dp_size": 1, "pp_size": 1},
        }
        super().__init__(index, tp=settings.tp, info=info, host=settings.host, keys=Keys.random())
        self._count = threading.Lock()
        self.samples = 0
        self.asked_by: set[int] = set()  # ranks

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Answer as `UpdateServer` does; samples by their seed, weights unread."""
        if path == "/generate":
            with self._count:
                self.samples += 1
                self.asked_by.add(body["input_ids"][-1])
            return 200, right_answer(body, version=int(self.version))
        if path.startswith("/update_weights_from"):
            self.version = body.get("weight_version", self.version)
            return 200, {"success": True, "message": "done"}
        return super().answer(path, body)


class SentVersions(DistributedTransport):
    """A transport that sends the version of weights and no weights."""

    def _open(self) -> None:
        self._world = self._part = open_ranks(timeout_s=60.0)

    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        def tell(_: Server, receiver: Control) -> None:
            receiver.update_from_distributed(names=[], dtypes=[], shapes=[], group="none", version=version)

        requests.start(tell)
        requests.wait()


MADE: list[HostProcess] = []  # of this rank


class HostProcess:
    """`ServerProcess` of a `HostServer`."""

    def __init__(self, settings: ServerSettings, index: int, folder: Path) -> None:
        self.settings, self.index, self.log_file = settings, index, folder / "server.log"
        self.starts = self.samples = 0
        self.server: HostServer | None = None
        MADE.append(self)

    def start(self) -> None:
        self.starts += 1
        self.server = HostServer(self.settings, self.index)
        self.server.__enter__()

    def wait_ready(self) -> Endpoint:
        assert self.server is not None
        return self.server.endpoint

    def stop(self) -> None:
        if self.server is not None:
            self.samples += self.server.samples
            self.server.die()
        self.server = None


def two_steps(rank: int, recipe: str, model: str, folder: str) -> dict[str, Any]:
    """Return what this rank saw of a recipe's servers in two updates, each followed by a rollout."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config import packaged
    from mega_rl.config.loader import load
    from mega_rl.parallel.comm import ranks_of
    from mega_rl.rollout.sglang import build
    from mega_rl.rollout.sglang.weights import choice
    from mega_rl.trainer.assemble import build_actor, session
    from mega_rl.trainer.assemble.plan import plan_run
    from mega_rl.trainer.assemble.rollouts import build_sglang_engine

    settings = [*SMALL, f"model.path={model}", f"trainer.run_dir={folder}/run"]
    config = load(packaged.file_of(recipe), settings)
    plan = plan_run(config, accelerator)
    with session(config, accelerator) as groups, ExitStack() as resources:
        world: Any = ranks_of(groups.host_world)
        make: Any = HostProcess
        sections, hf = (config.rollout, config.trainer, plan.engine), plan.models["actor"].hf
        servers = build.start_servers(*sections, hf, accelerator, world, resources, process=make)
        assert servers is not None
        engine = build_actor(config, groups, accelerator, trainable=False)
        servers.wait_ready()
        choice.DistributedTransport = SentVersions  # type: ignore[misc]
        connection = build.connect(
            config.rollout, plan.rollout_dtype, servers, resources, actor=engine, world=world,
            hidden_tokens=plan.engine.hidden_tokens,
        )  # fmt: skip
        rollouts = build_sglang_engine(plan, config.rollout, world, connection)
        rows = []
        for step in range(2):
            connection.sync.publish()
            prompts = [replace(one, token_ids=(*one.token_ids, rank)) for one in FakePrompts().batch(step)]
            rows.append(len(rollouts.generate(prompts, range(PROMPTS), n=2, seed=(rank, step)).tokens))
        return {
            "hosts": [urlsplit(one.url).hostname for one in servers.endpoints],
            "keys": sorted({key for one in servers.endpoints for key in (one.keys.api_key, one.keys.admin_key)}),
            "steered": sorted(connection.memory._controls),
            "owners": [servers.owner(index) for index in range(len(servers.endpoints))],
            "seeds": [process.settings.seed for process in MADE],
            "starts": [process.starts for process in MADE],
            "samples": [process.server.samples for process in MADE if process.server],
            "asked_by": [sorted(process.server.asked_by) for process in MADE if process.server],
            "rows": rows,
            "ready": [state.value for state, _ in connection.router.states().values()],
        }


RECIPES = [name for name in packaged.names() if "--nnodes" in packaged.file_of(name).read_text("utf-8")]


def two_by_two(rank: int, recipe: str, model: str, folder: str) -> dict[str, Any]:
    """Two steps on two hosts of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return two_steps(rank, recipe, model, folder)


@pytest.fixture(scope="module", params=RECIPES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny_checkpoint(folder / "model", num_hidden_layers=4)
    return run_ranks(4, two_by_two, request.param, str(folder / "model"), str(folder), device="cpu")


def test_each_rank_asks_the_servers_of_its_own_host(ranks: list[dict[str, Any]]) -> None:
    """Two ranks with two samples of each prompt in two steps."""
    assert [rank["asked_by"] for rank in ranks] == [[[0, 1]] * 2, [], [[2, 3]] * 2, []]
    assert [rank["rows"] for rank in ranks] == [[2 * PROMPTS] * 2] * 4
    assert [sum(rank["samples"]) for rank in ranks] == [2 * 2 * 2 * PROMPTS, 0] * 2


def test_no_server_is_started_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank["starts"] for rank in ranks] == [[1, 1], [], [1, 1], []]
    assert all(rank["ready"] == ["ready"] * 4 for rank in ranks)


def test_first_rank_of_each_host_owns_its_servers(ranks: list[dict[str, Any]]) -> None:
    """The first of all steers them."""
    assert [rank["steered"] for rank in ranks] == [[0, 1, 2, 3], [], [], []]
    assert all(rank["owners"] == [0, 0, 2, 2] for rank in ranks)


def test_servers_have_keys_and_seeds_of_their_own(ranks: list[dict[str, Any]]) -> None:
    assert all(len(rank["keys"]) == 8 for rank in ranks)
    seeds = [seed for rank in ranks for seed in rank["seeds"]]
    assert len(set(seeds)) == len(seeds) == 4
