"""Tensors of a transformers model that hold those that a checkpoint on disk names.

transformers (5.x) holds all experts of a layer in two tensors and calls every mixture `mlp`; checkpoints name each
expert's three matrices, some their block otherwise (`ExpertNames`; transformers `conversion_mapping`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.safetensors.header import matrix_shape

FUSED_GATE_UP, FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class DiskTensor(NamedTuple):
    """A tensor on disk as consecutive whole rows of a model's tensor, both seen as matrices (`matrix_shape`)."""

    name: str
    shape: tuple[int, ...]
    row: int  # its first one in the model's tensor

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return matrix_shape(self.shape)[0]


def disk_tensors(model_type: str, name: str, shape: tuple[int, ...]) -> Iterator[DiskTensor]:
    """Yield the tensors on disk that make parameter or buffer `name` of a transformers model, in order of rows."""
    names = FAMILIES[model_type].expert_names
    prefix = name.rpartition(".")[0].replace(".mlp.", f".{names.block}.")
    if name.endswith(FUSED_GATE_UP):
        experts, width, hidden = shape[0], shape[1] // 2, shape[2]  # the gate's rows, then the up projection's
        for expert in range(experts):
            row = 2 * expert * width
            yield DiskTensor(f"{prefix}.{expert}.{names.gate}.weight", (width, hidden), row)
            yield DiskTensor(f"{prefix}.{expert}.{names.up}.weight", (width, hidden), row + width)
    elif name.endswith(FUSED_DOWN):
        experts, hidden, width = shape
        for expert in range(experts):
            yield DiskTensor(f"{prefix}.{expert}.{names.down}.weight", (hidden, width), expert * hidden)
    else:
        yield DiskTensor(name.replace(".mlp.", f".{names.block}."), shape, 0)


def weights_on_disk(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight by its name on disk; experts are views into the model's tensors, so writing them writes the model.

    A tied head and the embedding are one storage under two names.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        matrix = tensor.view(matrix_shape(tuple(tensor.shape)))
        for disk in disk_tensors(model.config.model_type, name, tuple(tensor.shape)):
            weights[disk.name] = matrix[disk.row : disk.row + disk.rows].view(disk.shape)
    return weights
