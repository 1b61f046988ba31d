"""A checkpoint as a Megatron-Core model on any layout, to evaluate or export."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.config.schema import MegatronConfig, ModelConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.groups import Groups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint as this rank's Megatron-Core model chunks, ready to evaluate or export."""

    chunks: list[GPTModel]
    sharding: Sharding
    groups: Groups
    device: torch.device

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor | None:
        """Logits of `tokens` [B, S] int64, on the ranks of the last pipeline stage; None on the others.

        Collective over a replica. Stages run one after the other: each broadcasts its output to all pipeline ranks. S
        is a multiple of tp under sequence parallelism.
        """
        layout = self.groups.layout
        assert self.sharding.hf.mtp == "drop", "Megatron-Core evaluates multi-token prediction layers only with labels"
        output = self._through_stages(tokens.to(self.device))
        if self.groups.coordinates.pp_rank != layout.pp - 1:
            return None
        return self._whole_vocabulary(output.detach()).float()

    def _through_stages(self, tokens: Tensor) -> Tensor:
        """Return the output of this rank's last chunk on `tokens` [B, S], a forward of the pipeline; collective.

        On the last pipeline rank that is logits [B, S, padded vocab / tp].
        """
        layout, at = self.groups.layout, self.groups.coordinates
        batch, length = tokens.shape
        positions = torch.arange(length, device=self.device).expand(batch, -1)
        rows = length // layout.tp if layout.sequence_parallel else length
        passed = torch.empty(rows, batch, self.sharding.hf.hidden_size, dtype=self._dtype, device=self.device)
        output: Tensor | None = None
        for pp_rank, vp_stage in layout.stages():
            if pp_rank == at.pp_rank:
                chunk = self.chunks[vp_stage]
                if (pp_rank, vp_stage) != (0, 0):
                    chunk.set_input_tensor(passed)
                output = chunk(tokens, positions, attention_mask=None)
            if (pp_rank, vp_stage) == (layout.pp - 1, layout.vpp - 1):
                break
            if pp_rank == at.pp_rank:
                assert output is not None
                passed = output.contiguous()
            if layout.pp > 1:
                dist.broadcast(passed, group=self.groups.pp, group_src=pp_rank)
        assert output is not None, "a pipeline rank without a stage"
        return output

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.chunks[0].parameters()).dtype

    def _whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Return [B, S, vocab] gathered from every rank's [B, S, padded vocab / tp]."""
        tp = self.groups.layout.tp
        parts = [torch.empty_like(logits) for _ in range(tp)]
        if tp > 1:
            dist.all_gather(parts, logits.contiguous(), group=self.groups.tp)
        else:
            parts = [logits]
        return torch.cat(parts, dim=-1)[..., : self.sharding.hf.vocab_size]


def load_model(
    path: str | Path, *, groups: Groups, accelerator: Any, dtype: str = "fp32", mtp: Literal["drop", "load"] = "drop"
) -> LoadedModel:
    """Load this rank's part of the checkpoint; dtype: fp32, bf16."""
    from mega_rl.engines.models.build import build_chunks, transformer_config

    hf = replace(read_hf_config(path), mtp=mtp)
    config = transformer_config(
        hf,
        layout=groups.layout,
        model=ModelConfig(dtype=dtype),
        megatron=MegatronConfig(),
        deterministic=False,
        attention="sdpa",
        device_overrides=accelerator.transformer_config_overrides(),
    )
    sharding, device = Sharding(hf, groups.layout, spec="local"), accelerator.device
    built = {"config": config, "groups": groups, "head": "lm", "impl": "local"}
    chunks = build_chunks(hf, **built, padded_vocab=sharding.vocab, device=device)
    load_hf(chunks, path, sharding=sharding, coordinates=groups.coordinates)
    for chunk in chunks:
        chunk.eval()
    return LoadedModel(chunks, sharding, groups, device)
