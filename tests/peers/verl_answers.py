"""What verl's own functions return for a batch.

Three packages that verl imports and none of its functions here calls are stood in for: ray (cluster), codetiming (a
timer), orjson (a logger's encoder). Whatever is called of them raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.peers.batch import Batch

STOOD_IN = ("ray", "codetiming", "orjson")

Answer = dict[str, Tensor]


class _StandIn(ModuleType):
    """A module of which only classes can be named."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _refuse})


def _refuse(self: object, *_: object, **__: object) -> None:
    raise NotImplementedError(f"{type(self).__name__} of a package that is stood in for")


for _name in STOOD_IN:
    sys.modules[_name] = _StandIn(_name)
    sys.modules[_name].__spec__ = ModuleSpec(_name, None)

from verl.protocol import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.reward_manager.dapo import DAPORewardManager  # noqa: E402


def answers(batch: Batch) -> dict[str, Answer]:
    """Return values, and gradients by log-probs or values, by name."""
    return {**advantages(batch), **losses(batch), **others(batch), **corrections(batch)}


def advantages(batch: Batch) -> dict[str, Answer]:
    """Return advantages [ROWS, WIDTH] of every estimator, and the value targets of GAE."""
    mask, rewards, index = batch.mask.double(), batch.token_rewards, batch.prompts.numpy()
    # verl adds up the rewards of tokens, which is the reward itself only without a KL
    bare = torch.zeros_like(rewards)
    bare[:, 0] = batch.rewards
    config = AlgoConfig(gamma=0.9)
    grouped: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "rloo": core_algos.compute_rloo_outcome_advantage,
        "rloo vectorized": core_algos.compute_rloo_vectorized_outcome_advantage,
        "opo": core_algos.compute_opo_outcome_advantage,
        "reinforce++ baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    results = {name: {"value": function(bare.clone(), mask, index)[0]} for name, function in grouped.items()}
    for std in (True, False):
        value, _ = core_algos.compute_grpo_outcome_advantage(bare, mask, index, norm_adv_by_std_in_grpo=std)
        results[f"grpo std={std}"] = {"value": value}
    whitened, returns = core_algos.compute_gae_advantage_return(rewards, batch.values, mask, gamma=0.9, lam=0.8)
    results["gae"] = {"value": whitened, "returns": returns}
    plus_plus, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)
    remax, _ = core_algos.compute_remax_outcome_advantage(rewards, batch.greedy, mask)
    return {
        **results,
        "reinforce++": {"value": plus_plus},
        "remax": {"value": remax},
        "gdpo": {"value": _gdpo(batch)},
    }


def _gdpo(batch: Batch) -> Tensor:
    names = ["correct", "form"]
    config = AlgoConfig(gdpo_reward_keys=names, gdpo_reward_weights=[1.0, 0.3])
    value, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros_like(batch.old),
        batch.mask.double(),
        batch.prompts.numpy(),
        config=config,
        non_tensor_batch={name: part.numpy() for name, part in zip(names, batch.parts.unbind(1), strict=True)},
        batch={"prompts": torch.zeros(len(batch.mask), 1), "attention_mask": _attention(batch)},
    )
    return value


def _attention(batch: Batch) -> Tensor:
    """[ROWS, 1 + WIDTH] int64: a prompt of one token, and the response up to its last token."""
    upto = batch.mask.flip(1).cumsum(1).flip(1) > 0
    return torch.cat([torch.ones(len(upto), 1, dtype=torch.bool), upto], dim=1).long()


def actor(**changes: Any) -> ActorConfig:
    """Return the settings of a loss."""
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **changes)


def losses(batch: Batch) -> dict[str, Answer]:
    """Return every policy loss with its gradient."""
    token = batch.advantages
    response = torch.where(batch.mask, batch.response_advantages[:, None], 0.0)
    cases: dict[str, tuple[str, Tensor, ActorConfig]] = {
        "ppo": ("vanilla", token, actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)),
        "gspo": ("gspo", token, actor(clip_ratio_low=0.1, clip_ratio_high=0.2)),
        "gmpo": ("geo_mean", response, actor(clip_ratio_low=0.3, clip_ratio_high=0.2)),
        "cispo": ("cispo", token, actor(clip_ratio_low=1.0, clip_ratio_high=0.3)),
        "sapo": ("sapo", token, actor(tau_pos=1.5, tau_neg=2.5)),
        "dppo_tv": ("dppo_tv", token, _divergence(0.05)),
        "dppo_kl": ("dppo_kl", token, _divergence(0.01)),
    }
    results = {name: policy_loss(batch, *case) for name, case in cases.items()}
    weights = rollout_corr_helper.compute_rollout_correction_weights(batch.old - batch.rollout, batch.mask)[0]
    results["ppo with tis"] = policy_loss(batch, *cases["ppo"], rollout_is_weights=weights)
    rejected = rollout_corr_helper.compute_rollout_rejection_mask(
        batch.old - batch.rollout, batch.mask.double(), rollout_rs="seq_mean_k1", rollout_rs_threshold="0.92_1.06"
    )[0]
    results["ppo with rejection"] = policy_loss(batch, *cases["ppo"], mask=rejected)
    for name in ("clip_cov", "kl_cov"):
        results[name] = covariance_loss(batch, name)
    return results


def _divergence(threshold: float) -> ActorConfig:
    return actor(clip_ratio_low=threshold, clip_ratio_high=threshold, clip_ratio_c=1.4)


def policy_loss(
    batch: Batch,
    name: str,
    advantages: Tensor,
    config: ActorConfig,
    *,
    mask: Tensor | None = None,
    mode: str = "token-mean",
    **more: Tensor,
) -> Answer:
    """Return a loss of verl's registry and its gradient by log-probs."""
    leaf = batch.logprobs.clone().requires_grad_()
    mask = batch.mask.double() if mask is None else mask
    function = core_algos.get_policy_loss_fn(name)
    loss, _ = function(batch.old, leaf, advantages, mask, loss_agg_mode=mode, config=config, **more)
    loss.backward()
    return {"value": loss.detach(), "gradient": leaf.grad}


def covariance_loss(batch: Batch, name: str) -> Answer:
    """Return clip-cov or kl-cov of one response, whose mean is verl's batch mean."""
    leaf, old, advantages = (x[None].contiguous() for x in batch.row.unbind(1))
    leaf.requires_grad_()
    chosen = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": math.inf, "kl_cov_ratio": 0.25}
    config = actor(policy_loss=PolicyLossConfig(**chosen, ppo_kl_coef=0.7))
    loss, _ = core_algos.get_policy_loss_fn(name)(old, leaf, advantages, torch.ones_like(old), "token-mean", config)
    loss.backward()
    return {"value": loss.detach(), "gradient": leaf.grad}


def others(batch: Batch) -> dict[str, Answer]:
    """Return aggregations, the critic's loss, KL estimators and the punishment of long responses."""
    mask = batch.mask.double()
    mask[3] = 0.0  # a response that is left out
    results = {}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        leaf = batch.values.clone().requires_grad_()
        loss = core_algos.agg_loss(leaf, mask, mode, loss_scale_factor=20)
        loss.backward()
        results[mode] = {"value": loss.detach(), "gradient": leaf.grad}
    values = batch.values.clone().requires_grad_()
    loss, cut = core_algos.compute_value_loss(values, batch.returns, batch.old_values, batch.mask.double(), 0.5)
    loss.backward()
    results["value loss"] = {"value": loss.detach(), "gradient": values.grad, "cut": cut}
    for name in ("k1", "k2", "k3", "k1+", "k3+"):
        leaf = batch.logprobs.clone().requires_grad_()
        estimate = core_algos.kl_penalty(leaf, batch.reference, name)
        estimate.sum().backward()
        results[name] = {"value": estimate.detach(), "gradient": leaf.grad}
    results["overlong"] = {"value": overlong(batch)}
    return results


def overlong(batch: Batch) -> Tensor:
    """Return DAPO's punishment of each response as its reward, at a limit of 14 tokens with a buffer of 5."""
    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="end"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=14,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=5, penalty_factor=1.0, log=False),
    )
    rows = len(batch.mask)
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(rows, 1, dtype=torch.int64),
            "responses": torch.zeros(batch.mask.shape, dtype=torch.int64),
            "attention_mask": _attention(batch),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * rows, dtype=object),
            "data_source": np.array(["any"] * rows, dtype=object),
            "extra_info": np.array([{} for _ in range(rows)], dtype=object),
        },
    )
    return manager(data).sum(dim=1)


def corrections(batch: Batch) -> dict[str, Answer]:
    """Return weights of tokens; bounds of rejections are of pi_rollout over pi_old."""
    log_ratio, mask = batch.old - batch.rollout, batch.mask.double()
    weights = rollout_corr_helper.compute_rollout_correction_weights
    rejection = rollout_corr_helper.compute_rollout_rejection_mask
    return {
        "tis token": {"value": weights(log_ratio, mask, "token", 1.2)[0]},
        "tis sequence": {"value": weights(log_ratio, mask, "sequence", 1.2)[0]},
        "icepop": {"value": weights(log_ratio, mask, "token", "0.8_1.25")[0]},
        "geometric rejection": {"value": rejection(log_ratio, mask, "seq_mean_k1", "0.92_1.06")[0]},
        "sequence rejection": {"value": rejection(log_ratio, mask, "seq_sum_k1", "0.6_1.5")[0]},
    }
