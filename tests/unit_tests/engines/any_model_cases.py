"""Tiny models of any class of transformers: their checkpoints, and what each rank does for test_any_model.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mega_rl.config.schema import (
    Config,
    EngineConfig,
    MicrobatchConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    TrainerConfig,
)
from mega_rl.types import Experience
from tests.helpers.engines import exported, own_rows, running_engine
from tests.helpers.models import random_experience

STEPS, VOCAB = 3, 128
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


def config_of(folder: Path) -> Config:
    return Config(
        engine=EngineConfig(backend="fsdp"),
        model=ModelConfig(path=str(folder), dtype="fp32"),
        optim=OptimConfig(lr=1e-3, weight_decay=0.1, eps=1e-3, clip_grad=0.0),
        rollout=RolloutConfig(backend="none"),
        trainer=TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(max_tokens=64, size=2)),
    )


def train_all(rank: int, root: str, families: list[str]) -> dict[str, Any]:
    """Every family; its message where it fails."""
    results: dict[str, Any] = {}
    for family in families:
        try:
            results[family] = train_one(Path(root) / family)
        except Exception as error:
            results[family] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return results


def train_one(folder: Path) -> dict[str, Any]:
    """Three steps of the engine and of transformers' own model: gradients, and the file against the export."""
    from transformers import AutoModelForCausalLM

    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.engines.fsdp_model import sharded_parameters
    from mega_rl.workers.models import PolicyLoss

    loss = PolicyLoss(PPO(clip_low=0.2, clip_high=0.3), kl=None, kl_estimator=k3)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    judge.get_input_embeddings().padding_idx = None  # a token of rows here like any other, and Helium's is 3
    on_disk = load_file(folder / "model.safetensors")
    result: dict[str, Any] = {"gradients": [], "weights": []}
    with running_engine(config_of(folder)) as engine:
        result |= {"packs": engine.batching.packing, "attention": engine.attention}
        start = exported(engine)
        result["same file"] = start.keys() == on_disk.keys() and all(
            torch.equal(tensor, on_disk[name]) for name, tensor in start.items()
        )
        named = list(judge.named_parameters())
        decays = [p for name, p in named if p.dim() > 1 and not name.endswith("bias")]  # GPT-OSS stacks biases
        others = [p for name, p in named if p.dim() == 1 or name.endswith("bias")]
        adam = torch.optim.AdamW(
            [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.95), eps=1e-3,
        )  # fmt: skip
        for group in adam.param_groups:
            group["betas"] = engine.optimizer.param_groups[0]["betas"]
        for seed in range(STEPS):
            batch = near(judge, random_experience(vocab_size=VOCAB, seed=seed))
            engine.train_minibatch(own_rows(batch, engine), loss, lr=1e-3)
            adam.zero_grad()
            judge_loss(judge, batch).backward()
            expected = {name: p.grad for name, p in judge.named_parameters() if p.grad is not None}
            actual = {
                name: p.grad.full_tensor() for name, p in sharded_parameters(engine.model).items() if p.grad is not None
            }
            square = sum(float((actual[name] - grad).square().sum()) for name, grad in expected.items())
            result["gradients"].append((square / sum(float(g.square().sum()) for g in expected.values())) ** 0.5)
            adam.step()
            result["weights"].append(bring_together(judge, sharded_parameters(engine.model)))
    return result


@torch.no_grad()
def bring_together(judge: Any, ours: dict[str, Any]) -> float:
    """The largest relative difference of a weight, which the judge takes over: state-space models magnify it."""
    worst = 0.0
    for name, theirs in judge.named_parameters():
        own = ours[name].full_tensor()
        worst = max(worst, float((own - theirs).norm() / theirs.norm()))
        theirs.copy_(own)
    return worst


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
