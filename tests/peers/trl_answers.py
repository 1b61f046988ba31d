"""What TRL's own functions return for a batch.

Losses, advantages and importance weights are parts of methods of trainers. The methods are called unbound, with a
namespace of the settings that they read; log-probs come from the batch in the place of a model.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.peers.batch import SAMPLES, Batch, vocabulary

Answer = dict[str, Tensor]


def answers(batch: Batch) -> dict[str, Answer]:
    """Return values, and gradients by log-probs or logits, by name."""
    return {**losses(batch), **advantages(batch), **corrections(batch), **divergences(), "overlong": overlong(batch)}


def trainer(logprobs: Tensor | None = None, **settings: Any) -> SimpleNamespace:
    """Return what the methods of a trainer read, with TRL's defaults where a case has no other."""
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.5,
        "sapo_temperature_neg": 2.5,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing_kwargs": None,
        "per_device_train_batch_size": 1,
    }
    args.update({name: settings.pop(name) for name in list(settings) if name in args})
    own: dict[str, Any] = {
        "args": SimpleNamespace(**args),
        "accelerator": SimpleNamespace(
            num_processes=1,
            process_index=0,
            device=torch.device("cpu"),
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 20,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    return SimpleNamespace(**(own | settings))


def losses(batch: Batch) -> dict[str, Answer]:
    """Return every loss type with its gradient, most of them with an advantage for each token."""
    token, response = batch.advantages, batch.response_advantages
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2}
    cases: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "grpo": (token, {"loss_type": "grpo"}),
        "bnpo": (token, {"loss_type": "bnpo"}),
        "dr_grpo": (token, {"loss_type": "dr_grpo"}),
        "dapo": (token, {"loss_type": "dapo"}),
        "cispo": (token, {"loss_type": "cispo", "epsilon_high": 1.3}),
        "sapo": (token, {"loss_type": "sapo"}),
        "gspo": (response, {"loss_type": "grpo", **sequence}),
        "delta": (token, {"loss_type": "dapo", "delta": 1.5}),
        "opsm": (response, {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}),
        "importance": (token, {"loss_type": "dapo", "use_vllm": True}),
        "kl": (token, {"loss_type": "dapo", "beta": 0.3}),
        "corrected kl": (token, {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True}),
    }
    results = {name: loss(batch, GRPOTrainer, advantages, **more) for name, (advantages, more) in cases.items()}
    results["gmpo"] = loss(batch, GMPOTrainer, response, epsilon_low=0.3, epsilon_high=0.2)
    return results


def loss(batch: Batch, cls: type[GRPOTrainer], advantages: Tensor, **settings: Any) -> Answer:
    """Return a loss of a trainer's class, and its gradient by log-probs."""
    leaf = batch.logprobs.clone().requires_grad_()
    blank = torch.zeros(len(batch.mask), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": blank,
        "prompt_mask": blank,
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.int64),
        "completion_mask": torch.ones_like(batch.logprobs),
        "tool_mask": batch.mask.double(),
        "advantages": advantages,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.rollout,
        "ref_per_token_logps": batch.near_reference,
        "importance_sampling_ratio": (batch.old - batch.rollout).exp().clamp(max=1.2),
        "num_items_in_batch": batch.mask.sum(),
    }
    value = cls._compute_loss(trainer(leaf, **settings), None, inputs)
    value.backward()
    return {"value": value.detach(), "gradient": leaf.grad}


def generated(batch: Batch, cls: type, rewards: Tensor, **settings: Any) -> dict[str, Any]:
    """Return what a trainer makes of samples: advantages and importance weights; rewards [ROWS, parts]."""
    lengths = [int(row.nonzero().max()) + 1 for row in batch.mask]

    def ragged(x: Tensor) -> list[list[Any]]:
        return [row[:length].tolist() for row, length in zip(x, lengths, strict=True)]

    tokens = ragged(torch.ones(batch.mask.shape, dtype=torch.int64))
    rows = len(lengths)
    samples: tuple[Any, ...] = ([[1]] * rows, tokens, [""] * rows)
    if cls is GRPOTrainer:
        turns, sampled = ragged(batch.mask.long()), ragged(batch.rollout)
        samples = ([[1]] * rows, tokens, turns, [""] * rows, sampled, {}, None, None)
    names = [str(part) for part in range(rewards.shape[1])]
    width = max(lengths)
    namespace = trainer(
        batch.old[:, :width],
        **{
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "pad_to_multiple_of": None,
            "mask_truncated_completions": False,
            "log_multimodal": False,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "_generate": lambda prompts: samples,
            "_calculate_rewards": lambda *_: rewards.clone(),
            "num_generations": SAMPLES,
            "num_iterations": 1,
            "reward_funcs": names,
            "reward_func_names": names,
            "reward_weights": torch.ones(len(names), dtype=torch.float64),
            "reward_clip_range": None,
            "normalize_advantages": False,
            "multi_objective_aggregation": "sum_then_normalize",
            "scale_rewards": "group",
            "chat_template_kwargs": {},
            "processing_class": SimpleNamespace(batch_decode=lambda *_, **__: [""] * rows),
            "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
            "_pending_extra_logs": defaultdict(list),
            "_pending_metrics": defaultdict(list),
            **settings,
        },
    )
    torch.set_default_dtype(torch.float64)  # of the sampler's log-probs, which are lists
    try:
        return cls._generate_and_score_completions(namespace, [{"prompt": ""}] * rows)
    finally:
        torch.set_default_dtype(torch.float32)


def advantages(batch: Batch) -> dict[str, Answer]:
    """Return advantages [ROWS] of GRPO's three scales, of GDPO and of RLOO."""
    total = batch.rewards[:, None]
    results = {
        f"grpo scale={scale}": generated(batch, GRPOTrainer, total, scale_rewards=scale)
        for scale in ("group", "batch", "none")
    }
    results["gdpo"] = generated(
        batch,
        GRPOTrainer,
        batch.parts,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=torch.tensor([1.0, 0.3], dtype=torch.float64),
    )
    results["rloo"] = generated(batch, RLOOTrainer, total)
    return {name: {"value": samples["advantages"]} for name, samples in results.items()}


def corrections(batch: Batch) -> dict[str, Answer]:
    """Return importance weights of all modes, [ROWS, width] or [ROWS, 1]."""
    modes = {
        "token_truncate": (None, 1.2),
        "token_mask": (0.8, 1.25),
        "sequence_truncate": (None, 1.2),
        "sequence_mask": (0.6, 1.5),
    }
    results = {}
    for mode, (low, high) in modes.items():
        samples = generated(
            batch,
            GRPOTrainer,
            batch.rewards[:, None],
            use_vllm=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        )
        results[mode] = {"value": samples["importance_sampling_ratio"]}
    return results


def divergences() -> dict[str, Answer]:
    """Return GKD's divergence of each token, and its gradient by the student's logits, at temperature 0.7."""
    results = {}
    for beta in (0.0, 0.3, 1.0):
        logits, hidden, weight = vocabulary(5)
        leaf = logits.double().requires_grad_()
        teacher = hidden.double() @ weight.double().t()
        each = GKDTrainer.generalized_jsd_loss(leaf, teacher, beta=beta, temperature=0.7, reduction="none").sum(-1)
        each.sum().backward()
        results[f"divergence {beta}"] = {"value": each.detach(), "gradient": leaf.grad}
    return results


def overlong(batch: Batch) -> Answer:
    """Return DAPO's punishment of each response at a limit of 14 tokens with a buffer of 5."""
    responses = [[1] * int(tokens.sum()) for tokens in batch.mask]
    return {"value": torch.tensor(get_soft_overlong_punishment(14, 5)(responses), dtype=torch.float64)}
