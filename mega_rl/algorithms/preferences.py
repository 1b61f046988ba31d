"""Kinds of training, and the losses of given answers: pairs, labelled answers, scores of a reward model.

A row's number is the sum of its tokens' log-probs (or its score), so rows of a pair share a micro-batch. Notation:
log p of the policy and log q of the reference are sums over an answer, |y| is its number of tokens, d and n stand for
the chosen (desired) and the rejected answer, s is the logistic function. Recipes choose by `algorithm.kind`. Config
reads this file without torch, so a loss imports it when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mega_rl.config.setting import Kind, by_name, setting

if TYPE_CHECKING:
    from torch import Tensor

    from mega_rl.algorithms.statistics import Sequences
    from mega_rl.types import LossOutput


class TrainingKind(Kind):
    """A kind of training: what its rows are, and what it needs of a run."""

    form: ClassVar[str] = "prompts"  # its rows: "prompts", "answers", "labelled" answers or "pairs"
    rows: ClassVar[int] = 1  # sequences of each row that train together
    train_on: str = "assistant"  # tokens of a given answer that train: all turns of the assistant, its last one, or all
    reference: str = ""  # when log-probs of the reference are computed: "step", "once", or "" without one
    scores: ClassVar[bool] = False  # trains a score of whole rows in place of log-probs
    compares: ClassVar[bool] = False  # needs the mean log-ratio of answers to other prompts


@dataclass(frozen=True)
class FromSamples(TrainingKind):
    """Reinforcement learning from the policy's own samples: `mega-rl train`."""

    name = "rl"


@dataclass(frozen=True)
class Supervised(TrainingKind):
    """Maximum likelihood of given answers: `mega-rl sft`."""

    name = "sft"
    form: ClassVar[str] = "answers"

    train_on: str = setting(
        "assistant",
        "Tokens that train: all turns of the assistant, its last one, or every token.",
        choices=("assistant", "last", "all"),
    )


@dataclass(frozen=True)
class Answers:
    """Numbers of answers, [n] float32: sums of log-probs or scores with gradient, the others without."""

    logprobs: Tensor
    ref_logprobs: Tensor  # 0 without a reference
    tokens: Tensor  # |y|, at least 1

    @property
    def log_ratio(self) -> Tensor:
        """Return log p - log q."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean(self) -> Tensor:
        """Return log p / |y|."""
        return self.logprobs / self.tokens


# (loss of each unit to be minimised, reward of the chosen or only answers, reward of the rejected ones)
UnitLoss = tuple["Tensor", "Tensor", "Tensor"]


def _minus_log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import softplus

    return softplus(-x)


@dataclass(frozen=True)
class PairKind(TrainingKind):
    """A loss of pairs; `losses` gets chosen and rejected answers and margins [n]."""

    form: ClassVar[str] = "pairs"
    rows: ClassVar[int] = 2

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        """Return the loss of each pair and the rewards of its answers, [n] each."""
        raise NotImplementedError


_BETA = "Weight of the distance to the reference; smaller lets the policy move further."
_WHEN = "Compute the reference's log-probs in every step, or once before the first (memory: 8 bytes a pair)."


@dataclass(frozen=True)
class DPO(PairKind):
    """Direct preference optimisation, with the label smoothing e of conservative DPO.

        x    = beta * ((log p_d - log q_d) - (log p_n - log q_n))
        loss = -(1 - e) * log s(x) - e * log s(-x)

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3.
    """

    name = "dpo"

    beta: float = setting(0.1, _BETA, above=0.0)
    label_smoothing: float = setting(0.0, "Share of pairs that are taken to be swapped.", min=0.0, max=0.5)
    reference: str = setting("step", _WHEN, choices=("step", "once"))

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        rewards = self.beta * chosen.log_ratio, self.beta * rejected.log_ratio
        x, e = rewards[0] - rewards[1], self.label_smoothing
        return (1 - e) * _minus_log_sigmoid(x) + e * _minus_log_sigmoid(-x), *rewards


@dataclass(frozen=True)
class IPO(PairKind):
    """Identity preference optimisation.

        loss = ((log p_d - log q_d) - (log p_n - log q_n) - 1 / (2 beta))^2

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17. It has sums over an answer, as here; others take means.
    """

    name = "ipo"

    beta: float = setting(0.1, _BETA, above=0.0)
    reference: str = setting("step", _WHEN, choices=("step", "once"))

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        loss = (chosen.log_ratio - rejected.log_ratio - 1 / (2 * self.beta)).square()
        return loss, self.beta * chosen.log_ratio, self.beta * rejected.log_ratio


@dataclass(frozen=True)
class SimPO(PairKind):
    """Simple preference optimisation: mean log-probs, a target margin, no reference.

        loss = -log s(beta * log p_d / |y_d| - beta * log p_n / |y_n| - gamma)

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """

    name = "simpo"

    beta: float = setting(2.0, "Scale of the mean log-probs.", above=0.0)
    gamma: float = setting(1.0, "Target margin of the rewards.", min=0.0)

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        rewards = self.beta * chosen.mean, self.beta * rejected.mean
        return _minus_log_sigmoid(rewards[0] - rewards[1] - self.gamma), *rewards


@dataclass(frozen=True)
class ORPO(PairKind):
    """Odds-ratio preference optimisation: likelihood of the chosen answer and log odds ratio, no reference.

        odds(y) = P / (1 - P), log P = log p / |y|
        loss    = -log p_d / |y_d| - beta * log s(log odds(d) - log odds(n))

    Source: Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; beta is its lambda.
    """

    name = "orpo"

    beta: float = setting(0.1, "Weight of the odds ratio.", above=0.0)

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        import torch

        odds = [one.mean - torch.log1p(-one.mean.clamp(max=-1e-7).exp()) for one in (chosen, rejected)]
        loss = self.beta * _minus_log_sigmoid(odds[0] - odds[1]) - chosen.mean
        return loss, self.beta * chosen.mean, self.beta * rejected.mean


@dataclass(frozen=True)
class RewardModel(PairKind):
    """Bradley-Terry: the chosen answer scores above the rejected one by the row's margin.

        loss = -log s(r_d - r_n - margin) + center * (r_d + r_n)^2

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2; center:
    Eisenstein et al. 2023, arXiv:2312.09244, eq. 2.
    """

    name = "rm"
    scores: ClassVar[bool] = True

    center: float = setting(0.0, "Weight of the squared sum of a pair's scores, which keeps them near 0.", min=0.0)

    def losses(self, chosen: Answers, rejected: Answers, margin: Tensor) -> UnitLoss:
        rewards = chosen.logprobs, rejected.logprobs
        loss = _minus_log_sigmoid(rewards[0] - rewards[1] - margin)
        return loss + self.center * (rewards[0] + rewards[1]).square(), *rewards


@dataclass(frozen=True)
class KTO(TrainingKind):
    """Kahneman-Tversky optimisation of labelled answers.

        r    = log p - log q
        z    = max(0, mean of r over the step's prompts, each with the answer of the next one)
        loss = desirable_weight * (1 - s(beta * (r - z))), of desired answers
               undesirable_weight * (1 - s(beta * (z - r))), of the others

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8 and section 4.1.
    """

    name = "kto"
    form: ClassVar[str] = "labelled"
    compares: ClassVar[bool] = True

    beta: float = setting(0.1, _BETA, above=0.0)
    desirable_weight: float = setting(1.0, "Weight of desired answers.", min=0.0)
    undesirable_weight: float = setting(1.0, "Weight of the others.", min=0.0)
    reference: str = setting("step", _WHEN.split(",")[0] + ".", choices=("step",))

    def losses(self, answers: Answers, sign: Tensor, z: Tensor) -> UnitLoss:
        """Return each answer's loss and its reward, as desired and undesired; sign [n]: 1 or -1."""
        x = self.beta * (answers.log_ratio - z)
        weight = self.desirable_weight * (sign > 0) + self.undesirable_weight * (sign <= 0)
        reward = self.beta * answers.log_ratio
        return weight * (1 - (sign * x).sigmoid()), reward * (sign > 0), reward * (sign <= 0)


TRAININGS = by_name(FromSamples, Supervised, DPO, IPO, SimPO, ORPO, KTO, RewardModel)


def preference_loss(
    kind: TrainingKind,
    outputs: Tensor,
    *,
    ref_logprobs: Tensor,
    worth: Tensor,
    baseline: Tensor,
    loss_weights: Tensor,
    sequences: Sequences,
) -> LossOutput:
    """Return the loss of pairs or labelled answers on one micro-batch, a share of the mini-batch's.

    All tensors have one shape, packed or padded, float32. outputs: log-probs with gradient, or scores of one token for
    each row. worth, baseline: a row's number on each of its tokens: worth is the margin of a pair or the sign of a
    labelled answer, baseline the z of KTO. loss_weights: 1 / (rows of the mini-batch * |y|). Rows 2k and 2k + 1 of a
    rank's mini-batch are a pair, chosen first.

    sums, weighted as the loss: preference/loss, preference/accuracy (reward of the chosen above the rejected, or of a
    labelled answer on its side of z), preference/chosen_reward, preference/rejected_reward, preference/margin.
    """
    from mega_rl.types import LossOutput

    active = sequences.rows > 0
    tokens = sequences.sum(active.float()).clamp(min=1.0)

    def of_rows(x: Tensor) -> Tensor:
        return sequences.sum(x.where(active, 0.0))

    def answers(rows: Callable[[Tensor], Tensor]) -> Answers:
        return Answers(rows(sums), rows(refs), rows(tokens))

    sums, refs, worths = of_rows(outputs), of_rows(ref_logprobs), of_rows(worth) / tokens
    if isinstance(kind, KTO):
        z = of_rows(baseline) / tokens
        unit, chosen, rejected = kind.losses(answers(lambda x: x), worths, z)
        right = (worths * (sums - refs - z) > 0).float()
    else:
        assert isinstance(kind, PairKind), f"{kind} is not a loss of given answers"
        pairs = kind.losses(answers(lambda x: x[0::2]), answers(lambda x: x[1::2]), worths[0::2])
        unit, chosen, rejected = (x.repeat_interleave(2) for x in pairs)
        right = (chosen > rejected).float()

    def mean(column: Tensor) -> Tensor:
        return (loss_weights * sequences.spread(column)).sum()

    loss = mean(unit)
    metrics = {
        "preference/loss": loss,
        "preference/accuracy": mean(right),
        "preference/chosen_reward": mean(chosen),
        "preference/rejected_reward": mean(rejected),
        "preference/margin": mean(chosen - rejected),
    }
    return LossOutput(loss=loss, sums={name: value.detach() for name, value in metrics.items()})
