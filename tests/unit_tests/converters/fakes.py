"""Stand-ins for Megatron-Core model chunks, and a split of the weights written out head by head as the reference."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_rl.converters.architecture import HFConfig, Mla, Moe, Rope
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates, parse_pipeline

State = dict[str, Tensor]

LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(world_size=2, tp=2),
    "tp4": ParallelLayout(world_size=4, tp=4),
    "pp2": ParallelLayout(world_size=2, pp=2),
    "tp2-pp2": ParallelLayout(world_size=4, tp=2, pp=2),
    "tp2-pp2-vpp2": ParallelLayout(world_size=4, tp=2, pp=2, vpp=2),
}
# Layouts that cut experts, and pipelines that are not even, for the tests of plans.
MORE_LAYOUTS = {
    "vpp2": ParallelLayout(world_size=2, pp=2, vpp=2),
    "ep2": ParallelLayout(world_size=2, ep=2),
    "ep2-etp2": ParallelLayout(world_size=4, ep=2, etp=2),
    "tp2-ep2": ParallelLayout(world_size=2, tp=2, ep=2),
    "tp2-pp2-ep2": ParallelLayout(world_size=4, tp=2, pp=2, ep=2),
    "tp2-pp2-etp2": ParallelLayout(world_size=4, tp=2, pp=2, etp=2),
    "uneven": ParallelLayout(world_size=2, pp=2, pipeline=parse_pipeline("Ettt|tL")),
    "uneven-vpp2": ParallelLayout(world_size=2, pp=2, vpp=2, pipeline=parse_pipeline("Et|tt|t|L")),
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


def small_moe(**overrides: object) -> HFConfig:
    """A Qwen3-MoE of 4 layers, the second dense: 6 experts of width 12, the best 2 of them."""
    moe = Moe((True, False, True, True), num_experts=6, top_k=2, ffn_hidden_size=12)
    return small_config(**({"family": "qwen3_moe", "moe": moe} | overrides))


def small_mla(**overrides: object) -> HFConfig:
    """A DeepSeek-V3 of 4 layers, the first dense: latent attention, experts with a correction, a shared expert, MTP."""
    moe = Moe((False, True, True, True), 6, 2, 12, shared_ffn_hidden_size=16, score="sigmoid", expert_bias=True)
    mla = Mla(q_lora_rank=9, kv_lora_rank=7, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
    fields = {"family": "deepseek_v3", "mla": mla, "moe": moe, "head_dim": 5, "num_kv_heads": 4, "qk_norm": False}
    return small_config(**(fields | {"mtp_layers": 1, "mtp": "load"} | overrides))


def hf_state(hf: HFConfig, *, value_head: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """A Hugging Face state dict of random values; test_families.py holds its names and shapes against transformers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = hf_tensors(hf, head="value" if value_head else "lm")
    return {name: torch.randn(tensor.shape, generator=generator).to(dtype) for name, tensor in tensors.items()}


def interleave(hf: HFConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused rows, one head at a time: each key-value head preceded by its query heads and followed by its value."""
    d, per_group = hf.head_dim, q.shape[0] // hf.head_dim // hf.num_kv_heads  # gates count as heads
    rows: list[Tensor] = []
    for group in range(hf.num_kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * d + i] for i in range(d)]
        rows += [k[group * d + i] for i in range(d)]
        rows += [v[group * d + i] for i in range(d)]
    return torch.stack(rows)


def attention_params(hf: HFConfig, hf_layer: State) -> State:
    """Whole parameters of a layer's attention; `hf_layer` has the layer's tensors without their prefix."""
    out: State = {}
    if hf.mla is not None:
        names = {
            "q_proj": "linear_q_proj",
            "q_a_proj": "linear_q_down_proj",
            "kv_a_proj_with_mqa": "linear_kv_down_proj",
        }
        names |= {"q_b_proj": "linear_q_up_proj", "kv_b_proj": "linear_kv_up_proj"}
        names |= {"q_a_layernorm": "q_layernorm", "kv_a_layernorm": "kv_layernorm"}
        inside = {"wq_b": "linear_wq_b", "wk": "linear_wk", "k_norm": "k_norm", "weights_proj": "linear_weights_proj"}
        names |= {f"indexer.{name}": f"core_attention.indexer.{to}" for name, to in inside.items()}
    else:
        names = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
        if "self_attn.qkv_proj.weight" in hf_layer:  # Phi-3
            q, kv = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
            parts = hf_layer["self_attn.qkv_proj.weight"].split([q, kv, kv])
            out["self_attention.linear_qkv.weight"] = interleave(hf, *parts)
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in hf_layer:
                q, k, v = (hf_layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                if hf.attention_gate:  # of each head the query, then the gate; of each group all queries, all gates
                    heads = q.view(hf.num_kv_heads, -1, 2, hf.head_dim, q.shape[-1]).transpose(1, 2)
                    q = heads.reshape(q.shape)
                out[f"self_attention.linear_qkv.{kind}"] = interleave(hf, q, k, v)
    for source, target in (names | {"o_proj": "linear_proj"}).items():
        for kind in ("weight", "bias"):
            if f"self_attn.{source}.{kind}" in hf_layer:
                out[f"self_attention.{target}.{kind}"] = hf_layer[f"self_attn.{source}.{kind}"]
    if "self_attn.sinks" in hf_layer:
        out["self_attention.core_attention.softmax_offset"] = hf_layer["self_attn.sinks"]
    return out


def delta_parts(hf: HFConfig) -> list[int]:
    """Rows of a delta net's queries, keys, values, gates, betas and alphas."""
    assert hf.delta is not None
    keys = hf.delta.num_key_heads * hf.delta.key_head_dim
    values = hf.delta.num_value_heads * hf.delta.value_head_dim
    return [keys, keys, values, values, hf.delta.num_value_heads, hf.delta.num_value_heads]


def delta_params(hf: HFConfig, hf_layer: State) -> State:
    """Whole parameters of a gated delta net; none of a layer with attention."""
    own = {n.removeprefix("linear_attn."): x for n, x in hf_layer.items() if n.startswith("linear_attn.")}
    if hf.delta is None or not own:
        return {}
    if "in_proj_qkvz.weight" in own:  # key head by key head
        groups, sizes = hf.delta.num_key_heads, delta_parts(hf)
        halves = (("in_proj_qkvz.weight", sizes[:4]), ("in_proj_ba.weight", sizes[4:]))
        parts = [
            part.reshape(-1, hf.hidden_size)
            for name, rows in halves
            for part in own[name].view(groups, -1, hf.hidden_size).split([size // groups for size in rows], dim=1)
        ]
    else:
        parts = [own[f"in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]
    names = {"conv1d.weight": "conv1d.weight", "norm.weight": "out_norm.weight", "out_proj.weight": "out_proj.weight"}
    names |= {"A_log": "A_log", "dt_bias": "dt_bias"}
    out = {f"self_attention.{to}": own[name] for name, to in names.items()}
    return out | {"self_attention.in_proj.weight": torch.cat(parts)}


def gated_mlp(hf_layer: State, source: str, target: str, parts: tuple[str, str, str]) -> State:
    """Whole parameters of one gated MLP, [gate; up] and down."""
    gate, up, down = parts
    out: State = {}
    for kind in ("weight", "bias"):
        if f"{source}.{gate}.{kind}" in hf_layer:
            out[f"{target}.linear_fc1.{kind}"] = torch.cat([hf_layer[f"{source}.{x}.{kind}"] for x in (gate, up)])
            out[f"{target}.linear_fc2.{kind}"] = hf_layer[f"{source}.{down}.{kind}"]
        elif f"{source}.{up}.{kind}" in hf_layer:
            out[f"{target}.linear_fc1.{kind}"] = hf_layer[f"{source}.{up}.{kind}"]
            out[f"{target}.linear_fc2.{kind}"] = hf_layer[f"{source}.{down}.{kind}"]
    if f"{source}.gate_up_proj.weight" in hf_layer:
        out[f"{target}.linear_fc1.weight"] = hf_layer[f"{source}.gate_up_proj.weight"]
        out[f"{target}.linear_fc2.weight"] = hf_layer[f"{source}.{down}.weight"]
    return out


def moe_params(hf: HFConfig, hf_layer: State) -> State:
    """Whole parameters of a layer's mixture, each of its names on disk tried in turn."""
    out: State = {}
    weights = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "mlp.router.gate")
    biases = ("mlp.gate", "block_sparse_moe", "mlp", "mlp.moe_statics", "mlp.gate.moe_statics")
    router = {f"{name}.weight": "weight" for name in weights} | {"mlp.router.bias": "bias"}
    router |= {f"{name}.e_score_correction_bias": "expert_bias" for name in biases} | {"mlp.expert_bias": "expert_bias"}
    for source, target in router.items():
        if source in hf_layer:
            out[f"mlp.router.{target}"] = hf_layer[source]
    if "mlp.shared_expert_gate.weight" in hf_layer:
        out["mlp.shared_experts.gate_weight"] = hf_layer["mlp.shared_expert_gate.weight"]
    usual = ("gate_proj", "up_proj", "down_proj")
    for shared in ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp"):
        out |= gated_mlp(hf_layer, shared, "mlp.shared_experts", usual)
    assert hf.moe is not None
    for expert in range(hf.moe.num_experts):
        target = f"mlp.experts.local_experts.{expert}"
        out |= gated_mlp(hf_layer, f"mlp.experts.{expert}", target, usual)
        out |= gated_mlp(hf_layer, f"block_sparse_moe.experts.{expert}", target, ("w1", "w3", "w2"))
        if "mlp.experts.gate_up_proj" in hf_layer:
            gate_up, down = hf_layer["mlp.experts.gate_up_proj"][expert], hf_layer["mlp.experts.down_proj"][expert]
            if hf.linear_bias:  # GPT-OSS
                turns, shift = hf_layer["mlp.experts.gate_up_proj_bias"][expert], gate_up.T
                gate_up, down = torch.cat([shift[0::2], shift[1::2]]), down.T
                out[f"{target}.linear_fc1.bias"] = torch.cat([turns[0::2], turns[1::2]])
                out[f"{target}.linear_fc2.bias"] = hf_layer["mlp.experts.down_proj_bias"][expert]
            out[f"{target}.linear_fc1.weight"], out[f"{target}.linear_fc2.weight"] = gate_up, down
    return out


def layer_params(hf: HFConfig, state: State, layer: int) -> State:
    """Whole parameters of a layer, names without its prefix."""
    prefix = f"model.layers.{layer}."
    hf_layer = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    norms |= {name: name for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}
    norms |= {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "pre_mlp_layernorm"}  # Apertus
    if "post_feedforward_layernorm.weight" in hf_layer:  # Gemma 3, OLMo 2
        norms |= {"post_attention_layernorm": "post_self_attn_layernorm"}
        norms |= {"pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"}
    out = {f"{to}.weight": hf_layer[f"{name}.weight"] for name, to in norms.items() if f"{name}.weight" in hf_layer}
    slopes = {name: name.replace("act_fn", "activation_func") for name in hf_layer if ".act_fn." in name}
    out |= {to: hf_layer[name].reshape(1) for name, to in slopes.items()}
    moe = hf.moe is not None and hf.moe.layers[min(layer, hf.num_layers - 1)]
    out |= attention_params(hf, hf_layer) | delta_params(hf, hf_layer)
    out |= moe_params(hf, hf_layer) if moe else gated_mlp(hf_layer, "mlp", "mlp", ("gate_proj", "up_proj", "down_proj"))
    return out


def te_name(hf: HFConfig, name: str, layer: int) -> str:
    """A layer's parameter name under Transformer Engine's spec."""
    attention, moe = "self_attention.linear_", hf.moe is not None and hf.moe.layers[min(layer, hf.num_layers - 1)]
    if hf.delta is not None and hf.delta.layers[layer]:
        name = name.replace("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight")
    if hf.mla is None:
        name = name.replace("input_layernorm.weight", attention + "qkv.layer_norm_weight")
    else:
        name = name.replace("self_attention.q_layernorm.weight", attention + "q_up_proj.layer_norm_weight")
        name = name.replace("self_attention.kv_layernorm.weight", attention + "kv_up_proj.layer_norm_weight")
    if not moe:
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.\w+)", r"\2\1", name)


def cut(hf: HFConfig, name: str, whole: Tensor, parts: int, index: int) -> Tensor:
    """One rank's part of a layer's parameter, by its name under the local spec."""
    joint = "|self_attention.[qk]_layernorm" if hf.qk_norm_joint else ""
    if re.search(r"linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.|eh_proj|softmax_offset" + joint, name):
        return whole.chunk(parts)[index].clone()
    if "in_proj" in name or "conv1d" in name:
        rows = delta_parts(hf)[: 6 if "in_proj" in name else 3]
        return torch.cat([part.chunk(parts)[index] for part in whole.split(rows)])
    if "A_log" in name or "dt_bias" in name:
        return whole.chunk(parts)[index].clone()
    if "linear_fc1." in name and not hf.gated:
        return whole.chunk(parts)[index].clone()
    if "linear_fc1." in name:
        return torch.cat([half.chunk(parts)[index] for half in whole.chunk(2)])
    if re.search(r"(linear_proj|linear_fc2|out_proj)\.weight", name):
        return whole.chunk(parts, 1)[index].clone()
    return whole.clone()


def layer_part(hf: HFConfig, state: State, layer: int, layout: ParallelLayout, at: RankCoordinates, spec: str) -> State:
    """One rank's parameters of a layer, experts numbered within the rank."""
    out: State = {}
    held = 0 if hf.moe is None else hf.moe.num_experts // layout.ep
    for name, whole in layer_params(hf, state, layer).items():
        parts, index = layout.tp, at.tp_rank
        if actual := re.search(r"local_experts\.(\d+)", name):
            parts, index, expert = layout.etp, at.etp_rank, int(actual[1])
            if expert // held != at.ep_rank:
                continue
            name = name.replace(actual[0], f"local_experts.{expert % held}")
        part = cut(hf, name, whole, parts, index)
        out[te_name(hf, name, layer) if spec == "te" else name] = part
    return out


def reference_params(
    hf: HFConfig, state: State, layout: ParallelLayout, at: RankCoordinates, vp_stage: int, *, spec: str = "local"
) -> State:
    """The parameters of one chunk by name, cut with torch.chunk."""

    def table(full: Tensor) -> Tensor:
        missing = -full.shape[0] % layout.tp
        return torch.cat([full, full.new_zeros(missing, full.shape[1])]).chunk(layout.tp)[at.tp_rank].clone()

    stage, num_stages = vp_stage * layout.pp + at.pp_rank, layout.pp * layout.vpp
    depths = layout.pipeline or [hf.num_layers // num_stages] * num_stages
    first_layer, last = sum(depths[:stage]), stage == num_stages - 1
    mtp = hf.mtp_layers if hf.mtp == "load" else 0
    out: State = {}
    if stage == 0 or (last and mtp):
        out["embedding.word_embeddings.weight"] = table(state["model.embed_tokens.weight"])
    for local in range(depths[stage]):
        params = layer_part(hf, state, first_layer + local, layout, at, spec)
        out |= {f"decoder.layers.{local}.{name}": part for name, part in params.items()}
    if not last:
        return out
    out["decoder.final_layernorm.weight"] = state["model.norm.weight"].clone()
    for ahead in range(mtp):
        source, target = f"model.layers.{hf.num_layers + ahead}.", f"mtp.layers.{ahead}."
        params = layer_part(hf, state, hf.num_layers + ahead, layout, at, spec)
        out |= {f"{target}transformer_layer.{name}": part for name, part in params.items()}
        names = {name: name for name in ("enorm", "hnorm", "eh_proj")} | {"shared_head.norm": "final_layernorm"}
        for name, to in names.items():
            out[f"{target}{to}.weight"] = cut(hf, to, state[f"{source}{name}.weight"], layout.tp, at.tp_rank)
    if hf.value_head in state:
        out["output_layer.weight"] = state[hf.value_head].clone()
    elif not hf.tied:
        out["output_layer.weight"] = table(state["lm_head.weight"])
    elif num_stages > 1 and not mtp:
        out["output_layer.weight"] = table(state["model.embed_tokens.weight"])
    return out


def chunk_of(params: State, *, first_layer: int, fill: float | None = float("nan")) -> nn.Module:
    """A module tree with parameters of these names; filled with `fill`, or holding the values where it is None."""
    root = nn.Module()
    root.add_module("decoder", nn.Module())
    root.get_submodule("decoder").add_module("layers", nn.Module())
    for name, value in params.items():
        *path, leaf = name.split(".")
        module = root
        for key in path:
            if key not in dict(module.named_children()):
                module.add_module(key, nn.Module())
            module = module.get_submodule(key)
        data = value.clone() if fill is None else torch.full_like(value, fill)
        if leaf == "expert_bias":
            module.register_buffer(leaf, data)
        else:
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
        first = layout.layers_of(at.pp_rank, hf.num_layers, vp_stage).start
        chunks.append(chunk_of(params, first_layer=first, fill=fill))
    return chunks


def planned_chunks(sharding: Sharding, at: RankCoordinates) -> list[nn.Module]:
    """The bf16 chunks of one rank of any family, every element NaN; router biases are float32, as in Megatron-Core."""
    chunks = []
    for vp_stage in range(sharding.layout.vpp):
        params = {
            param.name: torch.empty(param.shape, dtype=torch.float32 if param.float32 else torch.bfloat16)
            for param in build_plan(sharding, at, vp_stage=vp_stage)
        }
        first = sharding.layout.layers_of(at.pp_rank, sharding.hf.num_layers, vp_stage).start
        chunks.append(chunk_of(params, first_layer=first))
    return chunks


def ranks(layout: ParallelLayout) -> list[RankCoordinates]:
    """Coordinates of every rank."""
    return [layout.coordinates(rank) for rank in range(layout.world_size)]


def groups_of(layout: ParallelLayout, rank: int) -> dict[str, dist.ProcessGroup | None]:
    """The three groups of a rank; every rank makes every group."""
    at = [layout.coordinates(r) for r in range(layout.world_size)]
    size = layout.ep * layout.etp
    keys = {
        "tp_group": [(c.cp_rank, c.dp_rank, c.pp_rank) for c in at],
        "pp_group": [(c.tp_rank, c.cp_rank, c.dp_rank) for c in at],
        "expert_group": [(c.pp_rank, r % layout.stage_size // size) for r, c in enumerate(at)],
    }
    actual: dict[str, dist.ProcessGroup | None] = {}
    for name, key in keys.items():
        for value in sorted(set(key)):
            members = [r for r in range(layout.world_size) if key[r] == value]
            group = dist.new_group(members)
            if rank in members:
                actual[name] = group
    return actual
