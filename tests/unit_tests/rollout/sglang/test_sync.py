"""Updates of scripted servers over real HTTP. The transport is one of these tests: it sends one number per bucket."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from mega_rl.converters.architecture import Adapter
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.parallel.agreement import merge_failures
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import ADAPTER, Control, Endpoint, ServerError
from mega_rl.rollout.sglang.generation.samples import State
from mega_rl.rollout.sglang.weights.adapters import AdapterPush, goes_apart
from mega_rl.rollout.sglang.weights.checks import LIMITS, ExpectedServer, Probe, sent_shapes
from mega_rl.rollout.sglang.weights.reshard import Bucket, Slot
from mega_rl.rollout.sglang.weights.sync import ServerTable, SglangWeightSync
from mega_rl.rollout.sglang.weights.transport import Server
from mega_rl.types import Rollout, TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.update_server import KEYS, VOCAB_SIZE, UpdateServer, next_logprobs, payload, weights_of_version

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
HF = parse_hf_config(CONFIG)
EXPECTED = ExpectedServer(HF, sent_shapes(Sharding(HF)), "float32")
INFO = {
    "model": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "is_generation": True, "model_path": "x"},
    "server": {"version": "0.5.21", "dtype": "float32", "dp_size": 1, "pp_size": 1},
}
TEMPERATURE = 0.7
UPDATE = "/update_weights_from_tensor"


class Trainer:
    """Weights that a version determines, sent one number per request, and their own log-probs."""

    def __init__(self, controls: dict[int, Control], ranks: Ranks) -> None:
        self.controls, self.ranks = controls, ranks
        self.weights = weights_of_version(1)
        self.adapter: dict[str, float] = {}
        self.sent: list[tuple[int, list[int]]] = []

    def step(self, version: int) -> None:
        self.weights = weights_of_version(version)

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> dict[int, str]:
        assert servers is not None
        self.sent.append((version, list(servers)))
        failed = {}
        for server in set(servers) & set(self.controls):
            try:
                for number, (name, value) in enumerate(self.weights.items()):
                    last = number == len(self.weights) - 1
                    self.controls[server].update_from_tensor(
                        [payload({name: value})], version=version if last else None
                    )
            except ServerError as error:
                failed[server] = str(error)
        return merge_failures(failed, self.ranks)

    def evaluate(self, batch: Rollout) -> TokenOutputs:
        logprobs = next_logprobs(self.weights | self.adapter, TEMPERATURE)[batch.tokens]
        return TokenOutputs(logprobs=(logprobs * batch.loss_mask).float())

    report: ClassVar = {"sync/bytes": 12.0}
    buckets = tuple(Bucket((), (Slot("x", (1,), True, 0, 4),)) for _ in range(3))

    def close(self) -> None:
        pass


class Rotation:
    """What was said of each server."""

    def __init__(self) -> None:
        self.said: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.history: list[tuple[int, str]] = []

    def _say(self, index: int, word: str, reason: str = "") -> None:
        self.said[index], self.reasons[index] = word, reason
        self.history.append((index, word))

    def mark(self, index: int, state: State, reason: str = "", *, version: int | None = None) -> None:
        self._say(index, state.value if version is None else f"{state.value} {version}", reason)


class Run:
    """Servers, a trainer's rank and what joins them."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        ranks: Ranks | None = None,
        own: Sequence[int] | None = None,
        timeout_s: float = 20.0,
        **options: Any,
    ) -> None:
        ranks = ranks or SingleRank()
        own = range(len(endpoints)) if own is None else own
        self.rotation = Rotation()
        receivers = {i: Server(i, 1, (), Control(endpoint, timeout_s)) for i, endpoint in enumerate(endpoints)}
        pool, router = cast(Any, None), cast(Any, self.rotation)
        self.table = ServerTable(pool, router, EXPECTED, receivers, lambda one: one.index in own, timeout_s)
        self.controls = self.table.own
        self.trainer = Trainer(self.controls, ranks)
        self.sync = SglangWeightSync(
            cast(Any, self.trainer),
            self.table,
            ranks,
            probe=Probe(
                self.trainer.evaluate,
                ranks,
                VOCAB_SIZE,
                TEMPERATURE,
                num_tokens=4,
                limits=LIMITS["float32"],
            ),
            **options,
        )


@pytest.fixture
def servers() -> Iterator[list[UpdateServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(UpdateServer(i, info=INFO)) for i in range(3)]


def run_of(servers: Sequence[UpdateServer], **options: Any) -> Run:
    return Run([server.endpoint for server in servers], **options)


def test_an_update_is_bracketed_and_proved(servers: list[UpdateServer]) -> None:
    servers[0].busy = 3
    run = run_of(servers)
    metrics = run.sync.publish()
    bracket = ["/server_info", "/model_info", "/server_info", "/pause_generation"]
    rest = ["/begin_weight_update", *[UPDATE] * 3, "/end_weight_update"]
    rest += ["/model_info", "/continue_generation", "/generate"]
    assert servers[0].paths() == [*bracket, *["/flush_cache"] * 3, *rest]
    assert servers[1].paths() == [*bracket, "/flush_cache", *rest]
    versions = [body.get("weight_version") for path, body in servers[1].calls if path == UPDATE]
    assert versions == [None, None, "1"]  # with the last bucket, so that no earlier failure looks like success
    assert run.sync.weight_version == 1
    assert run.rotation.said == {0: "ready 1", 1: "ready 1", 2: "ready 1"}
    assert [word for index, word in run.rotation.history if index == 0] == ["stale", "ready 1"]
    assert metrics["rollout/weight_version"] == 1.0
    assert metrics["sync/requests"] == 3 * 13 + 2  # buckets + constant, and two flushes more
    assert metrics["sync/failed_servers"] == 0.0
    assert 0.0 <= metrics["sync/probe_logprob_diff_max"] < 1e-6
    assert (metrics["sync/bytes"], metrics["sync/buckets"], metrics["sync/tensors"]) == (12.0, 3.0, 3.0)
    phases = [f"sync/{phase}_seconds" for phase in ("check", "pause", "send", "continue", "probe")]
    assert metrics["sync/seconds"] == pytest.approx(sum(metrics[phase] for phase in phases))


def test_every_order_of_an_update_is_served(servers: list[UpdateServer]) -> None:
    """A server that wants sessions, one whose last trainer left its session open, and one that knows none."""
    servers[1].in_session, servers[2].has_sessions = True, False
    run = run_of(servers)
    for version in (1, 2):
        run.trainer.step(version)
        assert run.sync.publish()["sync/failed_servers"] == 0.0
        assert [server.weights for server in servers] == [weights_of_version(version)] * 3
        assert not any(server.in_session for server in servers)
    assert [server.number("/end_weight_update") for server in servers] == [2, 3, 2]


def test_later_updates_ask_less_and_probe_every_time(servers: list[UpdateServer]) -> None:
    run = run_of(servers[:1])
    for version in (1, 2, 3):
        run.trainer.step(version)
        metrics = run.sync.publish()
        assert servers[0].version == str(version)
        assert servers[0].weights == weights_of_version(version)
        assert metrics["sync/probe_logprob_diff_max"] < 1e-6
    assert servers[0].number("/generate") == 3
    assert servers[0].number("/server_info") == 3 + 1  # is it there, three times; what is it, once


class Adapted:
    """A trainer's rank-stabilised adapter, one number: its weights are as large as the number times 8 / sqrt(4)."""

    hf = SimpleNamespace(adapter=Adapter(4, 8.0, ("q_proj",), rank_stabilised=True))
    engine = SimpleNamespace(sharding=SimpleNamespace(hf=hf))
    value = 0.25

    def adapters(self) -> dict[str, torch.Tensor]:
        return {"z": torch.tensor([self.value])}


@pytest.mark.parametrize(
    ("changes", "targets", "options", "why"),
    [
        ({}, ("q_proj", "v_proj", "o_proj"), {}, ""),
        ({}, ("q_proj",), {}, "no adapter of q_proj without"),
        ({}, ("o_proj", "gate_proj"), {}, "no adapter of gate_proj without"),
        ({"family": "qwen3_moe"}, ("o_proj",), {}, "model_type=qwen3_moe"),
        ({}, ("o_proj", "in_proj"), {}, "no adapters of in_proj"),
        ({}, ("o_proj",), {"joined": True}, "joined servers"),
        ({}, ("o_proj",), {"takes_turns": True}, "give back their weights"),
    ],
)
def test_merged_weights_go_where_adapters_cannot(
    changes: dict[str, Any], targets: tuple[str, ...], options: dict[str, bool], why: str
) -> None:
    changes = {"family": "qwen3", "adapter": Adapter(4, 8.0, targets)} | changes
    hf, given = replace(HF, **changes), {"joined": False, "takes_turns": False}
    apart, said = goes_apart(hf, "auto", **(given | options))
    assert (apart, why in said) == (not why, True)
    assert goes_apart(hf, "merged", **(given | options))[0] is False
    if why and not options.get("joined"):
        with pytest.raises(UserError, match=r"rollout\.sglang\.sync\.adapter=adapter: .*" + why):
            goes_apart(hf, "adapter", **(given | options))


def test_adapters_follow_a_base_that_is_sent_once(servers: list[UpdateServer]) -> None:
    """A server that has lost its weights gets all of them; what it then says proves each update."""
    run, adapted = run_of(servers), Adapted()
    receivers = {i: Server(i, 1, (), control) for i, control in run.controls.items()}
    run.sync._adapters = AdapterPush(adapted, receivers, SingleRank())  # type: ignore[arg-type]
    run.sync._probe = replace(run.sync._probe, adapter=ADAPTER)

    def publish(value: float) -> dict[str, float]:
        adapted.value, run.trainer.adapter = value, {"z": 4.0 * value}
        return run.sync.publish()

    assert publish(0.25)["sync/bytes"] == 12.0 + 4.0
    assert publish(0.5)["sync/bytes"] == 4.0
    assert run.trainer.sent == [(1, [0, 1, 2])]
    servers[1].restart()
    assert publish(0.75)["sync/failed_servers"] == 0.0
    run.sync.refit([2])
    assert run.trainer.sent == [(1, [0, 1, 2]), (3, [1]), (3, [2])]
    servers[0].faults["/load_lora_adapter_from_tensors"] = ("unsuccessful", 4)
    servers[2].faults["/load_lora_adapter_from_tensors"] = ("ignore", 5)
    publish(1.0)
    assert run.rotation.said == {0: "stale", 1: "ready 4", 2: "stale"}
    assert "probe token" in run.rotation.reasons[2]


# (endpoint, kind, first call that it meets) -> (what is said of server 1, part of the reason)
FAULTS = [
    ("/server_info", "error", 1, "down", "scheduler does not answer"),
    ("/model_info", "html", 1, "stale", "no JSON"),
    ("/pause_generation", "hang", 1, "stale", "/pause_generation: waited 2 s"),
    ("/flush_cache", "refuse", 1, "stale", "waited 2 s for the server to be idle"),
    ("/begin_weight_update", "unsuccessful", 1, "stale", "/begin_weight_update: HTTP 200: no success"),
    ("/begin_weight_update", "refuse", 1, "stale", "/begin_weight_update: HTTP 400"),
    ("/end_weight_update", "error", 1, "stale", "/end_weight_update: HTTP 500"),
    (UPDATE, "die", 2, "down", UPDATE),
    (UPDATE, "cut", 2, "stale", UPDATE),
    (UPDATE, "unsuccessful", 2, "stale", "no success: partially updated"),
    (UPDATE, "error", 3, "stale", "HTTP 500"),
    (UPDATE, "drip", 2, "stale", "waited 2 s"),
    (UPDATE, "ignore", 3, "stale", "weight_version is 'default' after the update to version 1"),
    ("/continue_generation", "refuse", 1, "stale", "/continue_generation: HTTP 400"),
    ("/generate", "list", 1, "stale", "answered no object"),
    ("/generate", "die", 1, "down", "/generate"),
]


@pytest.mark.parametrize(
    ("path", "kind", "first", "said", "reason"), FAULTS, ids=[f"{f[0][1:]}-{f[1]}-{f[2]}" for f in FAULTS]
)
def test_failed_server_stays_out_and_others_continue(
    servers: list[UpdateServer], path: str, kind: str, first: int, said: str, reason: str
) -> None:
    servers[1].faults = {path: (kind, first)}
    # The deadline only decides where waiting is the fault; it is one for all servers, so the others need room in it.
    run = run_of(servers, timeout_s=2.0 if "waited" in reason else 20.0)
    start = time.monotonic()
    metrics = run.sync.publish()
    assert time.monotonic() - start < 18.0
    assert metrics["sync/failed_servers"] == 1.0
    assert run.rotation.said == {0: "ready 1", 1: said, 2: "ready 1"}
    assert (1, "ready 1") not in run.rotation.history
    assert run.rotation.reasons[1].startswith("SGLang server 1 at http")
    assert reason in run.rotation.reasons[1]
    assert run.sync.ready == {0, 2}
    assert run.sync.weight_version == 1
    for healthy in (servers[0], servers[2]):
        assert healthy.weights == weights_of_version(1)
        assert not healthy.paused


def test_a_lost_bucket_shows_in_the_probe(servers: list[UpdateServer]) -> None:
    run = run_of(servers)
    run.sync.publish()
    run.trainer.step(2)
    servers[2].faults = {UPDATE: ("ignore", 5)}  # the second bucket of the second update, and all after
    servers[2].version = "2"  # and it claims the version
    metrics = run.sync.publish()
    assert run.rotation.said == {0: "ready 2", 1: "ready 2", 2: "stale"}
    actual = run.rotation.reasons[2]
    at_server = next_logprobs(servers[2].weights, TEMPERATURE)
    token = int(at_server.argmax())
    theirs, ours = float(at_server[token]), float(next_logprobs(run.trainer.weights, TEMPERATURE)[token])
    said = re.search(r"probe token 0 \(id (\d+)\) has log-prob (\S+) at the server and (\S+) at the trainer", actual)
    assert said is not None
    assert int(said[1]) == token
    assert float(said[2]) == pytest.approx(theirs, abs=1e-6)
    assert float(said[3]) == pytest.approx(ours, abs=1e-6)
    assert ", limit " in actual
    assert metrics["sync/probe_logprob_diff_max"] == pytest.approx(abs(ours - theirs), rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        ([2] * 4, [-1.0] * 3),
        ([VOCAB_SIZE] * 4, [-1.0] * 4),
        ([2] * 4, [-1.0, math.nan, -1.0, -1.0]),
        ([2] * 4, [None] * 4),
        (None, None),
    ],
)
def test_a_probe_without_an_answer_fails(servers: list[UpdateServer], tokens: Any, logprobs: Any) -> None:
    servers[0].answer = lambda path, body: (200, _answer_of(path, tokens, logprobs))  # type: ignore[method-assign]
    with pytest.raises(RunError, match="/generate: no answer to a probe"):
        run_of(servers[:1]).sync.publish()


def _answer_of(path: str, tokens: Any, logprobs: Any) -> Any:
    """What a server that has version 1 answers, these tokens among it."""
    pairs = None if tokens is None else [list(pair) for pair in zip(logprobs, tokens, strict=False)]
    generated = {"output_ids": tokens, "meta_info": {"output_token_logprobs": pairs}}
    info = {"weight_version": "1", **INFO["model"], **INFO["server"]}
    return generated if path == "/generate" else {"success": True, **info}


def test_restarted_server_is_refit_with_the_current_version(servers: list[UpdateServer]) -> None:
    run = run_of(servers[:2])
    run.sync.publish()
    run.trainer.step(2)
    servers[1].faults = {UPDATE: ("die", 5)}
    run.sync.publish()
    assert run.rotation.said == {0: "ready 2", 1: "down"}
    calls = len(servers[0].calls)
    with UpdateServer(1, info=INFO) as successor:
        run.controls[1].endpoint = successor.endpoint
        metrics = run.sync.refit([1])
        assert successor.weights == weights_of_version(2)
        assert successor.version == "2"
        assert successor.number("/server_info") == 2  # it was checked anew
        assert run.rotation.said == {0: "ready 2", 1: "ready 2"}
        assert run.sync.weight_version == 2
        assert metrics["sync/failed_servers"] == 0.0
        assert len(servers[0].calls) == calls  # it goes on generating, undisturbed


def test_server_of_another_model_ends_the_run(servers: list[UpdateServer]) -> None:
    for server in servers[1:]:
        server.info = {
            "model": {**INFO["model"], "model_type": "qwen3"},
            "server": {**INFO["server"], "dtype": "bfloat16"},
        }
    run = run_of(servers)
    with pytest.raises(UserErrors) as caught:
        run.sync.publish()
    assert len(caught.value.problems) == 4
    for server, what in ((1, "qwen3"), (1, "bfloat16"), (2, "qwen3"), (2, "bfloat16")):
        assert any(f"server {server} " in line and what in line for line in caught.value.problems)
    assert not run.trainer.sent
    assert not servers[0].number("/pause_generation")


def test_listener_is_called_between_loading_and_generating(
    servers: list[UpdateServer],
) -> None:
    seen: list[Any] = []

    def listen(sent: Sequence[int]) -> None:
        loaded = [server.number(UPDATE) for server in servers]
        seen.append((list(sent), loaded[1:], [server.number("/continue_generation") for server in servers]))

    servers[0].faults = {UPDATE: ("error", 1)}
    run = run_of(servers)
    run.sync.after_send = listen
    run.sync.publish()
    assert seen == [([1, 2], [3, 3], [0, 0, 0])]
    assert run.rotation.said == {0: "stale", 1: "ready 1", 2: "ready 1"}


# -- several ranks -----------------------------------------------------------------------------------------------------


def _publish_on_two_ranks(rank: int, endpoints: list[tuple[int, str]]) -> dict[str, Any]:
    import torch.distributed as dist

    from mega_rl.parallel.comm import GroupRanks

    dist.init_process_group("gloo", rank=rank, world_size=2)
    mine: list[dict[int, str]] = [
        {},
        {1: "zwölf\nZeilen"} if rank == 1 else {},
        {0: f"rank {rank}", 2: "both"},
        {0: ""} if rank == 0 else {2: "x" * 5000},
    ]
    reasons = [list(merge_failures(failed, GroupRanks(dist.group.WORLD)).items()) for failed in mine]
    # Server 0 is steered by rank 1, the others by rank 0.
    run = Run(
        [Endpoint(index, url, KEYS) for index, url in endpoints],
        ranks=GroupRanks(dist.group.WORLD),
        own=[0] if rank == 1 else [1, 2],
        timeout_s=3.0,
    )
    first = run.sync.publish()
    run.trainer.step(2)
    second = run.sync.publish()
    run.trainer.step(3)
    try:
        run.sync.publish()
        end = "published"
    except RunError as error:
        end = str(error)
    return {
        "failed": [first["sync/failed_servers"], second["sync/failed_servers"]],
        "requests": [first["sync/requests"], second["sync/requests"]],
        "difference": [first["sync/probe_logprob_diff_max"], second["sync/probe_logprob_diff_max"]],
        "said": {str(i): word for i, word in run.rotation.said.items()},
        "reasons": {str(i): why for i, why in run.rotation.reasons.items()},
        "version": run.sync.weight_version,
        "end": end,
        "agreed": reasons,
    }


def test_all_ranks_agree_on_what_failed(servers: list[UpdateServer]) -> None:
    servers[0].faults = {UPDATE: ("ignore", 5)}  # loses buckets of the second update
    servers[1].faults = {UPDATE: ("die", 5)}
    servers[2].faults = {"/pause_generation": ("hang", 3)}  # in the third update, like server 0, which still ignores
    servers[0].version = "x"
    endpoints = [(server.index, server.endpoint.url) for server in servers]
    first, second = run_ranks(2, _publish_on_two_ranks, endpoints, timeout_s=90.0, device="cpu")
    assert first == second
    # Reasons reach every rank, and the lowest one's counts.
    assert first["agreed"] == [[], [(1, "zwölf\nZeilen")], [(0, "rank 0"), (2, "both")], [(0, ""), (2, "x" * 5000)]]
    assert first["failed"] == [0.0, 2.0]
    assert first["version"] == 2
    assert first["said"] == {"0": "stale", "1": "down", "2": "stale"}
    assert "weight_version is '1' after the update to version 3" in first["reasons"]["0"]
    assert "scheduler does not answer" in first["reasons"]["1"]
    assert "/pause_generation: waited 3 s" in first["reasons"]["2"]
    assert first["end"].startswith("no SGLang server took the weights of version 3:\n")
    for number in range(3):
        assert f"SGLang server {number} at" in first["end"]
