"""Rules of rollouts: SGLang servers, generation ahead of training, and what off-policy samples need."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from mega_rl.config.choices import corrects
from mega_rl.config.facts import ModelFacts, divisors, listed
from mega_rl.config.rules.servers import server_arguments
from mega_rl.config.schema import Config


def rollouts(config: Config) -> Iterator[str]:
    """List conflicts between settings, whatever the model."""
    sglang, trainer = config.rollout.sglang, config.trainer
    if trainer.async_steps and not corrects(config) and config.algorithm.old_logprobs != "rollout":
        yield (
            f"trainer.async_steps={trainer.async_steps} with algorithm.correction=none: samples of old weights would "
            "pass for the policy's own; set algorithm.correction=tis, or algorithm.old_logprobs=rollout"
        )
    yield from _dynamic_sampling(config)
    if config.rollout.backend == "none" and config.rollout.source.name == "single_turn":
        yield (
            "rollout.backend=none with rollout.source=single_turn: it samples with an engine; set rollout.backend=hf "
            "or sglang, or a rollout.source of your own"
        )
    if config.rollout.backend != "sglang":
        return
    yield from _addresses(config)
    yield from server_arguments(config)
    if sglang.sync.timeout_s >= trainer.timeout_s:
        yield (
            f"rollout.sglang.sync.timeout_s={sglang.sync.timeout_s:g} must be below "
            f"trainer.timeout_s={trainer.timeout_s:g}: the other ranks wait in a collective while one steers a server"
        )
    if sglang.placement == "colocated" and sglang.urls:
        yield (
            "rollout.sglang.placement=colocated with rollout.sglang.urls: joined servers have devices of their own; "
            "set separate"
        )
    if sglang.placement == "colocated" and trainer.async_steps:
        yield (
            f"rollout.sglang.placement=colocated with trainer.async_steps={trainer.async_steps}: servers that share "
            "the trainer's devices cannot generate while it trains; set separate, or async_steps=0"
        )


def _dynamic_sampling(config: Config) -> Iterator[str]:
    dynamic, per_step = config.rollout.dynamic_sampling, config.trainer.prompts_per_step
    drawn = dynamic.max_generations * (dynamic.prompts or per_step)
    if dynamic.max_generations and drawn < per_step:
        yield (
            f"rollout.dynamic_sampling.max_generations*prompts={dynamic.max_generations}*{dynamic.prompts}={drawn} "
            f"cannot fill a step of trainer.prompts_per_step={per_step}; raise either"
        )
    if dynamic.max_generations and drawn == per_step:
        yield (
            f"rollout.dynamic_sampling.max_generations={dynamic.max_generations} has no effect: a step draws the "
            f"trainer.prompts_per_step={per_step} prompts that it trains on, and has none to choose from; raise it, or "
            "rollout.dynamic_sampling.prompts"
        )


def _addresses(config: Config) -> Iterator[str]:
    sglang = config.rollout.sglang
    for url in sglang.urls:
        if not _is_server(url):
            yield f"rollout.sglang.urls: {url!r} is no server's address; legal: http://host:port, without a path"
    if len(set(sglang.urls)) < len(sglang.urls):
        yield f"rollout.sglang.urls={sglang.urls}: a server is named twice; name each once"
    if sglang.urls and not sglang.keys_file:
        yield (
            "rollout.sglang.keys_file is empty with rollout.sglang.urls: a server without keys takes weights from "
            "anyone; start the servers with --api-key and --admin-api-key and name the file that holds both"
        )
    host = sglang.server.host
    if host in ("", "0.0.0.0", "::", "*"):
        yield (
            f"rollout.sglang.server.host={host!r}: a server listens on one interface, not on all; legal: 127.0.0.1, or "
            "the address of the cluster's interface"
        )


def fits_model(config: Config, key: str, facts: ModelFacts) -> Iterator[str]:
    """List conflicts between settings and a checkpoint."""
    tp = config.rollout.sglang.server.tp
    if config.rollout.backend == "sglang" and key == "model.path" and facts.num_heads % tp:
        yield (
            f"rollout.sglang.server.tp={tp} does not divide the {facts.num_heads} attention heads of {key}; "
            f"legal: {listed(divisors(facts.num_heads))}"
        )


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is none
        return False
