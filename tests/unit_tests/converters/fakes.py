"""Stand-ins for Megatron-Core model chunks, and a split of the weights written out head by head as the reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_rl.converters.architecture import HFConfig, Rope
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

State = dict[str, Tensor]

LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(world_size=2, tp=2),
    "tp4": ParallelLayout(world_size=4, tp=4),
    "pp2": ParallelLayout(world_size=2, pp=2),
    "tp2-pp2": ParallelLayout(world_size=4, tp=2, pp=2),
    "tp2-pp2-vpp2": ParallelLayout(world_size=4, tp=2, pp=2, vpp=2),
}


def small_config(**overrides: object) -> HFConfig:
    """4 layers, 4 heads, 2 key-value heads of 6, hidden 10, vocabulary 13: no two sizes equal, none a power of two."""
    fields: dict[str, object] = {
        "family": "qwen3",
        "num_layers": 4,
        "hidden_size": 10,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_hidden_size": 28,
        "vocab_size": 13,
        "max_position_embeddings": 64,
        "norm_eps": 1e-6,
        "tied": False,
        "qkv_bias": False,
        "linear_bias": False,
        "qk_norm": True,
        "rope": Rope("default", 10000.0),
    }
    return HFConfig(**(fields | overrides))  # type: ignore[arg-type]


def hf_state(hf: HFConfig, *, value_head: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """A Hugging Face state dict of random values, shapes written out by hand."""
    h, q, kv, f = hf.hidden_size, hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim, hf.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf.vocab_size, h)}
    for i in range(hf.num_layers):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (h,)
        shapes[at + "self_attn.q_proj.weight"] = (q, h)
        shapes[at + "self_attn.k_proj.weight"] = (kv, h)
        shapes[at + "self_attn.v_proj.weight"] = (kv, h)
        if hf.qkv_bias:
            shapes[at + "self_attn.q_proj.bias"] = (q,)
            shapes[at + "self_attn.k_proj.bias"] = (kv,)
            shapes[at + "self_attn.v_proj.bias"] = (kv,)
        if hf.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = (hf.head_dim,)
            shapes[at + "self_attn.k_norm.weight"] = (hf.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (h, q)
        if hf.linear_bias:
            shapes[at + "self_attn.o_proj.bias"] = (h,)
            shapes[at + "mlp.gate_proj.bias"] = (f,)
            shapes[at + "mlp.up_proj.bias"] = (f,)
            shapes[at + "mlp.down_proj.bias"] = (h,)
        shapes[at + "post_attention_layernorm.weight"] = (h,)
        shapes[at + "mlp.gate_proj.weight"] = (f, h)
        shapes[at + "mlp.up_proj.weight"] = (f, h)
        shapes[at + "mlp.down_proj.weight"] = (h, f)
    shapes["model.norm.weight"] = (h,)
    if value_head:
        shapes["score.weight"] = (1, h)
    elif not hf.tied:
        shapes["lm_head.weight"] = (hf.vocab_size, h)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def interleave(hf: HFConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused rows, one head at a time: each key-value head preceded by its query heads and followed by its value."""
    d, per_group = hf.head_dim, hf.num_heads // hf.num_kv_heads
    rows: list[Tensor] = []
    for group in range(hf.num_kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * d + i] for i in range(d)]
        rows += [k[group * d + i] for i in range(d)]
        rows += [v[group * d + i] for i in range(d)]
    return torch.stack(rows)


def reference_params(
    hf: HFConfig, state: State, layout: ParallelLayout, at: RankCoordinates, vp_stage: int, *, spec: str = "local"
) -> State:
    """The parameters of one chunk by name, cut with torch.chunk."""

    def part(full: Tensor, dim: int = 0) -> Tensor:
        return full.chunk(layout.tp, dim)[at.tp_rank].clone()

    def table(full: Tensor) -> Tensor:
        missing = -full.shape[0] % layout.tp
        return part(torch.cat([full, full.new_zeros(missing, full.shape[1])]))

    stage, num_stages = vp_stage * layout.pp + at.pp_rank, layout.pp * layout.vpp
    depth = hf.num_layers // num_stages
    out: State = {}
    if stage == 0:
        out["embedding.word_embeddings.weight"] = table(state["model.embed_tokens.weight"])
    for local in range(depth):
        source, m = f"model.layers.{stage * depth + local}.", f"decoder.layers.{local}."
        norm, mlp_norm = m + "input_layernorm.weight", m + "pre_mlp_layernorm.weight"
        if spec == "te":
            norm, mlp_norm = m + "self_attention.linear_qkv.layer_norm_weight", m + "mlp.linear_fc1.layer_norm_weight"
        out[norm] = state[source + "input_layernorm.weight"].clone()
        out[mlp_norm] = state[source + "post_attention_layernorm.weight"].clone()
        for kind in ("weight", "bias"):
            if source + f"self_attn.q_proj.{kind}" in state:
                q, k, v = (state[source + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[m + f"self_attention.linear_qkv.{kind}"] = part(interleave(hf, q, k, v))
            if source + f"mlp.up_proj.{kind}" in state:
                halves = [part(state[source + f"mlp.{x}_proj.{kind}"]) for x in ("gate", "up")]
                out[m + f"mlp.linear_fc1.{kind}"] = torch.cat(halves)
        for x in "qk":
            if hf.qk_norm:
                out[m + f"self_attention.{x}_layernorm.weight"] = state[source + f"self_attn.{x}_norm.weight"].clone()
        out[m + "self_attention.linear_proj.weight"] = part(state[source + "self_attn.o_proj.weight"], 1)
        out[m + "mlp.linear_fc2.weight"] = part(state[source + "mlp.down_proj.weight"], 1)
        if hf.linear_bias:
            out[m + "self_attention.linear_proj.bias"] = state[source + "self_attn.o_proj.bias"].clone()
            out[m + "mlp.linear_fc2.bias"] = state[source + "mlp.down_proj.bias"].clone()
    if stage == num_stages - 1:
        out["decoder.final_layernorm.weight"] = state["model.norm.weight"].clone()
        if "score.weight" in state:
            out["output_layer.weight"] = state["score.weight"].clone()
        elif not hf.tied:
            out["output_layer.weight"] = table(state["lm_head.weight"])
        elif num_stages > 1:
            out["output_layer.weight"] = table(state["model.embed_tokens.weight"])
    return out


def chunk_of(params: State, *, first_layer: int, fill: float | None = float("nan")) -> nn.Module:
    """A module tree with parameters of these names; filled with `fill`, or holding the values where it is None."""
    root = nn.Module()
    for name, value in params.items():
        *path, leaf = name.split(".")
        module = root
        for key in path:
            if key not in dict(module.named_children()):
                module.add_module(key, nn.Module())
            module = module.get_submodule(key)
        data = value.clone() if fill is None else torch.full_like(value, fill)
        module.register_parameter(leaf, nn.Parameter(data))
    for local, layer in enumerate(root.get_submodule("decoder.layers").children()):
        layer.layer_number = first_layer + local + 1  # type: ignore[assignment]
    return root


def chunks_of_rank(
    hf: HFConfig,
    state: State,
    layout: ParallelLayout,
    at: RankCoordinates,
    *,
    spec: str = "local",
    fill: float | None = float("nan"),
) -> list[nn.Module]:
    """All chunks of one rank."""
    chunks = []
    for vp_stage in range(layout.vpp):
        params = reference_params(hf, state, layout, at, vp_stage, spec=spec)
        first = (vp_stage * layout.pp + at.pp_rank) * (hf.num_layers // (layout.pp * layout.vpp))
        chunks.append(chunk_of(params, first_layer=first, fill=fill))
    return chunks


def ranks(layout: ParallelLayout) -> list[RankCoordinates]:
    """Coordinates of every rank."""
    return [layout.coordinates(rank) for rank in range(layout.world_size)]
