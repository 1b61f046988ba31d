"""Building the Megatron-Core model of one rank from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from mega_rl.config.schema import MegatronConfig, ModelConfig, MoeConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import release_problems
from mega_rl.converters.live.model_config import (
    extra_config_attributes,
    gpt_model_kwargs,
    transformer_config_kwargs,
    unfused,
)
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.engines.models.adapters import attach
from mega_rl.engines.models.heads import ValueHead
from mega_rl.engines.models.layer import LatentAttention
from mega_rl.engines.models.moe import ExpertRowParallelLinear, use_own_dispatchers
from mega_rl.engines.models.rope import PackedRotary, set_llama3_frequencies
from mega_rl.engines.models.specs import TE, Attention, decoder_spec, mtp_spec
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import ParallelLayout

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FUSED = "fuse_wgrad_accumulation"  # attribute of Transformer Engine's layers
DISPATCHERS = {"alltoall": "alltoall", "allgather": "allgather", "deepep": "flex"}  # our name -> Megatron-Core's


def transformer_config(
    hf: HFConfig,
    *,
    layout: ParallelLayout,
    model: ModelConfig,
    megatron: MegatronConfig,
    deterministic: bool,
    attention: Attention,
    device_overrides: Mapping[str, Any],
) -> TransformerConfig:
    """Return Megatron-Core's config of this model, layout and device.

    `attention` is what `choose_attention` says. Megatron-Core's own setting is only for Transformer Engine: it ends in
    the environment of the process, where every model must find the same.

    `calculate_per_token_loss` gives the schedules and DDP sum semantics: nothing is divided by the number of
    micro-batches or of data-parallel ranks, because every token's loss already carries its global weight. Only
    `engine.megatron.ddp.average_in_collective` needs it off, and the engine then scales the loss up by what is divided.

    Raises UserError: experts or latent attention under tensor parallelism without sequence parallelism, or yarn's
    positions that context parallelism does not divide.
    """
    _check(hf, layout)
    if hf.delta is not None and deterministic and torch.cuda.is_available():
        raise UserError(
            f"trainer.deterministic=true: the kernels of flash-linear-attention, which model_type={hf.family} runs on, "
            "are not known to repeat their bits; set it to false"
        )
    kind = DTYPES[model.dtype]
    kwargs: dict[str, Any] = {
        **transformer_config_kwargs(hf),
        **_parallelism(layout, mtp_layers=_mtp_layers(hf)),
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, in dense models too
        **_mixture(hf, megatron.moe, te=attention.startswith(TE), deterministic=deterministic),
        "pipeline_dtype": kind,
        "params_dtype": kind,
        "bf16": kind is torch.bfloat16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Fuses nothing without dropout and biases, and torch would compile it anew for eight shapes of packed rows.
        "bias_dropout_fusion": False,
        "calculate_per_token_loss": not megatron.ddp.average_in_collective,
        "attention_backend": AttnBackend[attention.removeprefix(TE)] if attention.startswith(TE) else AttnBackend.auto,
        "deterministic_mode": deterministic,
        "perform_initialization": False,  # every parameter is loaded, or set by its own module
        **_recompute(model),
        **device_overrides,
        **unfused(hf),
    }
    if megatron.ddp.name == "torch_fsdp2":
        kwargs["gradient_accumulation_fusion"] = False  # its kernels add into main_grad, which FSDP2 does not have
    config = (MLATransformerConfig if hf.mla is not None else TransformerConfig)(**kwargs)
    for name, value in extra_config_attributes(hf).items():
        setattr(config, name, value)
    if not attention.startswith(TE):
        config.core_attention = attention  # our core attention reads it
    if hf.moe is not None:
        # Not an argument: Megatron-Core's own gathering refuses variable lengths, and ours takes its place.
        config.moe_token_dispatcher_type = DISPATCHERS[megatron.moe.dispatcher]
    return config


def _mixture(hf: HFConfig, moe: MoeConfig, *, te: bool, deterministic: bool) -> dict[str, bool]:
    """Return Megatron-Core's settings of a mixture of experts; `te`: the layers are Transformer Engine's.

    None without experts. The kernel that rearranges tokens is not known to repeat its bits.
    """
    if hf.moe is None:
        return {}
    return {
        "moe_grouped_gemm": True,
        "moe_permute_fusion": te and not deterministic,
        "moe_shared_expert_overlap": moe.shared_expert_overlap and hf.moe.shared_ffn_hidden_size > 0,
    }


def _check(hf: HFConfig, layout: ParallelLayout) -> None:
    """Raise UserError for a layout in which Megatron-Core cannot build or correctly train this model."""
    if problems := list(release_problems(hf.family)):
        raise UserErrors(problems)
    if layout.tp > 1 and not layout.sequence_parallel and (hf.moe or hf.mla or hf.delta):
        # Upstream's gradients would be wrong: those of replicated norms and of experts count some tokens twice.
        raise UserError(
            f"engine.megatron.sequence_parallel=false: model_type={hf.family} with tp={layout.tp} needs it, having "
            "experts, latent attention or gated delta nets; set engine.megatron.sequence_parallel=true"
        )
    yarn = hf.rope.yarn
    if layout.cp > 1 and yarn is not None and yarn.original_max_position_embeddings % (2 * layout.cp):
        # Megatron-Core cuts a table of that many positions whenever it builds the model.
        raise UserError(
            f"engine.megatron.cp={layout.cp}: 2*cp must divide the {yarn.original_max_position_embeddings} positions "
            f"of model_type={hf.family} before its context was extended (yarn); choose a power of 2"
        )


def _parallelism(layout: ParallelLayout, *, mtp_layers: int) -> dict[str, Any]:
    """Return the settings of a layout in Megatron-Core's words."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _pipeline(layout, mtp_layers=mtp_layers),
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        # With pp=2 the interleaved schedule gives wrong gradients without overlap: docs/known_upstream_issues.md.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "batch_p2p_sync": False,  # a wait of the host for each message, against a race in releases of torch before 2
        "variable_seq_lengths": layout.pp > 1,  # set for each pass: micro-batches may have several shapes
    }


def _recompute(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of activation recomputation in Megatron-Core's words."""
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(model.recompute_modules)}
    if model.recompute == "full" and model.recompute_layers:
        layers = model.recompute_layers
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _pipeline(layout: ParallelLayout, *, mtp_layers: int) -> str | None:
    """Return an uneven split in Megatron-Core's notation; None leaves the even one to it."""
    if layout.pipeline is None:
        return None
    return "E" + "|".join("t" * layers for layers in layout.pipeline) + "m" * mtp_layers + "L"


def _mtp_layers(hf: HFConfig) -> int:
    return hf.mtp_layers if hf.mtp == "load" else 0


def build_chunks(
    hf: HFConfig,
    *,
    config: TransformerConfig,
    groups: Groups,
    head: Head,
    impl: Spec,
    padded_vocab: int,
    device: torch.device,
    experts_apart: bool = False,
) -> list[GPTModel]:
    """Return this rank's model chunks (one per virtual pipeline stage), uninitialised, on `device`.

    `head` is "lm" (vocabulary projection, sharded over TP) or "value" (one scalar per token, replicated).
    `experts_apart`: see `mark_experts`.
    """
    layout, at = groups.layout, groups.coordinates
    chunks = []
    for stage in range(layout.vpp):
        first = at.pp_rank == 0 and stage == 0
        last = at.pp_rank == layout.pp - 1 and stage == layout.vpp - 1
        kwargs = gpt_model_kwargs(hf, padded_vocab)
        if head == "value":
            kwargs["share_embeddings_and_output_weights"] = False
        if last and _mtp_layers(hf):
            kwargs["mtp_block_spec"] = mtp_spec(impl, hf, pg_collection=groups.collection)
        layers = layout.layers_of(at.pp_rank, hf.num_layers, stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec(impl, hf, layers=layers, pg_collection=groups.collection),
            pre_process=first,
            post_process=last,
            parallel_output=True,
            pg_collection=groups.collection,
            vp_stage=stage if layout.vpp > 1 else None,
            **kwargs,
        )
        if head == "value" and last:
            chunk.output_layer = ValueHead(config, groups.collection)
        if hf.embedding_scale != 1.0 and hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_scale(hf.embedding_scale))
        if hf.logit_scale != 1.0 and head == "lm" and last:
            chunk.output_layer.register_forward_pre_hook(_scale_input(hf.logit_scale))
        if hf.rope.kind == "llama3":
            set_llama3_frequencies(chunk, hf)
        order_angles(chunk)
        if hf.adapter is not None:
            plan = build_plan(Sharding(hf, layout, spec=impl, head=head), at, vp_stage=stage)
            attach(chunk, plan, hf=hf, head=head, groups=groups)
        mark_tensor_parallel(chunk)
        unmark_whole_weights(chunk)
        pass_on_padding(chunk)
        mark_experts(chunk, layout, always=experts_apart)
        use_own_dispatchers(chunk, groups.collection)
        chunks.append(chunk.to(device=device))
    return chunks


def order_angles(chunk: GPTModel) -> None:
    """Make the rotary embeddings of a chunk order their angles by the positions of packed tokens."""
    for module in chunk.modules():
        if isinstance(module, LatentAttention):
            module.rotary_pos_emb = PackedRotary(module.rotary_pos_emb, heads_only=True)
    if hasattr(chunk, "rotary_pos_emb"):
        chunk.rotary_pos_emb = PackedRotary(chunk.rotary_pos_emb)


def _scale(factor: float) -> Callable[[torch.nn.Module, Any, Tensor], Tensor]:
    """Return a forward hook that multiplies the output by `factor`, rounded to the output's dtype."""

    def hook(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * torch.tensor(factor, dtype=output.dtype, device=output.device)

    return hook


def _scale_input(factor: float) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a hook that multiplies a module's first argument, and so its logits."""
    return lambda module, inputs: (inputs[0] * factor, *inputs[1:])


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark each sharded weight as such, with the dimension along which it is cut.

    Megatron-Core 0.16 sets these marks only while it initialises a weight, on CPU and GPU alike. Without them the
    gradient norm takes the shards of ranks above 0 for copies and leaves them out: no error, and too weak a clipping.
    Later releases set them always, and are checked.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1, ExpertRowParallelLinear: 1}
    for module in model.modules():
        dim, weight = dims.get(type(module)), getattr(module, "weight", None)
        if dim is None or weight is None:
            continue
        if not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
        marks = (weight.tensor_model_parallel, weight.partition_dim)
        assert marks == (True, dim), f"Megatron-Core marks the weight {marks}, and not as cut along {dim}"


def unmark_whole_weights(model: torch.nn.Module) -> None:
    """Take the mark of sharded weights from linear layers that every tensor-parallel rank holds whole.

    Transformer Engine marks the weight of every linear layer, those of latent attention's down projections too, which
    are not cut (`parallel_mode` is None). Counted on every rank, their gradients would make the norm too large and
    clipping too strong. Experts are not cut by Transformer Engine either, but by Megatron-Core before it, and shared
    experts that overlap with messages say so only afterwards: theirs stay.
    """
    for name, module in model.named_modules():
        expert = ".mlp.experts." in f"{name}." or ".mlp.shared_experts." in f"{name}."
        if not expert and getattr(module, "parallel_mode", "") is None:
            for parameter in module.parameters(recurse=False):
                vars(parameter)["tensor_model_parallel"] = False


def pass_on_padding(model: torch.nn.Module) -> None:
    """Let Transformer Engine see that packed sequences have no padding; otherwise each layer stalls the host."""
    for module in model.modules():
        vars(module).get("kept_packed_seq_params", set()).add("pad_between_seqs")


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Let Transformer Engine's linear layers add their weights' gradients into `main_grad` as they compute them.

    Otherwise each is rounded to the model's dtype, kept, and added by a hook. Megatron-Core's one switch for it,
    `gradient_accumulation_fusion`, is that of the output layer too, which is its own in every spec and needs a kernel
    of apex. For weights with a `main_grad`: those that train under Megatron-Core's DDP or Megatron FSDP.
    """
    for module in model.modules():
        if hasattr(module, FUSED):
            setattr(module, FUSED, True)


def mark_experts(model: torch.nn.Module, layout: ParallelLayout, *, always: bool = False) -> None:
    """Mark expert weights if their copies are on other ranks than copies of the other weights.

    Megatron-Core marks them only under expert parallelism. But with tp above etp, too, ranks of one tensor-parallel
    group hold the same expert and give it different tokens, and their gradients must be added.

    `always` keeps experts apart where nothing demands it, so that optimizer states have one form on every layout.

    Every weight of such experts counts in the gradient norm on every tensor-parallel rank, and nothing is summed over
    tensor parallelism. Megatron-Core would count the bias of the second linear only on the first rank, and add up the
    biases of different experts under sequence parallelism.
    """
    apart = always or layout.ep > 1 or layout.etp != layout.tp
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = not apart  # type: ignore[attr-defined]
            if apart:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
