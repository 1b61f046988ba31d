"""Rules of the servers that a run starts: arguments of SGLang that may pass through, and hosts that a server spans."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from mega_rl.config.facts import divisors, listed
from mega_rl.config.packaged import rows_of
from mega_rl.config.schema import Config

KEY = "rollout.sglang.server.args"
NODES = "rollout.sglang.server.nodes"
_ARGUMENTS = rows_of("server_arguments.tsv")
# Argument -> what decides it in a run.
DECIDED = {name: reason for name, kind, reason in _ARGUMENTS if kind == "decided by"}
# Argument -> reason why it cannot work here.
REFUSED = {name: reason for name, kind, reason in _ARGUMENTS if kind == "not supported"}
_REFUSED_PREFIXES = {name: reason for name, kind, reason in _ARGUMENTS if kind == "prefix"}


def server_arguments(config: Config) -> Iterator[str]:
    """List the arguments that are decided elsewhere, cannot work, or do not fit the servers' ranks."""
    args = config.rollout.sglang.server.args
    for name, value in args.items():
        if name in DECIDED:
            yield f"{KEY}.{name}: decided by {DECIDED[name]}; leave it out"
        elif reason := _reason(name):
            yield f"{KEY}.{name}: not supported: {reason}; leave it out"
        elif value is None or value is False:
            shown = "null" if value is None else "false"
            yield f"{KEY}.{name}={shown}: an argument is on SGLang's command line or is not; leave it out"
    if "max_total_tokens" in args and not config.rollout.sglang.server.max_total_tokens > 0:
        yield f"{KEY}.max_total_tokens={args['max_total_tokens']!r}: legal: a whole number above 0"
    if "mem_fraction_static" in args and not 0.0 < config.rollout.sglang.server.mem_fraction <= 0.95:
        yield f"{KEY}.mem_fraction_static={args['mem_fraction_static']!r}: legal: above 0 and at most 0.95"
    yield from _sizes(config)
    yield from _lengths(config)
    if config.rollout.sglang.server.nodes > 1:
        yield from _nodes(config)


def _nodes(config: Config) -> Iterator[str]:
    """List what does not go with servers that span hosts."""
    sglang = config.rollout.sglang
    server, given = sglang.server, f"{NODES}={sglang.server.nodes}"
    if server.tp % server.nodes:
        yield (
            f"{given} does not divide rollout.sglang.server.tp={server.tp}: each host of a server has an equal share "
            f"of its ranks; legal: {listed(divisors(server.tp))}"
        )
    if is_loopback(server.host):
        yield (
            f"{given} with rollout.sglang.server.host={server.host}: the hosts of a server have to reach each other; "
            "name the cluster's interface, such as eth0"
        )
    if server.args.get("enable_dp_attention") is True:
        yield (
            f"{KEY}.enable_dp_attention with {given}: SGLang's processes would take pickles from anyone on the network "
            "who reaches their ports; set nodes=1, or leave it out"
        )


def _lengths(config: Config) -> Iterator[str]:
    """Yield what keeps a server from holding one longest sequence, of a validation too."""
    own, rollout, val = config.rollout.sglang.server, config.rollout.max_new_tokens, config.validation.max_new_tokens
    key = "validation.max_new_tokens" if val > rollout else "rollout.max_new_tokens"
    longest = config.data.max_prompt_tokens + max(rollout, val)
    needs = f"one sequence of data.max_prompt_tokens+{key}={longest}; make it at least {longest}"
    if 0 < own.max_total_tokens < longest:
        yield f"{KEY}.max_total_tokens={own.max_total_tokens} cannot hold {needs}"
    context = own.args.get("context_length")
    if isinstance(context, int) and context < longest:
        yield f"{KEY}.context_length={context} cannot hold {needs}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach this address, name or interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def _reason(name: str) -> str | None:
    """Return why an argument cannot work, None where it may."""
    prefixes = (reason for prefix, reason in _REFUSED_PREFIXES.items() if name.startswith(prefix))
    return REFUSED.get(name) or next(prefixes, None)


def _sizes(config: Config) -> Iterator[str]:
    args, tp = config.rollout.sglang.server.args, config.rollout.sglang.server.tp
    for name in ("ep_size", "dp_size"):
        size = args.get(name, 1)
        if not isinstance(size, int) or size < 1 or tp % size:
            yield (
                f"{KEY}.{name}={size!r} does not divide rollout.sglang.server.tp={tp}, whose ranks it is about; "
                f"legal: {listed(divisors(tp))}"
            )
    replicas, attention = args.get("dp_size", 1), args.get("enable_dp_attention") is True
    if replicas != 1 and not attention:
        yield (
            f"{KEY}.dp_size={replicas!r} without enable_dp_attention: weights reach one data-parallel replica only; "
            "start several servers instead (rollout.sglang.server.count), or set enable_dp_attention: true"
        )
    if attention and replicas == 1:
        yield f"{KEY}.enable_dp_attention has no effect with dp_size=1; set dp_size, or leave it out"
