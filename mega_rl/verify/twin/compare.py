"""Compare logits of a checkpoint's shrunk twin: Megatron-Core against transformers, in float32 on one process.

Functions that need Megatron-Core import it themselves: the accelerator must be prepared before.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mega_rl.config.schema import MegatronConfig, ModelConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator, prepare
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.preflight.checkpoints import known_bug
from mega_rl.verify.twin.shrink import Twin, num_elements, write_twin

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PreTrainedModel

    from mega_rl.parallel.groups import Groups

GATE = 1e-4  # largest |logit difference| allowed: float32 sums in another order stay an order of magnitude below
TIMEOUT_S = 600.0
_LOAD_BYTES = 8  # bytes per element: transformers loads float32, and splits experts into copies
_NOT_INDEPENDENT = (
    "transformers has not loaded the whole checkpoint, which is quantised or would take over half of the memory: "
    "tensors that are left out or held twice were judged by mega_rl only"
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Outputs:
    """Logits and hidden states of a model on a batch."""

    logits: Tensor  # [B, S, vocab] float32, without padding of the vocabulary
    hidden: tuple[Tensor, ...] = field(default=())  # each layer's output [B, S, H]; empty unless requested


@torch.no_grad()
def hf_logits(path: str | Path, tokens: Tensor, *, dtype: str = "fp32", layer_outputs: bool = False) -> Outputs:
    """Return the logits of `tokens` [B, S] int64 by a checkpoint in transformers, on the CPU.

    Attention is transformers' own plain one, and no code of the checkpoint is run. `dtype` is "fp32" or "bf16".
    `layer_outputs` asks for the hidden states too.
    """
    model = _load(path, DTYPES[dtype])
    states: list[Tensor] = []

    def keep(output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    with recorded(list(model.model.layers) if layer_outputs else [], keep):
        logits = model(tokens, use_cache=False).logits
    return Outputs(logits.float(), tuple(states))


def hf_weights(path: str | Path) -> dict[str, Tensor]:
    """Return every weight of a checkpoint by its name on disk, float32, as transformers loads it.

    A reference that shares no code with the converters decides by itself which tensors of the files are the model.
    Takes 4 bytes per element, twice that for experts. Raises UserError for a checkpoint that lacks weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _load(path, torch.float32)
    weights: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return weights


def _load(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder, on the CPU; no weight of it is random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads((Path(path) / "config.json").read_bytes())
    model_type = raw.pop("model_type")
    family = FAMILIES.get(model_type)
    config = AutoConfig.for_model(family.transformers_type if family else model_type, **raw)
    answer: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = answer
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{path}: transformers does not find {len(missing)} weights of its model ({missing[0]}, ...)")
    loaded: PreTrainedModel = model.eval()
    return loaded


@contextmanager
def recorded(layers: Sequence[torch.nn.Module], keep: Callable[[Any], None]) -> Iterator[None]:
    """Hand every output of `layers` to `keep` inside the context."""
    hooks = [layer.register_forward_hook(lambda module, inputs, output: keep(output)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def load_model(
    path: str | Path,
    *,
    groups: Groups,
    accelerator: Accelerator,
    dtype: str = "fp32",
    mtp: Literal["drop", "load"] = "drop",
) -> tuple[list[GPTModel], Sharding]:
    """Load the checkpoint in directory `path` into this rank's part of a Megatron-Core model of `groups.layout`.

    `dtype` is "fp32" or "bf16"; `mtp` says whether multi-token prediction layers are part of the model. Raises
    UserError and UserErrors as `read_hf_config`, `transformer_config` and `load_hf` do.
    """
    from mega_rl.engines.models.build import ModelSettings, build_chunks, transformer_config

    hf = replace(read_hf_config(path), mtp=mtp)
    config = transformer_config(
        hf,
        layout=groups.layout,
        settings=ModelSettings(ModelConfig(dtype=dtype), MegatronConfig(), deterministic=False),
        attention="sdpa",
        device_overrides=accelerator.transformer_config_overrides(),
    )
    sharding = Sharding(hf, groups.layout, spec="local")
    chunks = build_chunks(
        hf,
        config=config,
        groups=groups,
        head="lm",
        impl="local",
        padded_vocab=sharding.vocab,
        device=accelerator.device,
    )
    load_hf(chunks, path, sharding=sharding, coordinates=groups.coordinates)
    for chunk in chunks:
        chunk.eval()
    return chunks, sharding


@torch.no_grad()
def megatron_logits(path: str | Path, tokens: Tensor, *, groups: Groups, accelerator: Accelerator) -> Outputs:
    """Return the logits of `tokens` [B, S] int64 and the layers' outputs, on one process."""
    (chunk,), sharding = load_model(path, groups=groups, accelerator=accelerator)
    batch, length = tokens.shape
    positions = torch.arange(length, device=accelerator.device).expand(batch, -1)
    states: list[Tensor] = []
    with recorded(list(chunk.decoder.layers), lambda output: states.append(output[0].transpose(0, 1).cpu())):
        logits = chunk(tokens.to(accelerator.device), positions, attention_mask=None)
    return Outputs(logits[..., : sharding.hf.vocab_size].float().cpu(), tuple(states))


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

    from mega_rl.parallel import groups as process_groups

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
    details = []
    for layer, (a, b) in zip(twin.layers, hidden, strict=True):
        cosine = float(cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))
        details.append(f"after layer {layer}: cosine {cosine:.6f}, max |difference| {float((a - b).abs().max()):.2e}")
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


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return whether outputs differ by more than the gate, relative to sizes above 1."""
    return not float((a - b).abs().max()) <= GATE * max(1.0, float(a.abs().max()))
