"""Rules of `rollout.sglang.server.args`: arguments of SGLang that a run may pass through to the servers it starts."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.facts import divisors, listed
from mega_rl.config.schema import Config

KEY = "rollout.sglang.server.args"
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
    "max_total_tokens": "rollout.sglang.server.max_total_tokens",
    "mem_fraction_static": "rollout.sglang.server.mem_fraction",
    "base_gpu_id": "rollout.sglang.placement",
    "enable_memory_saver": "rollout.sglang.placement",
    "enable_deterministic_inference": "trainer.deterministic",
    "enable_return_routed_experts": "rollout.sglang.return_routing",
    "random_seed": "trainer.seed",
    "skip_tokenizer_init": "nothing: tokens travel as ids",
    "skip_server_warmup": "nothing: a start ends with a real generation",
    "sleep_on_idle": "nothing: it is set on CPUs",
}
_ONE_HOST = "the ranks of a server meet at a file and are processes of one host; start servers on each host instead"
_ONE_COPY = "weights are sent to each tensor-parallel rank"
_UNQUANTISED = "weights are sent unquantised"
_DRAFT = "the draft model would keep its old weights"
_ADAPTERS = "the policy's whole weights are sent, not adapters"
_FOREIGN_CODE = "code of a checkpoint or package would run with the servers' rights"
# Argument -> reason why it cannot work here.
REFUSED = {
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "dist_init_addr": _ONE_HOST,
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
