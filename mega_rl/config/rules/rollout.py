"""Rules of rollouts: SGLang servers, their arguments, generation ahead of training, what off-policy samples need."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from mega_rl.config.choices import corrects
from mega_rl.config.packaged import rows_of
from mega_rl.config.schema import Config

KEY = "rollout.sglang.server.args"
_ARGUMENTS = rows_of("server_arguments.tsv")
# Argument -> what decides it in a run.
DECIDED = {name: reason for name, kind, reason in _ARGUMENTS if kind == "decided by"}
# Argument -> reason why it cannot work here.
REFUSED = {name: reason for name, kind, reason in _ARGUMENTS if kind == "not supported"}
_REFUSED_PREFIXES = {name: reason for name, kind, reason in _ARGUMENTS if kind == "prefix"}


def rollouts(config: Config) -> Iterator[str]:
    """List conflicts between settings, whatever the model."""
    rollout, trainer, ahead = config.rollout, config.trainer, config.trainer.async_steps
    if ahead and not corrects(config) and config.algorithm.old_logprobs != "rollout":
        yield (
            f"trainer.async_steps={ahead} with algorithm.correction=none: samples of old weights would pass for the "
            "policy's own; set algorithm.correction=tis, or algorithm.old_logprobs=rollout"
        )
    dynamic, per_step = rollout.dynamic_sampling, trainer.prompts_per_step
    drawn = dynamic.max_generations * (dynamic.prompts or per_step)
    if dynamic.max_generations and drawn <= per_step:
        yield (
            f"rollout.dynamic_sampling.max_generations*prompts={drawn}: a step has no prompts to choose from, since it "
            f"trains on trainer.prompts_per_step={per_step}; raise either"
        )
    if rollout.backend == "none" and rollout.source.name == "single_turn":
        yield "rollout.backend=none with rollout.source=single_turn: it samples with an engine; set rollout.backend=hf"
    if rollout.backend == "sglang":
        yield from _sglang(config)
        yield from _arguments(config)


def _sglang(config: Config) -> Iterator[str]:
    sglang, trainer = config.rollout.sglang, config.trainer
    for url in sglang.urls:
        if not _is_server(url):
            yield f"rollout.sglang.urls: {url!r} is no server's address; legal: http://host:port, without a path"
    if sglang.urls and not sglang.keys_file:
        yield (
            "rollout.sglang.keys_file is empty with rollout.sglang.urls: a server without keys takes weights from "
            "anyone; start the servers with --api-key and --admin-api-key and name the file that holds both"
        )
    server = sglang.server
    if server.host in ("", "0.0.0.0", "::", "*"):
        yield (
            f"rollout.sglang.server.host={server.host!r}: a server listens on one interface, not on all; legal: "
            "127.0.0.1, or the address of the cluster's interface"
        )
    if server.nodes > 1 and is_loopback(server.host):
        yield (
            f"rollout.sglang.server.nodes={server.nodes} with rollout.sglang.server.host={server.host}: the hosts of a "
            "server have to reach each other; name the cluster's interface, such as eth0"
        )
    if sglang.sync.timeout_s >= trainer.timeout_s:
        yield (
            f"rollout.sglang.sync.timeout_s={sglang.sync.timeout_s:g} must be below "
            f"trainer.timeout_s={trainer.timeout_s:g}: the other ranks wait in a collective while one steers a server"
        )
    if sglang.placement == "colocated" and (sglang.urls or trainer.async_steps):
        yield (
            "rollout.sglang.placement=colocated with rollout.sglang.urls or trainer.async_steps: these servers cannot "
            "take turns on the trainer's devices; set separate"
        )


def _arguments(config: Config) -> Iterator[str]:
    """List the arguments of servers that are decided elsewhere, cannot work, or do not hold one longest sequence."""
    server = config.rollout.sglang.server
    for name in server.args:
        refused = (reason for prefix, reason in _REFUSED_PREFIXES.items() if name.startswith(prefix))
        reason = REFUSED.get(name) or next(refused, None)
        if name in DECIDED or reason:
            why = f"not supported: {reason}" if reason else f"decided by {DECIDED[name]}"
            yield f"{KEY}.{name}: {why}; leave it out"
    longest = config.data.max_prompt_tokens + max(config.rollout.max_new_tokens, config.validation.max_new_tokens)
    for name in ("max_total_tokens", "context_length"):
        size = server.args.get(name, longest)
        if not isinstance(size, int) or size < longest:
            yield f"{KEY}.{name}={size!r} cannot hold one prompt and its longest response; make it at least {longest}"
    share = server.args.get("mem_fraction_static", 0.5)
    if not isinstance(share, float) or not 0.0 < share <= 0.95:
        yield f"{KEY}.mem_fraction_static={share!r}: legal: above 0 and at most 0.95"
    attention = server.args.get("enable_dp_attention") is True
    if server.args.get("dp_size", 1) != 1 and not attention:
        yield (
            f"{KEY}.dp_size without enable_dp_attention: weights reach one data-parallel replica only; start several "
            "servers instead (rollout.sglang.server.count), or set enable_dp_attention: true"
        )
    if attention and server.nodes > 1:
        yield (
            f"{KEY}.enable_dp_attention with rollout.sglang.server.nodes={server.nodes}: SGLang's processes would take "
            "pickles from anyone on the network who reaches their ports; set nodes=1, or leave it out"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach this address, name or interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is none
        return False
