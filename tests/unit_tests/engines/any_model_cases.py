"""Tiny models of any class of transformers: their checkpoints, and what each rank does for test_any_model.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mega_rl.types import Experience
from mega_rl.verify.layouts import TRANSFORMERS, Layout, LayoutErrors, Plan, fsdp
from tests.helpers.distributed import run_ranks

VOCAB = 128
# Fields where a class's defaults leave out what makes the family.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
}


def small_config(model_type: str) -> Any:
    """The shrunk config of a class."""
    from transformers import CONFIG_MAPPING

    from mega_rl.converters.hf.small import shrink

    return shrink(CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {})))


def write_model(folder: Path, model_type: str, *, seed: int = 0) -> None:
    """A checkpoint as transformers writes it."""
    from mega_rl.converters.hf.small import random_model

    model = random_model(small_config(model_type), attention="eager", device=torch.device("cpu"), seed=seed)
    model.save_pretrained(folder)


def measured(root: Path, families: list[str], *, ranks: int = 1) -> dict[str, LayoutErrors | str]:
    """Each family's errors on the FSDP engine against transformers' own model, or why there are none."""
    why = run_ranks(1, measure_all, str(root), families, TRANSFORMERS, timeout_s=1200)[0]
    layout, rest = fsdp(ranks), [family for family in families if family not in why]
    why |= run_ranks(ranks, measure_all, str(root), rest, layout, timeout_s=1200)[0]
    return {family: why.get(family) or LayoutErrors.read(plan_of(root / family).answer(layout)) for family in families}


def plan_of(folder: Path, *layouts: Layout) -> Plan:
    return Plan(str(folder), str(folder), layouts, reference=TRANSFORMERS, timeout_s=60.0)


def measure_all(rank: int, root: str, families: list[str], layout: Layout) -> dict[str, str]:
    """Measure every family; why, where one fails."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.verify.measure import measure

    why = {}
    for family in families:
        try:
            measure(plan_of(Path(root) / family, layout), accelerator)
        except Exception as error:
            why[family] = f"{type(error).__name__}: {error}"[:500]
    return why


def logprobs_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[n - 1] of the tokens after the first, the row by itself."""
    logits = model(tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@torch.no_grad()
def near(model: Any, batch: Experience) -> Experience:
    """The batch with old log-probs around the model's own, where ratios are like those of a run."""
    own = torch.zeros(batch.tokens.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        own[row, 1:length] = logprobs_of(model, batch.tokens[row, :length])
    batch.old_logprobs = (own + batch.old_logprobs + 3) * batch.loss_mask
    return batch


def judge_loss(model: Any, batch: Experience) -> torch.Tensor:
    """The clipped policy loss, row by row, without padding."""
    total = torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[row, :length]
        logprobs = logprobs_of(model, tokens)
        old, advantage, weight, mask = (
            getattr(batch, name)[row, 1:length] for name in ("old_logprobs", "advantages", "loss_weights", "loss_mask")
        )
        ratio = (logprobs - old).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        total = total + (policy * weight * mask).sum()
    return total


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change keys of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
