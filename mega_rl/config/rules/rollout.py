"""Rules of data, and of rollouts: SGLang servers, their arguments, generation ahead, off-policy samples."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from mega_rl.config.choices import ROLLOUT, corrects
from mega_rl.config.packaged import rows_of
from mega_rl.config.schema import Config, SuccessCurriculum
from mega_rl.config.schema.data import RESERVED, SOURCES

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
        if not is_server(url) and not is_registry(url):
            yield (
                f"rollout.sglang.urls: {url!r} is not a server's address; legal: http://host:port, without a path, or "
                "one registry of servers: a file, or an address with a path"
            )
        elif is_registry(url) and len(sglang.urls) > 1:
            yield f"rollout.sglang.urls: {url!r} is a registry, next to other entries; list all servers there"
        elif url.startswith("http:") and is_registry(url) and not _is_private(urlsplit(url).hostname or ""):
            yield (
                f"rollout.sglang.urls: {url!r}: whoever answers for a registry gets the servers' keys; legal: https:// "
                "addresses, or http:// of a private one"
            )
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
    if sglang.sync.in_flight == "keep" and config.model.adapter.rank and sglang.sync.adapter != "merged":
        yield (
            f"rollout.sglang.sync.in_flight=keep with model.adapter.rank={config.model.adapter.rank}: a server "
            "replaces adapters without requests in flight; set sync.adapter=merged or in_flight=recompute"
        )
    refused = {
        "rollout.sglang.urls: joined servers have their own devices; set placement=separate": bool(sglang.urls),
        "rollout.sglang.sync.in_flight=keep: servers release their KV cache while the trainer trains; set "
        "in_flight=recompute": sglang.sync.in_flight == "keep",
        "rollout.sglang.arrival=free and reward.source=model: to score a group interrupts all others; set "
        "arrival=lock": sglang.arrival == "free" and config.reward.source.name == "model",
    }
    if sglang.placement == "colocated":
        yield from (f"rollout.sglang.placement=colocated with {what}" for what, holds in refused.items() if holds)


def generates(config: Config) -> Iterator[str]:
    """List settings that a user's source which is no environment cannot have; its file runs."""
    rollout, ahead = config.rollout, config.trainer.async_steps
    if rollout.source.name in ROLLOUT.builtin or ROLLOUT.needs(config, "run"):
        return
    name = f"rollout.source={rollout.source.name!r}"
    if ahead:
        yield (
            f"{name}: trainer.async_steps={ahead} needs an environment or the built-in source, whose samples continue "
            "under later weights; define run instead of generate, or set trainer.async_steps=0"
        )
    if rollout.sglang.return_routing:
        yield (
            f"{name}: rollout.sglang.return_routing needs the built-in source or an environment, whose experts the "
            "servers report; leave it out"
        )


def _arguments(config: Config) -> Iterator[str]:
    """List server arguments that are decided elsewhere, cannot work, or cannot hold one longest sequence."""
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


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return is_loopback(host)


def is_server(url: str) -> bool:
    """Return whether this is the address of a server: http://host:port."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:  # a port that is none
        return False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" @?#")
    return known and plain and parts.path in ("", "/")


def is_registry(where: str) -> bool:
    """Return whether this is a registry of servers: a file, or an address with a path."""
    if ":" not in where:
        return bool(where)
    try:
        parts = urlsplit(where)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path not in ("", "/")


def data(config: Config) -> Iterator[str]:
    """Yield the problems of mixtures, of a curriculum and of streams."""
    own, mixture, trainer = config.data.curriculum, config.data.mixture, config.trainer
    if own.name != "none" and not config.data.shuffle:
        yield f"data.curriculum={own} with data.shuffle=false: prompts come in one of two orders; set data.shuffle=true"
    if isinstance(own, SuccessCurriculum) and config.reward.source.name == "none":
        yield "data.curriculum=success needs rewards, which reward.source=none does not give"
    rollout = config.rollout
    own_devices = rollout.backend == "sglang" and rollout.sglang.placement != "colocated"
    by_round = own_devices and rollout.sglang.arrival == "lock"  # whole responses with async_steps=1
    in_order = by_round and not rollout.dynamic_sampling.max_generations
    if config.data.stream.rows and (trainer.async_steps > 1 or (trainer.async_steps and not in_order)):
        yield (
            f"data.stream.rows with trainer.async_steps={trainer.async_steps}: a checkpoint keeps one place in the "
            "stream, and prompts of several steps are in flight; set data.stream.rows=0, or trainer.async_steps=1 with "
            "separate SGLang servers, rollout.sglang.arrival=lock and without dynamic sampling"
        )
    if mixture.sources and config.data.source.name != "files":
        yield f"{SOURCES} has no effect: data.source={config.data.source} yields the rows; set one of the two"
    if taken := [name for name in mixture.sources if name in RESERVED]:
        yield f"{SOURCES}.{taken[0]}: {taken[0]} is a metric of all data, data/{taken[0]}; take another name"
    weighted = [name for name, source in mixture.named().items() if source.weight]
    if weighted and (mixture.temperature != 1.0 or len(weighted) < len(mixture.sources)):
        yield (
            f"{SOURCES}.{weighted[0]}.weight: shares are given by the weights of all sources or by a temperature; "
            "give every source a weight, or none, and leave data.mixture.temperature out"
        )
    if config.data.stream.rows:
        yield from _stream(config)


def _stream(config: Config) -> Iterator[str]:
    """Yield what needs all prompts, or their number, and cannot go with a stream."""
    own, sources = config.data, config.data.mixture.named().values()
    refused = {
        f"data.source={own.source}, which yields the rows": own.source.name != "files",
        f"trainer.epochs={config.trainer.epochs:g}; set trainer.steps": config.trainer.epochs,
        f"data.val_size={own.val_size}; name held-out prompts in data.val_files": own.val_size,
        f"data.curriculum={own.curriculum}": own.curriculum.name != "none",
        "reward.sources; make each one a source of data.mixture.sources": config.reward.sources and not sources,
        f"{SOURCES} without weights": sources and not any(source.weight for source in sources),
    }
    for setting in (setting for setting, given in refused.items() if given):
        yield f"data.stream.rows={own.stream.rows}: the number of prompts is not known, so it cannot go with {setting}"


def validation(config: Config) -> Iterator[str]:
    """List what is wrong with the settings of validations."""
    val, best = config.validation, config.checkpoint.keep_best
    if val.n > 1 and val.temperature == 0:
        yield f"validation.n={val.n} with validation.temperature=0: greedy samples are all the same; set n=1"
    if outside := [k for k in val.k if not 1 <= k <= val.n]:
        yield f"validation.k={val.k}: {outside[0]} is not among 1 to validation.n={val.n}, the samples of a prompt"
    for name, files in val.sets.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"validation.sets: {name!r} is not the name of a set; legal: small letters, digits and _"
        if not files_of(files):
            yield f"validation.sets.{name}={files!r}: must be a file, or a list of files"
    rewarded = config.reward.source.name != "none"
    if best.startswith("reward/") and not rewarded:
        yield f"checkpoint.keep_best={best} with reward.source=none: the run has no such metric; name another"
    if best.startswith("val/"):
        *area, name = best.removeprefix("val/").split("/")
        legal = [f"{kind}_{k}{edge}" for kind, k, edge in estimates(config)]
        known = name in ("response_tokens_mean", *legal) or (rewarded and name.startswith("reward_"))
        if not config.trainer.val_interval or not known or area not in ([], *([name] for name in val.sets)):
            yield (
                f"checkpoint.keep_best={best}: validations have no such metric; legal with trainer.val_interval above "
                "0, and as val/SET/... for validation.sets: val/reward_mean, val/reward_<part>, "
                f"val/response_tokens_mean, {', '.join(f'val/{name}' for name in legal[::3]) or 'val/pass_at_k'}"
            )


def files_of(files: object) -> list[str]:
    """Return a set's files; empty if the setting is neither a file nor a list."""
    listed = files if isinstance(files, list) else [files]
    return [file for file in listed if isinstance(file, str) and file] if all(map(bool, listed)) else []


def estimates(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, k, edge) of a validation's estimates, with the edges of their 95 % intervals."""
    counted = config.validation.counted
    kinds = [(kind, k) for k in counted for kind in ("pass_at", "maj_at")]
    kinds += [("avg_at", config.validation.n)] if counted else []
    yield from ((kind, k, edge) for kind, k in kinds for edge in ("", "_low", "_high"))
