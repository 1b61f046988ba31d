"""Weights of a response's tokens for what sampled them, by the papers: one function for each name in `CORRECTIONS`.

Liu 2025 is "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mega_rl.verify.rl.independent.losses import ResponseTokens
from mega_rl.verify.rl.independent.records import NamedSettings


def uncorrected(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return weights of 1."""
    return torch.ones_like(tokens.anchor)


def truncated(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return min(p_old / p_rollout, cap) of each token, or of the whole response (Yao et al. 2025)."""
    log_ratio = tokens.anchor - tokens.rollout
    if choice.words["level"] == "sequence":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    return torch.exp(log_ratio).clamp(max=choice["cap"])


def within_band(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return p_old / p_rollout of each token inside [low, high], else 0 (IcePop, arXiv:2510.18855)."""
    ratio = torch.exp(tokens.anchor - tokens.rollout)
    return torch.where((ratio >= choice["low"]) & (ratio <= choice["high"]), ratio, 0.0)


def by_geometric_mean(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 1 for responses whose geometric mean of p_old / p_rollout is inside [low, high], else 0 (Liu 2025)."""
    return _accepted(float((tokens.anchor - tokens.rollout).mean().exp()), tokens, choice)


def by_product(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 1 for responses whose p_old / p_rollout is inside [low, high], else 0 (Liu 2025)."""
    return _accepted(float((tokens.anchor - tokens.rollout).sum().exp()), tokens, choice)


def _accepted(ratio: float, tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    weight = 1.0 if choice["low"] <= ratio <= choice["high"] else 0.0
    return weight * torch.ones_like(tokens.anchor)


def bad_and_distant(tokens: ResponseTokens, choice: NamedSettings) -> Tensor:
    """Return 0 where A < 0 in responses with a mean log(p_rollout / p) above delta (OPSM, arXiv:2512.02556)."""
    distance = float((tokens.rollout - tokens.logprobs.detach()).mean())
    leaves_out = tokens.advantages < 0 if distance > choice["delta"] else torch.zeros(len(tokens.anchor)).bool()
    return torch.where(leaves_out, 0.0, torch.ones_like(tokens.anchor))


# Name -> (formula, the settings that it reads).
CORRECTIONS: Mapping[str, tuple[Callable[[ResponseTokens, NamedSettings], Tensor], frozenset[str]]] = {
    "none": (uncorrected, frozenset()),
    "tis": (truncated, frozenset({"level", "cap"})),
    "icepop": (within_band, frozenset({"low", "high"})),
    "geometric_rejection": (by_geometric_mean, frozenset({"low", "high"})),
    "sequence_rejection": (by_product, frozenset({"low", "high"})),
    "opsm": (bad_and_distant, frozenset({"delta"})),
}
