"""Where a transformers model keeps the weights that a checkpoint on disk names.

transformers (5.x) holds all experts of a layer in two tensors and calls every mixture `mlp`; checkpoints name each
expert's three matrices, and Mixtral's their block otherwise (transformers `conversion_mapping`).
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

FUSED_GATE_UP, FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
# The names of an expert's gate, up and down projection, and of its block, by model_type.
MIXTRAL = ("block_sparse_moe", ("w1", "w3", "w2"))
USUAL = ("mlp", ("gate_proj", "up_proj", "down_proj"))


def weights_on_disk(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight by its name on disk; experts are views into the model's tensors, so writing them writes the model.

    A tied head and the embedding are one storage under two names.
    """
    block, (gate, up, down) = MIXTRAL if model.config.model_type == "mixtral" else USUAL
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        prefix = name.rpartition(".")[0].replace(".mlp.", f".{block}.")
        if name.endswith(FUSED_GATE_UP):
            width = tensor.size(1) // 2  # [experts, 2 * F, H]: the gate's rows, then the up projection's
            for expert, rows in enumerate(tensor):
                found[f"{prefix}.{expert}.{gate}.weight"] = rows[:width]
                found[f"{prefix}.{expert}.{up}.weight"] = rows[width:]
        elif name.endswith(FUSED_DOWN):
            found |= {f"{prefix}.{expert}.{down}.weight": rows for expert, rows in enumerate(tensor)}
        else:
            found[name.replace(".mlp.", f".{block}.")] = tensor
    return found
