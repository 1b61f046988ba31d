"""Settings of the engines that run the models: Megatron-Core, or Hugging Face's models under PyTorch FSDP2."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mega_rl.config.setting import Kind, by_name, setting, tagged


class DataParallelConfig(Kind):
    """A data parallelism of Megatron-Core; the values here are those of kinds without such a setting."""

    fsdp_sharding: str = "optim_grads_params"
    bucket_size: int = 0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    reduce_scatter_fp32_accumulation: bool = False
    average_in_collective: bool = False
    optimizer_instances: int = 1


_REDUCE_IN_FP32 = "Accumulate and reduce gradients in FP32 whatever the model's dtype."


@dataclass(frozen=True)
class _OfMegatron(DataParallelConfig):
    overlap_grad_reduce: bool = setting(False, "Overlap gradient reduction with the backward.")
    overlap_param_gather: bool = setting(False, "Overlap the gathering of updated parameters with the forward.")
    grad_reduce_in_fp32: bool = setting(True, _REDUCE_IN_FP32)
    optimizer_instances: int = setting(
        1, "Copies of the sharded optimizer state over data parallel (hybrid sharding).", unit="copies", min=1
    )


@dataclass(frozen=True)
class DdpConfig(_OfMegatron):
    """Megatron-Core's DistributedDataParallel: every rank has whole gradients of its part of the model."""

    name = "ddp"

    bucket_size: int = setting(
        0,
        "Parameters of a bucket with overlapped reduction; 0: 1 million per data-parallel rank, at least 40 million.",
        unit="parameters",
        min=0,
    )
    reduce_scatter_fp32_accumulation: bool = setting(False, "Send bf16 gradients and add them in FP32.")
    average_in_collective: bool = setting(
        False, "Let the collective average instead of adding; losses are scaled to match."
    )


@dataclass(frozen=True)
class MegatronFsdpConfig(_OfMegatron):
    """Megatron FSDP: optimizer state, gradients and parameters are sharded."""

    name = "megatron_fsdp"

    fsdp_sharding: str = setting(
        "optim_grads_params",
        "What is sharded: optimizer state, and gradients, and parameters.",
        choices=("optim", "optim_grads", "optim_grads_params"),
    )


@dataclass(frozen=True)
class TorchFsdpConfig(DataParallelConfig):
    """PyTorch's FSDP2 around Megatron-Core's modules."""

    name = "torch_fsdp2"

    grad_reduce_in_fp32: bool = setting(True, _REDUCE_IN_FP32)


@dataclass(frozen=True)
class MoeConfig:
    """Mixtures of experts in training."""

    dispatcher: str = setting(
        "alltoall",
        "How tokens reach experts: sent (alltoall, or deepep by package deep_ep), or gathered.",
        choices=("alltoall", "allgather", "deepep"),
    )
    shared_expert_overlap: bool = setting(False, "Compute shared experts on another stream while tokens travel.")
    aux_loss_coef: float = setting(0.0, "Weight of the load-balancing loss; 0 leaves it out.", min=0.0)
    expert_bias_update_rate: float = setting(0.0, "Step of the router's bias against the load; 0 freezes it.", min=0.0)
    routing_replay: bool = setting(False, "Route tokens in updates as the pass for their old log-probs did.")


@dataclass(frozen=True)
class MegatronOptimizerConfig:
    """Place and type of optimizer state; `optim` has Adam's settings."""

    distributed: bool = setting(True, "Shard optimizer state and FP32 main parameters over data parallel.")
    cpu_offload: float = setting(0.0, "Share of the optimizer state that steps in host memory.", min=0.0, max=1.0)
    precision_aware: bool = setting(False, "Transformer Engine's Adam with moments of moment_dtype, bf16 remainders.")
    moment_dtype: str = setting("fp32", "Type of Adam's moments (precision_aware only).", choices=("fp32", "bf16"))


@dataclass(frozen=True)
class ReferenceLayoutConfig:
    """Another layout for the reference over the same ranks; 0 takes the actor's size.

    The rest of the world is data parallelism. With tp above 1 it shards layer-norm activations, too.
    """

    tp: int = setting(0, "Tensor-parallel size of the reference.", unit="ranks", min=0)
    pp: int = setting(0, "Pipeline-parallel size of the reference.", unit="ranks", min=0)
    pipeline: str = setting("", "Layers of each stage, as engine.megatron.pipeline; empty splits evenly.")
    cp: int = setting(0, "Context-parallel size of the reference.", unit="ranks", min=0)
    ep: int = setting(0, "Expert-parallel size of the reference.", unit="ranks", min=0)
    etp: int = setting(0, "Tensor-parallel size of each expert of the reference.", unit="ranks", min=0)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that are given, by name."""
        given = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "etp")}
        return {name: size for name, size in given.items() if size}


@dataclass(frozen=True)
class MegatronConfig:
    """Megatron-Core: how one replica is cut (data parallelism takes the other ranks), and its layers."""

    tp: int = setting(1, "Tensor-parallel size.", unit="ranks", min=1)
    sequence_parallel: bool = setting(False, "Shard layer-norm activations over the tensor-parallel group.")
    pp: int = setting(1, "Pipeline-parallel size.", unit="ranks", min=1)
    vpp: int = setting(1, "Model chunks per pipeline rank (interleaved schedule when above 1).", unit="chunks", min=1)
    pipeline: str = setting("", "Layers of each stage, as Ett|ttt|ttL (E embedding, L loss); empty: even.")
    cp: int = setting(1, "Context-parallel size: ranks that share every sequence.", unit="ranks", min=1)
    ep: int = setting(1, "Expert-parallel size: ranks that share the experts of a layer.", unit="ranks", min=1)
    etp: int = setting(0, "Tensor-parallel size of each expert; 0 takes tp.", unit="ranks", min=0)
    transformer_impl: str = setting(
        "auto",
        "Layer implementation; auto takes Transformer Engine if it is installed.",
        choices=("auto", "transformer_engine", "local"),
    )
    ddp: DataParallelConfig = tagged(
        by_name(DdpConfig, MegatronFsdpConfig, TorchFsdpConfig),
        "ddp",
        "Data parallelism: who holds what, and how gradients are added up.",
    )
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    optimizer: MegatronOptimizerConfig = dataclasses.field(default_factory=MegatronOptimizerConfig)
    reference: ReferenceLayoutConfig = dataclasses.field(default_factory=ReferenceLayoutConfig)

    @property
    def of_reference(self) -> MegatronConfig:
        """Return the settings that cut the reference: these, unless it has a separate layout."""
        own = self.reference.sizes
        if not own:
            return self
        new_stages = "pp" in own  # else the stages are the actor's
        return dataclasses.replace(
            self,
            tp=own.get("tp", self.tp),
            sequence_parallel=own.get("tp", self.tp) > 1,
            pp=own.get("pp", self.pp),
            vpp=1 if new_stages else self.vpp,
            pipeline=self.reference.pipeline if new_stages else self.pipeline,
            cp=own.get("cp", self.cp),
            ep=own.get("ep", self.ep),
            etp=own.get("etp", self.etp),
        )


@dataclass(frozen=True)
class FsdpConfig:
    """PyTorch FSDP2: who holds what, and when it travels."""

    shard_ranks: int = setting(
        0, "Ranks that share a copy of weights and optimizer state; 0: all.", unit="ranks", min=0
    )
    reshard_after_forward: bool = setting(True, "Free a layer's weights between its forward and backward.")
    reduce_every_microbatch: bool = setting(True, "Reduce gradients after every micro-batch, else once per update.")
    grad_reduce_in_fp32: bool = setting(True, _REDUCE_IN_FP32)
    cpu_offload: bool = setting(False, "Keep weights, gradients and optimizer state in host memory; Adam steps there.")


@dataclass(frozen=True)
class EngineConfig:
    """The engine of a run; of its sections only that of `engine.backend` is read."""

    backend: str = setting(
        "megatron",
        "Megatron-Core (tensor, pipeline, context, expert parallelism), or Hugging Face's models under PyTorch FSDP2.",
        choices=("megatron", "fsdp"),
    )
    resident_roles: str = setting(
        "auto",
        "Models on the device while the trainer works: of all roles, or only of the role at work (one). auto takes "
        "one if servers share the devices.",
        choices=("auto", "all", "one"),
    )
    megatron: MegatronConfig = dataclasses.field(default_factory=MegatronConfig)
    fsdp: FsdpConfig = dataclasses.field(default_factory=FsdpConfig)

    @property
    def of_reference(self) -> EngineConfig:
        """Return the settings that cut the reference: these, unless it has a separate layout."""
        return dataclasses.replace(self, megatron=self.megatron.of_reference)
