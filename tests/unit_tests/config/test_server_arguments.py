"""Arguments of SGLang that a run passes through, and those that it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.rules.servers import DECIDED, KEY, REFUSED
from mega_rl.plan.preflight.host import check_servers
from mega_rl.rollout.sglang.server.installation import argument_names, find_sglang
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments
from tests.helpers.sglang import needs_sglang

SGLANG = "rollout.backend=sglang"


def problems(*args: str, tp: int = 8) -> list[str]:
    given = [arg if arg.startswith("rollout.") else f"{KEY}.{arg}" for arg in args]
    return check(load(None, [SGLANG, f"rollout.sglang.server.tp={tp}", *given]), world_size=1)


@pytest.mark.parametrize(
    "setting", ["rollout.sglang.server.args.max_total_tokens", "rollout.sglang.server.args.context_length"]
)
def test_a_server_holds_the_longest_sequence_of_training_and_of_validation(setting: str) -> None:
    lengths = ("data.max_prompt_tokens=100", "rollout.max_new_tokens=50")
    validates = ("trainer.val_interval=1", "data.val_files=[a.jsonl]", "validation.max_new_tokens=80")

    def lines(number: int, *more: str) -> list[str]:
        return check(load(None, [SGLANG, f"{setting}={number}", *lengths, *more]), world_size=1)

    assert lines(150) == []
    (line,) = lines(149)
    assert line.startswith(setting)
    assert line.endswith("data.max_prompt_tokens+rollout.max_new_tokens=150; make it at least 150")
    assert lines(180, *validates) == []
    assert lines(179, *validates)[0].endswith("+validation.max_new_tokens=180; make it at least 180")


@pytest.mark.parametrize(
    "args",
    [
        ("ep_size=8",),
        ("enable_dp_attention=true", "dp_size=4", "ep_size=8", "moe_a2a_backend=deepep"),
        ("kv_cache_dtype=fp8_e5m2", "chunked_prefill_size=4096", "cuda_graph_max_bs=64"),
    ],
)
def test_these_run(args: tuple[str, ...]) -> None:
    assert problems(*args) == []


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("tp_size=2", f"{KEY}.tp_size: decided by rollout.sglang.server.tp; leave it out"),
        ("mem_fraction_static=0.96", f"{KEY}.mem_fraction_static=0.96: legal: above 0 and at most 0.95"),
        ("max_total_tokens=many", f"{KEY}.max_total_tokens='many': legal: a whole number above 0"),
        ("nnodes=2", f"{KEY}.nnodes: decided by rollout.sglang.server.nodes; leave it out"),
        ("dist_init_addr=a:1", "decided by nothing: the nodes of each start meet at free ports of the first one"),
        ("pp_size=2", "not supported: weights are sent to each tensor-parallel rank"),
        ("quantization=fp8", "not supported: weights are sent unquantised"),
        ("speculative_algorithm=EAGLE", "not supported: the draft model would keep its old weights"),
        ("disaggregation_transfer_backend=nixl", "prefill and decode of one response"),
        ("trust_remote_code=true", "not supported: code of a checkpoint"),
        ("disable_radix_cache=false", "an argument is on SGLang's command line or is not"),
        (
            "ep_size=3",
            "ep_size=3 does not divide rollout.sglang.server.tp=8, whose ranks it is about; legal: 1, 2, 4, 8",
        ),
        ("dp_size=2", "dp_size=2 without enable_dp_attention: weights reach one data-parallel replica only"),
        ("enable_dp_attention=true", "enable_dp_attention has no effect with dp_size=1"),
    ],
)
def test_these_are_refused_with_the_reason(arg: str, words: str) -> None:
    (line,) = problems(arg)
    assert words in line


def spanning(*args: str, tp: int = 16, nodes: int = 2, host: str = "eth0") -> list[str]:
    server = "rollout.sglang.server"
    return problems(f"{server}.nodes={nodes}", f"{server}.host={host}", *args, tp=tp)


def test_servers_may_span_hosts() -> None:
    assert spanning(f"{KEY}.ep_size=16") == []
    assert spanning("rollout.sglang.placement=colocated") == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (spanning(tp=15), "nodes=2 does not divide rollout.sglang.server.tp=15: .*; legal: 1, 3, 5, 15"),
        (spanning(host="127.0.0.1"), "nodes=2 with rollout.sglang.server.host=127.0.0.1: .*name the cluster's interf"),
        (spanning(host="lo"), "nodes=2 with rollout.sglang.server.host=lo: the hosts of a server have to reach"),
        (
            spanning(f"{KEY}.enable_dp_attention=true", f"{KEY}.dp_size=2"),
            "enable_dp_attention with rollout.sglang.server.nodes=2: .*pickles from anyone .*; set nodes=1",
        ),
    ],
)
def test_what_servers_on_several_hosts_cannot_have_is_refused(given: list[str], words: str) -> None:
    (line,) = given
    assert re.search(words, line)


def test_joined_servers_have_the_arguments_of_whoever_started_them() -> None:
    joined = ["rollout.sglang.urls=[http://127.0.0.1:1]", "rollout.sglang.keys_file=k"]
    (line,) = check(load(None, [SGLANG, *joined, f"{KEY}.page_size=16"]), world_size=1)
    assert "has no effect: it needs servers that the run starts" in line


def test_arguments_reach_the_command_line() -> None:
    plain = ServerSettings(Path("m"), device="cuda")
    args = {"ep_size": 8, "enable_dp_attention": True, "cuda_graph_bs": [1, 2], "json_model_override_args": {"a": 1}}
    added = arguments(replace(plain, args=args), 1)[len(arguments(plain, 1)) :]
    assert added == [
        "--ep-size", "8", "--enable-dp-attention", "--cuda-graph-bs", "1", "2",
        "--json-model-override-args", '{"a": 1}',
    ]  # fmt: skip


def test_experts_are_reported_where_they_are_replayed() -> None:
    (line,) = check(load(None, [SGLANG, "rollout.sglang.return_routing=true"]), world_size=1)
    assert "has no effect: it needs engine.backend=megatron with engine.megatron.moe.routing_replay=true" in line
    replayed = ["engine.megatron.moe.routing_replay=true", "algorithm.old_logprobs=recompute"]
    assert check(load(None, [SGLANG, "rollout.sglang.return_routing=true", *replayed]), world_size=1) == []
    plain = ServerSettings(Path("m"), device="cuda")
    assert "--enable-return-routed-experts" in arguments(replace(plain, return_routing=True), 1)
    assert "--enable-return-routed-experts" not in arguments(plain, 1)


@needs_sglang
def test_names_are_those_of_the_installed_sglang() -> None:
    installation = find_sglang()
    assert installation is not None
    names = argument_names(installation)
    assert names is not None
    assert (DECIDED.keys() | REFUSED.keys()) - names == {"config"}
    (line,) = check_servers(load(None, [SGLANG, "trainer.device=cpu", f"{KEY}.ep_sizes=2"]), {})
    assert line == f"{KEY}.ep_sizes: SGLang 0.5.20 has no such argument; did you mean ep_size?"
