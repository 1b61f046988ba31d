"""Rules of the servers that a run starts: arguments of SGLang that may pass through, and hosts that a server spans."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from mega_rl.config.facts import divisors, listed
from mega_rl.config.schema import Config

KEY = "rollout.sglang.server.args"
NODES = "rollout.sglang.server.nodes"
# Argument -> what decides it in a run.
DECIDED = {
    "model_path": "model.path",
    "host": "rollout.sglang.server.host",
    "port": "nothing: each server takes a free port",
    "api_key": "nothing: each start has keys of its own",
    "admin_api_key": "nothing: each start has keys of its own",
    "device": "trainer.device",
    "dtype": "rollout.dtype",
    "tp_size": "rollout.sglang.server.tp",
    "nnodes": "rollout.sglang.server.nodes",
    "node_rank": "rollout.sglang.server.nodes",
    "dist_init_addr": "nothing: the nodes of each start meet at free ports of the first one",
    "max_total_tokens": "rollout.sglang.server.max_total_tokens",
    "mem_fraction_static": "rollout.sglang.server.mem_fraction",
    "base_gpu_id": "rollout.sglang.placement",
    "enable_memory_saver": "rollout.sglang.placement",
    "enable_deterministic_inference": "trainer.deterministic",
    "enable_return_routed_experts": "rollout.sglang.return_routing",
    "enable_fp32_lm_head": "model.fp32_head",
    "random_seed": "trainer.seed",
    "skip_tokenizer_init": "nothing: tokens travel as ids",
    "skip_server_warmup": "nothing: a start ends with a real generation",
    "sleep_on_idle": "nothing: it is set on CPUs",
}
_ONE_COPY = "weights are sent to each tensor-parallel rank"
_UNQUANTISED = "weights are sent unquantised"
_DRAFT = "the draft model would keep its old weights"
_ADAPTERS = "the policy's whole weights are sent, not adapters"
_FOREIGN_CODE = "code of a checkpoint or package would run with the servers' rights"
# Argument -> reason why it cannot work here.
REFUSED = {
    "gpu_id_step": "servers have the devices of their host one after the other",
    "pp_size": _ONE_COPY,
    "load_balance_method": "requests are routed by the trainer",
    "quantization": _UNQUANTISED,
    "quantization_param_path": _UNQUANTISED,
    "rl_quant_profile": _UNQUANTISED,
    "modelopt_quant": _UNQUANTISED,
    "quantize_and_serve": _UNQUANTISED,
    "enable_lora": _ADAPTERS,
    "lora_paths": _ADAPTERS,
    "is_embedding": "it has to generate",
    "disaggregation_mode": "prefill and decode of one response would be on servers with different weights",
    "weight_version": "each update stamps its own",
    "weight_cache_mode": "cached weights would be those of another server",
    "trust_remote_code": _FOREIGN_CODE,
    "custom_weight_loader": _FOREIGN_CODE,
    "enable_custom_logit_processor": _FOREIGN_CODE,
    "config": "write its entries here",
}
_REFUSED_PREFIXES = {
    "speculative_": _DRAFT,
    "lora_": _ADAPTERS,
    "ssl_": "requests are plain HTTP",
    "disaggregation_": "",
}


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
    if sglang.sync.transport == "shared_memory" and sglang.placement == "separate":
        yield (
            f"{given} with rollout.sglang.sync.transport=shared_memory: the ranks of a server on several hosts share "
            "no memory with one sender; legal: auto, distributed, disk"
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
        yield f"rollout.sglang.server.max_total_tokens={own.max_total_tokens} cannot hold {needs}"
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
    if name in REFUSED:
        return REFUSED[name]
    reasons = (reason for prefix, reason in _REFUSED_PREFIXES.items() if name.startswith(prefix))
    return next((reason or REFUSED["disaggregation_mode"] for reason in reasons), None)


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
