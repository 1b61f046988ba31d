"""Logits of a checkpoint's shrunk twin: Megatron-Core against transformers, in float32 on one process."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.preflight.checkpoints import known_bug
from mega_rl.verify.twin.reference import hf_logits, hf_weights
from mega_rl.verify.twin.shrink import Twin, num_elements, write_twin

GATE = 1e-4  # largest |logit difference| allowed: float32 sums in another order stay an order of magnitude below
TIMEOUT_S = 600.0
_LOAD_BYTES = 8  # bytes per element: transformers loads float32, and splits experts into copies
_NOT_INDEPENDENT = (
    "transformers has not loaded the whole checkpoint, which is quantised or would take over half of the memory: "
    "tensors that are left out or held twice were judged by mega_rl only"
)


@dataclass(frozen=True)
class Parity:
    """Result of comparing logits."""

    good: bool  # within the gate, or beyond it for a fault of the reference that is known
    max_abs: float
    first_layer: int | None  # first layer of the original model whose output differs
    summary: str
    details: tuple[str, ...] = ()


def compare_twin(reference: Path, converted: Path, *, num_tokens: int, seed: int = 0) -> Parity:
    """Compare logits of `num_tokens` random tokens: `reference` by transformers, `converted` by Megatron-Core.

    Both are Hugging Face folders, of one model; each is cut down to a twin in a temporary folder first, `reference`
    after transformers has loaded the whole folder by its own rules, if memory holds it (else a detail says so). Must be
    called before anything else imports Megatron-Core, for one process.
    """
    accelerator = prepare("auto")
    from transformers.utils.logging import disable_progress_bar

    from mega_rl.parallel import groups as process_groups  # imports Megatron-Core
    from mega_rl.verify.twin.logits import megatron_logits

    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="twin_") as folder:
        sides = [Path(folder) / name for name in ("reference", "converted")]
        hf = read_hf_config(reference)
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        independent = hf.quantization is None and num_elements(hf) * _LOAD_BYTES < host_bytes // 2
        twin = write_twin(reference, sides[0], weights=hf_weights(reference) if independent else None)
        write_twin(converted, sides[1])
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, twin.hf.vocab_size, (1, num_tokens), generator=generator)
        expected = hf_logits(sides[0], tokens, layer_outputs=True)
        groups = process_groups.initialize(ParallelLayout(), accelerator=accelerator, timeout_s=TIMEOUT_S)
        try:
            outputs = megatron_logits(sides[1], tokens, groups=groups, accelerator=accelerator)
        finally:
            process_groups.destroy()
    hidden = list(zip(expected.hidden, outputs.hidden, strict=True))
    parity = judge(twin, expected.logits, outputs.logits, hidden)
    return parity if independent else replace(parity, details=(*parity.details, _NOT_INDEPENDENT))


def judge(twin: Twin, expected: Tensor, converted: Tensor, hidden: list[tuple[Tensor, Tensor]]) -> Parity:
    """Judge logits [B, S, V] and the layers' outputs, pairs of [B, S, H]."""
    gap = float((expected - converted).abs().max())
    layers = ", ".join(map(str, twin.layers))
    deviation = float(expected.std())
    figures = f"max |difference| {gap:.2e}, gate {GATE:.0e}, logits' deviation {deviation:.2g} (layers {layers})"
    if gap <= GATE:  # false for nan too
        return Parity(True, gap, None, figures)
    bug = known_bug(twin.hf)
    if bug is not None:
        return Parity(True, gap, None, f"{figures}: not comparable", (bug.what,))
    details = [
        f"after layer {layer}: cosine {_cosine(a, b):.6f}, max |difference| {float((a - b).abs().max()):.2e}"
        for layer, (a, b) in zip(twin.layers, hidden, strict=True)
    ]
    first = next((i for i, (a, b) in enumerate(hidden) if _differs(a, b)), None)
    if first is None:
        details.append("all layers agree: look at the final norm, the output layer and its scale")
        return Parity(False, gap, None, figures, tuple(details))
    details.append(f"first to differ: layer {twin.layers[first]}; look at {suspects(twin.hf, first)}")
    return Parity(False, gap, twin.layers[first], figures, tuple(details))


def suspects(hf: HFConfig, layer: int) -> str:
    """Return the features of a layer that no earlier layer has, likely causes first, in words."""
    earlier = range(layer)
    features = []
    if hf.is_moe(layer) and not any(hf.is_moe(i) for i in earlier):
        features.append(
            "the router (order of softmax and top-k, groups, bias, scaling) and the experts, shared ones too"
        )
    if hf.window is not None and hf.window.layers[layer] and not any(hf.window.layers[i] for i in earlier):
        features.append(f"the sliding window of {hf.window.size} tokens and the RoPE base of such layers")
    if layer == 0:
        rows = (
            "the latent projections"
            if hf.mla is not None
            else "the order of rows of q, k and v, their biases and norms"
        )
        features.append(f"RoPE ({hf.rope.kind}, base {hf.rope.theta:g}), {rows}, the embedding")
    return "; ".join(features) or "the weights of that layer (mega-rl convert diff)"


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return whether outputs differ by more than the gate, relative to their size where that is above 1."""
    return not float((a - b).abs().max()) <= GATE * max(1.0, float(a.abs().max()))
