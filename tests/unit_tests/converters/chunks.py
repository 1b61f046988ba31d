"""Stand-ins for model chunks of any family: a module tree with the parameters that a plan names."""

from __future__ import annotations

import torch
from torch import nn

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.ranks import ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import RankCoordinates


def planned_chunks(
    sharding: Sharding, at: RankCoordinates, *, dtype: torch.dtype = torch.bfloat16, fill: float = float("nan")
) -> list[nn.Module]:
    """The chunks of one rank, every element `fill`; router biases are float32 buffers, as in Megatron-Core."""
    return [
        _tree(
            build_plan(sharding, at, vp_stage=vp_stage),
            sharding.layout.layers_of(at.pp_rank, sharding.hf.num_layers, vp_stage),
            dtype,
            fill,
        )
        for vp_stage in range(sharding.layout.vpp)
    ]


def _tree(plan: tuple[ParamPlan, ...], layers: range, dtype: torch.dtype, fill: float) -> nn.Module:
    root = nn.Module()
    root.add_module("decoder", nn.Module())
    root.get_submodule("decoder").add_module("layers", nn.Module())
    for param in plan:
        *path, leaf = param.name.split(".")
        module = root
        for key in path:
            if key not in dict(module.named_children()):
                module.add_module(key, nn.Module())
            module = module.get_submodule(key)
        data = torch.full(param.shape, fill, dtype=torch.float32 if param.float32 else dtype)
        if leaf == "expert_bias":
            module.register_buffer(leaf, data)
        else:
            module.register_parameter(leaf, nn.Parameter(data))
    for layer, module in zip(layers, root.get_submodule("decoder.layers").children(), strict=True):
        module.layer_number = layer + 1  # type: ignore[assignment]
    return root


def values_of(chunks: list[nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Copies of what a checkpoint holds of each chunk."""
    return [{name: value.detach().clone() for name, value in weights_of(chunk).items()} for chunk in chunks]
