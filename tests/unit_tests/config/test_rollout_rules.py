from __future__ import annotations

import pytest

from mega_rl.config.facts import ModelFacts
from mega_rl.config.loader import load
from mega_rl.config.needs import is_on_policy
from mega_rl.config.rules import check

FACTS = ModelFacts(
    num_layers=4,
    num_heads=12,
    num_kv_heads=4,
    ffn_hidden_size=96,
    vocab_size=1000,
    max_position_embeddings=4096,
)
SGLANG = "rollout.backend=sglang"
JOINED = ("rollout.sglang.urls=[http://127.0.0.1:30000]", "rollout.sglang.keys_file=keys.json")


def broken(*overrides: str) -> list[str]:
    return check(load(None, overrides), world_size=1, models={"model.path": FACTS})


@pytest.mark.parametrize(
    "overrides",
    [
        (SGLANG,),
        (SGLANG, "rollout.sglang.server.tp=6", "rollout.sglang.server.count=2"),
        (SGLANG, "trainer.async_steps=1", "rollout.sglang.partial_rollout=true", "algorithm.correction=tis"),
        (SGLANG, "rollout.sglang.placement=colocated"),
        (SGLANG, "rollout.sglang.max_failed_share=0.5"),
        (SGLANG, *JOINED),
        (SGLANG, "rollout.sglang.urls=[http://node1:30000,https://node2:30000]", "rollout.sglang.keys_file=keys.json"),
        (SGLANG, "trainer.async_steps=1", "algorithm.old_logprobs=rollout"),
        ("algorithm.correction=tis",),  # the embedded engine's log-probs differ from the trainer's too
    ],
)
def test_runs(overrides: tuple[str, ...]) -> None:
    assert broken(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.sglang.server.tp=2",), "rollout.sglang.server.tp=2 has no effect: it needs rollout.backend=sglang"),
        ((SGLANG, "rollout.hf.batch_size=8"), "rollout.hf.batch_size=8 has no effect: it needs rollout.backend=hf"),
        (
            ("trainer.async_steps=1", "algorithm.correction=tis"),
            "cannot run ahead: it needs rollout.backend=sglang",
        ),
        (
            (SGLANG, "trainer.async_steps=1", "algorithm.correction=none"),
            "with algorithm.correction=none: samples of old weights would pass for",
        ),
        (
            (SGLANG, "rollout.sglang.server.tp=5"),
            "rollout.sglang.server.tp=5 does not divide the 12 attention heads of model.path; legal: 1, 2, 3",
        ),
        ((SGLANG, "rollout.sglang.urls=[http://a:1]"), "rollout.sglang.keys_file is empty with rollout.sglang.urls"),
        (
            (SGLANG, "rollout.sglang.keys_file=k"),
            "rollout.sglang.keys_file=k has no effect: it needs rollout.sglang.urls",
        ),
        (
            (SGLANG, *JOINED, "rollout.sglang.server.tp=2"),
            "rollout.sglang.server.tp=2 has no effect: it needs servers that the run starts",
        ),
        (
            (SGLANG, *JOINED, "rollout.sglang.placement=colocated"),
            "joined servers have devices of their own; set separate",
        ),
        (
            (SGLANG, "rollout.sglang.placement=colocated", "trainer.async_steps=1", "algorithm.correction=tis"),
            (
                "rollout.sglang.placement=colocated with trainer.async_steps=1: servers that share the trainer's "
                "devices cannot"
            ),
        ),
        (
            (SGLANG, "rollout.sglang.sync.timeout_s=600"),
            "rollout.sglang.sync.timeout_s=600 must be below trainer.timeout_s=600",
        ),
        ((SGLANG, "rollout.sglang.partial_rollout=true"), "it needs trainer.async_steps=1"),
    ],
)
def test_broken_rules_are_named(overrides: tuple[str, ...], words: str) -> None:
    actual = broken(*overrides)
    assert len(actual) == 1, actual
    assert words in actual[0]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000", "http://127.0.0.1", "http://a:70000", "ftp://a:1", "http://a:1/v1", "http://:1"]
)
def test_what_is_no_address(url: str) -> None:
    actual = broken(SGLANG, f"rollout.sglang.urls=['{url}']", "rollout.sglang.keys_file=k")
    assert any(f"rollout.sglang.urls: {url!r} is no server's address" in line for line in actual)


def test_a_server_is_named_once() -> None:
    actual = broken(SGLANG, "rollout.sglang.urls=[http://a:1,http://a:1]", "rollout.sglang.keys_file=k")
    assert actual == ["rollout.sglang.urls=['http://a:1', 'http://a:1']: a server is named twice; name each once"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_no_server_listens_on_all_interfaces(host: str) -> None:
    actual = broken(SGLANG, f"rollout.sglang.server.host='{host}'")
    assert len(actual) == 1
    assert "listens on one interface, not on all" in actual[0]


def test_off_policy_samples_need_old_logprobs() -> None:
    single = ("trainer.prompts_per_step=8", "trainer.minibatch_size=8", "algorithm.kl=none")
    assert is_on_policy(load(None, single))
    assert not is_on_policy(load(None, [*single, "algorithm.correction=tis"]))
    assert not is_on_policy(load(None, [*single, SGLANG, "trainer.async_steps=1"]))
