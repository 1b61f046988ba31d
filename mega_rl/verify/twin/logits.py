"""Logits of a checkpoint by Megatron-Core, to compare with those of `mega_rl.verify.twin.reference`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mega_rl.config.schema import MegatronConfig, ModelConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.engines.models.build import ModelSettings, build_chunks, transformer_config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.verify.twin.reference import Outputs, recorded

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


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
    """Return the logits of `tokens` [B, S] int64 and the layers' outputs by the checkpoint, on one process."""
    (chunk,), sharding = load_model(path, groups=groups, accelerator=accelerator)
    batch, length = tokens.shape
    positions = torch.arange(length, device=accelerator.device).expand(batch, -1)
    states: list[Tensor] = []
    with recorded(list(chunk.decoder.layers), lambda output: states.append(output[0].transpose(0, 1).cpu())):
        logits = chunk(tokens.to(accelerator.device), positions, attention_mask=None)
    return Outputs(logits[..., : sharding.hf.vocab_size].float().cpu(), tuple(states))
