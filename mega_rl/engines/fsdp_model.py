"""Hugging Face models sharded by PyTorch FSDP2, one layer at a time, and their attention.

Attention is that of the kernels of our core attention, under names that transformers dispatches on. A name that
transformers knows no mask for gets none, so nothing of size [T, T] is made for a packed micro-batch. Rows of padded
ones are right-padded, where causality is enough to keep padding out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from mega_rl.config.schema.engine import FsdpConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.untabled import build_empty
from mega_rl.converters.live.load import model_config
from mega_rl.converters.plan.adapters import PART, WEIGHT, A
from mega_rl.converters.plan.parameters import disk_tensors, hf_tensors
from mega_rl.converters.plan.sharding import Head
from mega_rl.ddp.reduce_scatter import Reduction, Scratch, Works, broadcast_shards, reduce_scatter_fp32
from mega_rl.engines.models.adapters import LinearAdapter
from mega_rl.engines.models.attention import PackedSequences, attend_packed, packed_sequences
from mega_rl.engines.models.attention_kernels import KERNELS
from mega_rl.engines.models.norms import fuse_norms
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.base import send
from mega_rl.parallel.vocab import fp32_linear


class _Memory:
    """Buffer allocation, shared by the all-gather and the reduce-scatter."""

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastAllGather(_Memory):
    """All-gather as one broadcast of each rank's part."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Works | None:
        """Gather each rank's `input_tensor` [n] into `output_tensor` [ranks * n]; return a handle when `async_op`."""
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        works = broadcast_shards(parts, group=group)
        if async_op:
            return works
        works.wait()
        return None


class Fp32ReduceScatter(_Memory):
    """Reduce-scatter that adds messages of any dtype in FP32 and rank order."""

    def __init__(self, largest: int) -> None:
        """largest: bytes of the largest input."""
        self.scratch = Scratch(largest)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Reduction | None:
        """Write this rank's part of the sum of all `input_tensor` [ranks * n] to `output_tensor` [n]."""
        assert op == dist.ReduceOp.SUM, op
        reduction = reduce_scatter_fp32(output_tensor, input_tensor, group=group, scratch=self.scratch)
        if async_op:
            return reduction
        reduction.wait()
        return None


def use_host_collectives(modules: Iterable[FSDPModule], group: ProcessGroup, *, largest: int) -> Scratch | None:
    """Use these collectives on gloo; return the memory of pending messages, else None.

    largest: bytes of the gradients of the largest module.
    """
    if dist.get_backend(group) != "gloo":
        return None
    gather, scatter = BroadcastAllGather(), Fp32ReduceScatter(largest)
    for module in modules:
        module.set_custom_all_gather(cast(Any, gather))  # their base classes are private
        module.set_custom_reduce_scatter(cast(Any, scatter))
    return scatter.scratch


class TokenClassifier(nn.Module):
    """Backbone with one number per token: transformers' token classification of one label.

    The head `score` has no bias, so that a critic or reward model has the same parameters in every engine, is float32
    in a bf16 model too, and starts at zero: a fresh critic predicts 0 everywhere.
    """

    HEAD = "score.weight"

    def __init__(self, model: PreTrainedModel, hidden_size: int) -> None:
        super().__init__()
        self.body = model.base_model_prefix  # names on disk begin with it: "model"
        self.add_module(self.body, model)
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return [b, S, 1] float32 of tokens [b, S] int64."""
        return self.score(self.get_submodule(self.body)(tokens, **arguments).last_hidden_state)


def add_adapters(model: nn.Module, hf: HFConfig, *, head: Head) -> None:
    """Give targeted linear layers an adapter each; only adapters and a value head then train.

    Raises UserError: a target is no linear layer in transformers.
    """
    assert hf.adapter is not None
    left = {name.removesuffix(A) for name in hf_tensors(hf, head=head) if name.endswith(A)}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in hf.adapter.targets:
            with torch.device("meta"):
                module.adapter = LinearAdapter(module, hf.adapter)
            disk = disk_tensors(hf.family, f"{name}.weight", tuple(module.weight.shape), hf.own)
            left -= {tensor.name.removesuffix(WEIGHT) for tensor in disk}
    if left:
        raise UserError(
            f"model.adapter.targets: {min(left)} and {len(left) - 1} more are not linear layers of transformers' "
            "class, as experts in one tensor; leave them out, or set engine.backend=megatron"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(PART in name or name == TokenClassifier.HEAD)


def skeleton(path: Path, *, head: Head, attention: str) -> tuple[nn.Module, PreTrainedModel]:
    """Return (model of a checkpoint's config.json with its head, transformers' part of it), without memory, float32.

    Raises UserError: transformers does not know the model.
    """
    config = model_config(path)
    causal = build_empty(config, attention=attention_name(attention))
    fuse_norms(causal)
    model: PreTrainedModel = causal if head == "lm" else cast(PreTrainedModel, causal.base_model)
    with no_init_weights(), torch.device("meta"):
        whole = TokenClassifier(model, config.hidden_size) if head == "value" else model
    # It would keep the row of the padding token from training, in rows where that token is one like any other.
    cast(nn.Embedding, model.get_input_embeddings()).padding_idx = None
    return whole.eval(), model


def shard(
    model: nn.Module,
    hf: PreTrainedModel,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    settings: FsdpConfig,
    recompute: bool,
) -> Scratch | None:
    """Give the parameters memory, unset and float32, of which every rank of `mesh` keeps its rows.

    Each of `units` is gathered, cast to `dtype`, just before it runs and freed after it. Only one unit is in memory
    whole at a time, here too. Gradients are sums over the mesh, float32 in a shard and, unless `grad_reduce_in_fp32` is
    off, while they travel. `recompute`: layers keep nothing but their inputs for the backward. Returns the memory that
    messages arrive in, where that is ours.
    """
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    largest = 0
    for unit in [*units(model, hf), model]:
        kind = torch.float32 if isinstance(model, TokenClassifier) and unit is model.score else dtype
        _materialise(unit, hf, device)
        if unit is model:
            hf.tie_weights()
        whole = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        largest = max(largest, sum(parameter.nbytes for parameter in whole))
        sharded = fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=settings.reshard_after_forward and unit is not model,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=kind, reduce_dtype=torch.float32 if settings.grad_reduce_in_fp32 else kind
            ),
            offload_policy=offload,
        )
        # Without the explicit sum, a factor of 1 would be sent as an operation that only NCCL knows.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    if _unset_buffers(hf):
        with torch.no_grad():
            hf._init_weights(hf.base_model)  # Falcon-H1's body sets buffers of its layers; weights are read later
    if unset := _unset_buffers(hf):
        raise UserError(
            f"model_type={hf.config.model_type}: the buffer {unset[0]} is set from outside its module, which "
            "engine.backend=fsdp cannot repeat; take another model"
        )
    if recompute:
        for layer in layers(hf):
            # Inside FSDP's hooks: what the backward gathers once serves the second forward and the backward.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return use_host_collectives(fsdp_modules(model), mesh.get_group(mesh.ndim - 1), largest=largest)


def _unset_buffers(hf: PreTrainedModel) -> list[str]:
    """Return the buffers outside checkpoints that hold no number yet."""
    kept = hf.state_dict(keep_vars=True)
    bare = ((name, buffer) for name, buffer in hf.named_buffers() if name not in kept and buffer.is_floating_point())
    return [name for name, buffer in bare if bool(buffer.isnan().any())]


def use_fp32_head(hf: PreTrainedModel) -> None:
    """Make the head of a bf16 model, tied or not, return float32 logits: `model.fp32_head`.

    Inside FSDP's hooks, which give it the whole weight in bf16.
    """
    head = hf.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        logits = fp32_linear(hidden, head.weight)
        return logits if head.bias is None else logits + head.bias

    head.forward = forward


@contextmanager
def hidden_outputs(hf: PreTrainedModel) -> Iterator[None]:
    """Let the model return the last hidden states in the place of logits."""
    head = hf.get_output_embeddings()
    own = head.__dict__.get("forward")
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def units(model: nn.Module, hf: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: layers, and untied embedding and head."""
    decoder = layers(hf)
    owners = Counter(id(parameter) for layer in decoder for parameter in layer.parameters())
    if owners and max(owners.values()) > 1:
        raise UserError(f"model_type={hf.config.model_type}: its layers share weights, which FSDP2 cannot cut")
    if isinstance(model, TokenClassifier):
        return [*decoder, hf.get_input_embeddings(), model.score]
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if head is None:
        return decoder
    # Both ends read the root's parameters, which stay gathered from the forward to the end of the backward.
    return decoder if head.weight is embedding.weight else [*decoder, embedding, head]


def layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that the model's class keeps whole, else its longest list."""
    named = list(_outermost(hf, set(hf._no_split_modules or ())))
    lists = [list(module) for module in hf.modules() if isinstance(module, nn.ModuleList)]
    return named or max(lists, key=len, default=[])


def _outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in classes:
            yield child
        else:
            yield from _outermost(child, classes)


def _materialise(unit: nn.Module, hf: PreTrainedModel, device: torch.device) -> None:
    """Allocate a unit's tensors on the meta device: parameters unset, buffers outside checkpoints computed."""
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                memory = torch.empty_like(parameter, device=device)
                module._parameters[name] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
        bare = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in bare:
            memory = torch.empty_like(module._buffers[name], device=device)  # type: ignore[arg-type]
            module._buffers[name] = memory.fill_(math.nan) if memory.is_floating_point() else memory
        if set(bare) & module._non_persistent_buffers_set:
            with torch.no_grad():
                hf._init_weights(module)  # transformers' own way: its from_pretrained builds on the meta device, too


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Return the units and the root."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """Return every parameter by transformers' name, a tied one once; rows are cut as `torch.chunk` does.

    What a forward without a backward has left gathered is freed first.
    """
    for module in fsdp_modules(model):
        module.reshard()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), name
    return parameters  # type: ignore[return-value]


# What attention modules hand on that says nothing of the result.
_WITHOUT_EFFECT = ("position_ids", "cache_position", "use_cache")


# transformers' own functions, for models that ours do not compute: they see sequences by positions and masks.
TRANSFORMERS = {"transformers: sdpa": "sdpa", "transformers: eager": "eager"}


def attention_name(choice: str) -> str:
    """Return the `attn_implementation` that a model needs to run `choice`, as "eager".

    Raises KeyError: not one that Hugging Face's models run.
    """
    # transformers refuses a name with "sdpa" for models with sinks.
    own = {"eager": "mega_rl_eager", "sdpa": "mega_rl_fused"}
    return {**own, "flash_attention_2": "flash_attention_2", **TRANSFORMERS}[choice]


def attention_arguments(
    choice: str, cu_seqlens: Tensor | None, max_seqlen: int, *, device: torch.device, lengths: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the arguments that a model with attention `choice` needs in each forward besides its tokens.

    cu_seqlens: [n+1] int32 on the host, where packed sequences begin, from 0 to T; None if padded.
    max_seqlen: tokens of the longest sequence. device: of the model. lengths: of padded rows.
    """
    if choice in TRANSFORMERS:
        if cu_seqlens is not None:
            return {}  # positions begin at 0 in each sequence
        ends = torch.tensor(lengths or [max_seqlen])
        return {"attention_mask": send((torch.arange(max_seqlen) < ends[:, None]).long(), device)}
    if choice != "flash_attention_2":
        packed = None if cu_seqlens is None else packed_sequences(cu_seqlens, max_seqlen, device=device)
        return {"sequences": packed}
    arguments: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if cu_seqlens is not None:
        bounds = send(cu_seqlens, device)
        arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        arguments |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
    return arguments


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: str,
    sequences: PackedSequences | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return (context [b, S, heads, E], None) of query [b, heads, S, D].

    key: [b, groups, S, D]. value: [b, groups, S, E]. Sinks [heads] are called `s_aux`.

    What transformers calls for an attention `module`. `sequences` comes from `attention_arguments` through the model's
    forward and has no default: a model that lost it on the way would let packed sequences see each other.

    Raises RunError: the module asks for something that changes the result and is not computed here.
    """
    # Qwen2-MoE leaves its windows to the mask; EXAONE 4 says None in layers without one.
    window = others.pop("sliding_window", getattr(module, "sliding_window", None))
    sinks = others.pop("s_aux", None)
    asked = {
        "attention_mask": attention_mask is not None,
        "dropout": dropout != 0.0,
        "is_causal=False": not (module.is_causal if is_causal is None else is_causal),
        **{name: value is not None and value is not False for name, value in others.items()},
    }
    unknown = [name for name, is_asked in asked.items() if is_asked and name not in _WITHOUT_EFFECT]
    if unknown:
        raise RunError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which attn_implementation={kernel} "
            "of engine.backend=fsdp does not compute; use engine.backend=megatron"
        )
    scale = 1.0 / math.sqrt(query.size(-1)) if scaling is None else scaling
    if sequences is None:
        return KERNELS[kernel](query, key, value, scale=scale, window=window, sinks=sinks).transpose(1, 2), None
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attend = partial(attend_packed, KERNELS[kernel], scale=scale, window=window, sinks=sinks)
    return attend(query, key, value, sequences).unsqueeze(0), None


for _kernel in KERNELS:
    AttentionInterface.register(attention_name(_kernel), partial(_attention, kernel=_kernel))
