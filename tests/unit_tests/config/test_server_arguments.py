"""Arguments of SGLang that a run passes through, and those that it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.rules.rollout import DECIDED, KEY, REFUSED
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.preflight.host import check_servers
from mega_rl.rollout.sglang.server.installation import argument_names, find_sglang
from mega_rl.rollout.sglang.server.process import ServerSettings, arguments
from tests.helpers.sglang import needs_sglang
from tests.unit_tests.converters.tiny_configs import TINY

SGLANG = "rollout.backend=sglang"


def problems(*args: str, tp: int = 8) -> list[str]:
    given = [arg if arg.startswith("rollout.") else f"{KEY}.{arg}" for arg in args]
    return check(load(None, [SGLANG, f"rollout.sglang.server.tp={tp}", *given]), world_size=1)


def test_a_server_holds_the_longest_sequence_of_training_and_of_validation() -> None:
    lengths = ("data.max_prompt_tokens=100", "rollout.max_new_tokens=50", "trainer.val_interval=1")
    validates = ("data.val_files=[a.jsonl]", "validation.max_new_tokens=80", "trainer.microbatch.max_tokens=300")
    for name in ("max_total_tokens", "context_length"):
        given = [SGLANG, *lengths, *validates]
        assert check(load(None, [*given, f"{KEY}.{name}=180"]), world_size=1) == []
        (line,) = check(load(None, [*given, f"{KEY}.{name}=179"]), world_size=1)
        assert line.startswith(f"{KEY}.{name}=179 cannot hold one prompt and its longest response; make it at least 18")


@pytest.mark.parametrize(
    "args",
    [
        ("ep_size=8",),
        ("enable_dp_attention=true", "dp_size=4", "ep_size=8", "moe_a2a_backend=deepep"),
        ("kv_cache_dtype=fp8_e5m2", "chunked_prefill_size=4096", "cuda_graph_max_bs=64"),
        ("rollout.sglang.server.nodes=2", "rollout.sglang.server.host=eth0", "ep_size=8"),
    ],
)
def test_these_run(args: tuple[str, ...]) -> None:
    assert problems(*args) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("host=127.0.0.1", "nodes=2 with rollout.sglang.server.host=127.0.0.1: .*name the cluster's interf"),
        ("host=lo", "nodes=2 with rollout.sglang.server.host=lo: the hosts of a server have to reach"),
        (
            "host=eth0 args.enable_dp_attention=true args.dp_size=2",
            "enable_dp_attention with rollout.sglang.server.nodes=2: .*pickles from anyone .*; set nodes=1",
        ),
    ],
)
def test_what_servers_on_several_hosts_cannot_have_is_refused(given: str, words: str) -> None:
    (line,) = problems(*(f"rollout.sglang.server.{text}" for text in ["nodes=2", *given.split()]))
    assert re.search(words, line)


def test_joined_servers_have_the_arguments_of_whoever_started_them() -> None:
    joined = ["rollout.sglang.urls=[http://127.0.0.1:1]", "rollout.sglang.keys_file=k"]
    (line,) = check(load(None, [SGLANG, *joined, f"{KEY}.page_size=16"]), world_size=1)
    assert "has no effect: it needs no rollout.sglang.urls: servers that it starts" in line


def test_arguments_reach_the_command_line() -> None:
    plain = ServerSettings(Path("m"), device="cuda")
    args = {"ep_size": 8, "enable_dp_attention": True, "cuda_graph_bs": [1, 2], "json_model_override_args": {"a": 1}}
    added = arguments(replace(plain, args=args), 1)[len(arguments(plain, 1)) :]
    assert added == [
        "--ep-size", "8", "--enable-dp-attention", "--cuda-graph-bs", "1", "2",
        "--json-model-override-args", '{"a": 1}',
    ]  # fmt: skip


def test_keys_that_only_sglang_reads_are_asked_for() -> None:
    config = load(None, [SGLANG, "trainer.device=cpu", "rollout.sglang.urls=[http://127.0.0.1:1]"])
    raw = {**TINY["minimax_m2"], "use_qk_norm": True}
    (line,) = check_servers(config, {"model.path": parse_hf_config(raw)})
    assert "without use_routing_bias in config.json SGLang 0.5.21 computes another model" in line
    assert list(check_servers(config, {"model.path": parse_hf_config(raw | {"use_routing_bias": True})})) == []


def test_experts_are_reported_where_they_are_replayed() -> None:
    (line,) = check(load(None, [SGLANG, "rollout.sglang.return_routing=true"]), world_size=1)
    assert "has no effect: it needs engine.megatron.moe.routing_replay=true" in line
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
    assert line == f"{KEY}.ep_sizes: SGLang 0.5.21 has no such argument; its ServerArgs lists them"
