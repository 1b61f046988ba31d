"""Adam over Megatron-Core's distributed optimizer, and the learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule

from mega_rl.config.schema import OptimConfig
from mega_rl.ddp.host_adam import HostAdamW
from mega_rl.errors import UserErrors


def build_optimizer(
    chunks: Sequence[MegatronModule],
    *,
    optim: OptimConfig,
    bf16: bool,
    collection: ProcessGroupCollection,
    implementation: str = "ddp",
) -> MegatronOptimizer:
    """Megatron-Core's optimizer of these chunks; FP32 main parameters, clipping by the true global norm.

    Weight decay is decoupled (AdamW) and spares tensors of one dimension: norms and biases. `implementation` is
    `ddp.implementation`: under FSDP the optimizer state is sharded by nature, and parameters of torch_fsdp2 are the
    FP32 main parameters themselves.

    Raises:
        UserErrors: combinations of settings, and a missing package.
    """
    _check(optim, implementation)
    fsdp2 = implementation == "torch_fsdp2"
    moments = torch.bfloat16 if optim.moment_dtype == "bf16" else torch.float32
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=bf16 and not fsdp2,
        use_distributed_optimizer=implementation == "megatron_fsdp" or (optim.distributed_optimizer and not fsdp2),
        use_precision_aware_optimizer=optim.precision_aware,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False, pg_collection=collection)
    if optim.cpu_offload > 0.0:
        for part in _parts(optimizer):
            if part.optimizer is not None:
                part.optimizer = HostAdamW(part.optimizer.param_groups, share=optim.cpu_offload)
    for torch_optimizer in torch_optimizers(optimizer):
        if not any(group["params"] for group in torch_optimizer.param_groups):
            _count_steps(torch_optimizer)
    apply_settings(optimizer)
    return optimizer


def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without parameters, of a frozen pipeline stage, know how many steps the others have made.

    The number of steps that goes into a checkpoint is that of the first rank, whatever it trains; and without a
    single number Megatron-Core (0.16.1, `DistributedOptimizer.state_dict`) fails where Transformer Engine is missing.
    """
    nothing: Any = "no parameter"  # torch saves and loads keys that are no tensors as they are
    optimizer.state[nothing] = {"step": torch.tensor(0.0)}

    def count(finished: torch.optim.Optimizer, *_: Any) -> None:
        finished.state[nothing]["step"] += 1

    optimizer.register_step_post_hook(count)


def _check(optim: OptimConfig, implementation: str) -> None:
    """Refuse what the optimizers here cannot do."""
    problems = []
    if optim.precision_aware and importlib.util.find_spec("transformer_engine") is None:
        problems.append(
            "optim.precision_aware=true: needs Transformer Engine's FusedAdam, which is not installed; pip install "
            "mega_rl[gpu] or set optim.precision_aware=false"
        )
    if optim.precision_aware and not optim.distributed_optimizer:
        problems.append("optim.precision_aware=true needs optim.distributed_optimizer=true")
    for name, value in (("cpu_offload", optim.cpu_offload), ("precision_aware", optim.precision_aware)):
        if value and implementation != "ddp":
            problems.append(f"optim.{name}={str(value).lower()} needs ddp.implementation=ddp, not {implementation}")
    if optim.precision_aware and optim.cpu_offload:
        problems.append(
            f"optim.cpu_offload={optim.cpu_offload} with optim.precision_aware=true: the host's Adam has FP32 "
            "moments; use one of the two"
        )
    if problems:
        raise UserErrors(problems)


def apply_settings(optimizer: MegatronOptimizer) -> None:
    """Write the optimizer's config into its parameter groups; a loaded checkpoint has put its own there."""
    config = optimizer.config
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            # Megatron-Core only marks what is spared; its scheduler, which turns marks into numbers, is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (config.adam_beta1, config.adam_beta2), config.adam_eps
            if isinstance(torch_optimizer, torch.optim.AdamW):
                # Without TE or apex Megatron-Core falls back to torch's AdamW, whose default per-tensor path is an
                # order of magnitude slower on CPU than its fused one.
                group["fused"], group["foreach"] = True, False


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron-Core's wrappers (none on a rank without trainable parameters)."""
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]


def clip(optimizer: MegatronOptimizer, *, norm: float) -> None:
    """Scale all gradients, whose global norm is `norm`, down to the norm `clip_grad`; 0 leaves them as they are."""
    config = optimizer.config
    parameters = [parameter for part in _parts(optimizer) for parameter in part.get_parameters()]
    if config.clip_grad > 0.0 and parameters:
        decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        clip_grad_by_total_norm_fp32(
            parameters, max_norm=config.clip_grad, total_norm=norm, use_decoupled_grad=decoupled
        )


def step(optimizer: MegatronOptimizer, chunks: Sequence[Any]) -> None:
    """Update the weights by gradients that are prepared and clipped; collective over data parallel.

    As the optimizer's own `step_with_ready_grads`, of which a mixture under expert parallelism has two, for experts and
    for the rest: each of them would gather the parameters of both.
    """
    parts = _parts(optimizer)
    if len(parts) == 1 or not all(isinstance(part, DistributedOptimizer) for part in parts):
        optimizer.step_with_ready_grads()
        return
    for part in parts:
        super(DistributedOptimizer, part).step_with_ready_grads()
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """What a chain links, one for experts on expert-parallel ranks and one for the rest; or the one that there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def separate_step_counters(optimizer: MegatronOptimizer) -> None:
    """Give every parameter a step counter of its own, after a load.

    Where Transformer Engine and apex are missing, Megatron-Core (0.16.1, `DistributedOptimizer.load_state_dict`) loads
    one tensor as the counter of all parameters, and torch's Adam then adds one to it for each of them.
    """
    for torch_optimizer in torch_optimizers(optimizer):
        for state in torch_optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def learning_rate(step: int, *, peak: float, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of trainer step `step` (from 0): linear warm-up, then constant, linear or cosine decay.

    Decay runs from the end of warm-up to `total_steps` and ends at `peak * min_lr_ratio`.
    """
    if step < optim.warmup_steps:
        return peak * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return peak
    progress = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)
