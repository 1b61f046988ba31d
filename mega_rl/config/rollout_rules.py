"""Rules of rollouts: SGLang servers, generation ahead of training, and what off-policy samples need."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from mega_rl.config.facts import ModelFacts, divisors, listed
from mega_rl.config.schema import Config


def rollouts(config: Config) -> Iterator[str]:
    """What is wrong between the settings, whatever the model."""
    sglang, trainer = config.sglang, config.trainer
    if trainer.async_steps and not config.algorithm.tis_cap:
        yield (
            f"trainer.async_steps={trainer.async_steps} with algorithm.tis_cap=0: samples of old weights would pass "
            "for the policy's own; set algorithm.tis_cap, to 2 for instance"
        )
    if config.rollout.backend != "sglang":
        return
    yield from _addresses(config)
    if sglang.sync_timeout_s >= trainer.timeout_s:
        yield (
            f"sglang.sync_timeout_s={sglang.sync_timeout_s:g} must be below trainer.timeout_s={trainer.timeout_s:g}: "
            "the other ranks wait in a collective while one steers a server"
        )
    if sglang.placement == "colocated" and sglang.urls:
        yield "sglang.placement=colocated with sglang.urls: joined servers have devices of their own; set separate"
    if sglang.placement == "colocated" and trainer.async_steps:
        yield (
            f"sglang.placement=colocated with trainer.async_steps={trainer.async_steps}: servers that share the "
            "trainer's devices cannot generate while it trains; set separate, or async_steps=0"
        )
    remote = [url for url in sglang.urls if not is_loopback(urlsplit(url).hostname or "")]
    if sglang.transport == "shared_memory" and remote:
        yield (
            f"sglang.transport=shared_memory with sglang.urls={remote}: memory is shared on one host alone; legal: "
            "auto, distributed, disk"
        )


def _addresses(config: Config) -> Iterator[str]:
    sglang = config.sglang
    for url in sglang.urls:
        if not _is_server(url):
            yield f"sglang.urls: {url!r} is no server's address; legal: http://host:port, without a path"
    if len(set(sglang.urls)) < len(sglang.urls):
        yield f"sglang.urls={sglang.urls}: a server is named twice; name each once"
    if sglang.urls and not sglang.keys_file:
        yield (
            "sglang.keys_file is empty with sglang.urls: a server without keys takes weights from anyone; start the "
            "servers with --api-key and --admin-api-key and name the file that holds both"
        )
    if sglang.host in ("", "0.0.0.0", "::", "*"):
        yield (
            f"sglang.host={sglang.host!r}: a server listens on one interface, not on all; legal: 127.0.0.1, or the "
            "address of the cluster's interface"
        )


def fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    """What is wrong between the settings and a checkpoint."""
    tp = config.sglang.tp
    if config.rollout.backend == "sglang" and key == "model.path" and facts.num_heads % tp:
        yield (
            f"sglang.tp={tp} does not divide the {facts.num_heads} attention heads of {key}; legal: "
            f"{listed(divisors(facts.num_heads))}"
        )


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is none
        return False


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine can reach this address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
