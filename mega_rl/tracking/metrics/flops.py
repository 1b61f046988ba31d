"""Floating-point operations of a model's passes, and the peak of each kind of device."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from math import prod

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.sharding import Head

# Dense bf16 matrix products, TFLOP/s, from NVIDIA's data sheets; the first name that a device's name contains counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
_LAYER, _OUTPUT = re.compile(r"\.layers\.(\d+)\."), -1


class ModelWork:
    """Floating-point operations of one model by the lengths of its sequences; a multiply-add counts as two.

    Matrix products count with every token: experts by the share that a token goes to, and of the vocabulary only the
    output layer. Attention counts with the pairs of tokens that see each other, each sequence separately, as packing
    keeps them. Norms, activations and recomputation count nothing.
    """

    def __init__(self, hf: HFConfig, *, head: Head, layers: Collection[int] | None = None, output: bool = True) -> None:
        """layers: the layers that count, None for all. output: whether the output layer counts, too."""
        counted = range(hf.num_layers) if layers is None else layers
        elements = _elements_by_layer(hf, head)
        self._per_token = 2.0 * (
            sum(elements.get(layer, 0.0) for layer in counted) + (elements[_OUTPUT] if output else 0.0)
        )
        sizes = (hf.head_dim, hf.head_dim)  # widths of queries and keys, and of values
        if hf.mla is not None:
            sizes = (hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim, hf.mla.v_head_dim)
        self._per_pair = 2.0 * hf.num_heads * sum(sizes)  # in one layer
        windows = hf.window.layers if hf.window is not None else ()
        self._windowed = sum(windows[i] for i in counted) if windows else 0
        self._window = hf.window.size if hf.window is not None else 0
        self._layers = len(counted)

    def forward(self, lengths: Iterable[int]) -> float:
        """Return the operations of a forward."""
        total = 0.0
        for length in lengths:
            seen = (self._layers - self._windowed) * _pairs(length, length)
            seen += self._windowed * _pairs(length, self._window)
            total += length * self._per_token + self._per_pair * seen
        return total

    def update(self, lengths: Iterable[int]) -> float:
        """Return the operations of a forward and a backward: three times the forward's."""
        return 3.0 * self.forward(lengths)


def peak_flops(device_name: str) -> float | None:
    """Return the peak bf16 operations per second of a device by name, or None."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


@lru_cache(maxsize=16)
def _elements_by_layer(hf: HFConfig, head: Head) -> dict[int, float]:
    """Return the matrix elements that a token meets, by layer or `_OUTPUT`."""
    elements = {_OUTPUT: float(hf.vocab_size * hf.hidden_size) if hf.tied and head == "lm" else 0.0}
    share = hf.moe.top_k / hf.moe.num_experts if hf.moe is not None else 1.0
    for name, tensor in hf_tensors(hf, head=head).items():
        if len(tensor.shape) < 2 or "embed_tokens" in name or "bias" in name:
            continue
        match = _LAYER.search(name)
        layer = _OUTPUT if match is None else int(match[1])
        elements[layer] = elements.get(layer, 0.0) + prod(tensor.shape) * (share if ".experts." in name else 1.0)
    return elements


def _pairs(length: int, window: int) -> float:
    """Return the number of pairs of a token and a token that it sees, itself included."""
    inside = min(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * float(window)
