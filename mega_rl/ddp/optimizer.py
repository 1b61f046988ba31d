"""Adam over Megatron-Core's distributed optimizer, and the learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from torch import Tensor

from mega_rl.config.schema import MegatronOptimizerConfig, OptimConfig
from mega_rl.ddp.access import local
from mega_rl.ddp.host_adam import HOST, HostAdamW
from mega_rl.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")  # Muon's matrices have only the first


def build_optimizer(
    chunks: Sequence[MegatronModule],
    *,
    optim: OptimConfig,
    placement: MegatronOptimizerConfig,
    bf16: bool,
    collection: ProcessGroupCollection,
    implementation: str = "ddp",
) -> MegatronOptimizer:
    """Build Megatron-Core's optimizer of these chunks: FP32 main parameters, clipping by the true global norm.

    Weight decay is decoupled (AdamW) and spares tensors of one dimension: norms and biases. `placement` is
    `engine.megatron.optimizer`, `implementation` is `engine.megatron.ddp.name`: under FSDP the optimizer
    state is sharded by nature, and parameters of torch_fsdp2 are the FP32 main parameters themselves.

    Raises UserError: a missing package.
    """
    if placement.precision_aware and importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "engine.megatron.optimizer.precision_aware=true: needs Transformer Engine's FusedAdam, which is not "
            "installed; pip install mega_rl[gpu] or set engine.megatron.optimizer.precision_aware=false"
        )
    fsdp2 = implementation == "torch_fsdp2"
    moments = torch.bfloat16 if placement.moment_dtype == "bf16" else torch.float32
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        bf16=bf16 and not fsdp2,
        use_distributed_optimizer=implementation == "megatron_fsdp" or (placement.distributed and not fsdp2),
        use_precision_aware_optimizer=placement.precision_aware,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False, pg_collection=collection)
    if placement.cpu_offload > 0.0:
        for part in parts(optimizer):
            if part.optimizer is not None:
                part.optimizer = HostAdamW(part.optimizer.param_groups, share=placement.cpu_offload)
    apply_settings(optimizer, optim)
    return optimizer


def apply_settings(optimizer: MegatronOptimizer, optim: OptimConfig) -> None:
    """Let later steps follow these settings; the learning rate comes with each step."""
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            # Megatron-Core only marks what is spared; its scheduler, which turns marks into numbers, is not used here.
            group["weight_decay"] = optim.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (optim.beta1, optim.beta2), optim.eps
            if isinstance(torch_optimizer, torch.optim.AdamW):
                # Without TE or apex Megatron-Core falls back to torch's AdamW, whose default per-tensor path is an
                # order of magnitude slower on CPU than its fused one.
                group["fused"], group["foreach"] = True, False


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron-Core's wrappers (none on a rank without trainable parameters)."""
    return [part.optimizer for part in parts(optimizer) if part.optimizer is not None]


def clip(optimizer: MegatronOptimizer, *, norm: float, limit: float) -> None:
    """Scale gradients of global norm `norm` down to `limit`; 0 leaves them as they are."""
    parameters = [parameter for part in parts(optimizer) for parameter in part.get_parameters()]
    if limit > 0.0 and parameters:
        decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm, use_decoupled_grad=decoupled)


def step(optimizer: MegatronOptimizer, chunks: Sequence[Any]) -> None:
    """Update the weights by gradients that are prepared and clipped; collective over data parallel.

    As the optimizer's own `step_with_ready_grads`, of which a mixture under expert parallelism has two, for experts and
    for the rest: each of them would gather the parameters of both.
    """
    linked = parts(optimizer)
    if len(linked) == 1 or not all(isinstance(part, DistributedOptimizer) for part in linked):
        optimizer.step_with_ready_grads()
        return
    for part in linked:
        super(DistributedOptimizer, part).step_with_ready_grads()
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


class Trained(NamedTuple):
    """This rank's optimizer state for a parameter's elements from `first` on, in row-major order."""

    parameter: Tensor  # the model's; under FSDP the shard that the optimizer steps
    first: int
    main: Tensor | None  # float32 (int16 where the rest of its bits is in a bf16 parameter); None: the parameter itself
    state: dict[str, Tensor]  # torch's optimizer's: "exp_avg", "exp_avg_sq", shaped like `main`


def trained_parameters(optimizer: MegatronOptimizer) -> Iterator[Trained]:
    """Yield every parameter that this rank's optimizer trains, with its state; call `create_state` first."""
    for part in parts(optimizer):
        if part.optimizer is None:
            continue  # nothing trains on this rank
        for parameter, first, stepped in stepped_parameters(part):
            state = part.optimizer.state[stepped]
            main = stepped if stepped.dtype != parameter.dtype else state.get("master_param")
            yield Trained(parameter, first, None if parameter.dtype == torch.float32 else main, state)


def stepped_parameters(part: MegatronOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield (model parameter, its first element, the tensor that torch's optimizer steps)."""
    if isinstance(part, DistributedOptimizer) and not part.ddp_config.use_megatron_fsdp:
        # Pairs of lists: its map of indices (0.16.1) is wrong for a group that has FP32 parameters too.
        remainders = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        shards = part.shard_float16_groups if remainders else part.shard_fp32_from_float16_groups
        pairs = [*zip(part.model_float16_groups, shards, strict=True)]
        pairs += zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
        for parameters, stepped in pairs:
            for parameter, shard in zip(parameters, stepped, strict=True):
                yield parameter, part._get_model_param_range_map(parameter)["param"].start, shard
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [*zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)]
        pairs += zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True)
        for parameters, stepped in pairs:
            yield from ((parameter, 0, main) for parameter, main in zip(parameters, stepped, strict=True))
    else:
        yield from ((parameter, 0, parameter) for group in part.optimizer.param_groups for parameter in group["params"])


def create_state(optimizer: MegatronOptimizer) -> None:
    """Create missing state of torch's optimizers, zeros as in their first step."""
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            for parameter in (each for each in group["params"] if not torch_optimizer.state[each]):
                _create_state_of(parameter, torch_optimizer, group)


def _create_state_of(parameter: Tensor, optimizer: Any, group: dict[str, Any]) -> None:
    if hasattr(optimizer, "initialize_state"):  # Transformer Engine's FusedAdam, which counts steps in the group
        remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, remainders)
        return
    state = optimizer.state[parameter]
    on_host = isinstance(optimizer, HostAdamW) and optimizer.home(parameter) == HOST
    if isinstance(optimizer, torch.optim.Adam):
        on_device = not on_host and (group["fused"] or group["capturable"])
        state["step"] = torch.zeros((), device=parameter.device if on_device else HOST)
    for name in MOMENTS:
        state[name] = torch.zeros_like(parameter, requires_grad=False, device=HOST if on_host else None)


def count_steps(optimizer: MegatronOptimizer) -> int | None:
    """Return the number of steps of this rank's optimizers; None if it trains nothing."""
    counts = set()
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            # Megatron FSDP does not step what it leaves a rank no element of.
            states = [torch_optimizer.state[each] for each in group["params"] if local(each).numel()]
            counts |= {int(state["step"] if "step" in state else group.get("step", 0)) for state in states}
    assert len(counts) <= 1, f"parameters have made different numbers of steps: {sorted(counts)}"
    return counts.pop() if counts else None


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Set the step counter of every parameter, or group if the optimizer counts per group."""
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            states = [torch_optimizer.state[parameter] for parameter in group["params"]]
            counters = [state for state in states if "step" in state]
            for state in counters:
                state["step"] = torch.full_like(state["step"], steps)
            if len(counters) < len(states):
                group["step"] = steps


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return a chain's optimizers, of expert-parallel experts and of the rest, or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def learning_rate(step: int, *, peak: float, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up, then constant, linear or cosine decay.

    The peak is the rate of the last step of warm-up, or of the first step where there is none. Decay runs from there to
    the last step, `total_steps - 1`, whose rate is `peak * min_lr_ratio`; a single step has the peak.
    """
    if step < optim.warmup_steps:
        return peak * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return peak
    at_peak = max(optim.warmup_steps - 1, 0)
    progress = min(1.0, (step - at_peak) / max(1, total_steps - 1 - at_peak))
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)
