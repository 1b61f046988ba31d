"""The learning tasks by name, and their results over seeds."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Settings = Mapping[str, object]


class Measure(NamedTuple):
    """A metric of the trainer, or an exact number over every response of `length` tokens.

    With `beta`: KL(pi || pi*) in nats, pi*(y) ~ ref(y) exp(r(y) / beta); else the policy's expected reward.
    """

    metric: str = ""
    length: int = 1
    beta: float = 0.0
    interval: int = 10  # steps between two points of an exact number


@dataclass(frozen=True)
class Variant:
    """One way to train on a task."""

    name: str
    settings: Settings = field(default_factory=dict)  # over the task's
    ablation: bool = False  # lacks a part, and runs with --ablations only
    noise: float = 0.0  # share of tokens that the sampler draws at random; its log-probs are those of this mixture


class Statement(NamedTuple):
    """The band of a variant is beyond a bound, or apart from a worse variant's."""

    variant: str
    reaches: float = 0.0
    beats: str = ""


@dataclass(frozen=True)
class LearningTask:
    """A task with everything that a run of it needs."""

    name: str
    summary: str
    vocabulary: str  # one token per character
    prompts: Sequence[tuple[str, str]]  # (prompt, answer)
    reward: Callable[..., float]
    settings: Settings
    variants: Sequence[Variant]
    statements: Sequence[Statement]
    measure: Measure
    unit: str  # unit of the measure
    held_out: Sequence[tuple[str, str]] = ()  # (prompt, answer) of greedy validation
    better: str = "higher"  # or "lower"
    stop: str = ""  # the character that ends a response; empty: every response has full length
    final_points: int = 1  # last points of a curve whose mean is the run's result


LETTERS = "abcdefghijklmnop"  # tokens of a response: arms of a bandit
Rows = list[tuple[str, str]]  # (prompt, answer)


def _sizes(*, steps: int, prompts: int, n: int, tokens: int, lr: float) -> dict[str, object]:
    """Return the settings that every task has; a step has one mini-batch."""
    return {
        "trainer.steps": steps,
        "trainer.prompts_per_step": prompts,
        "trainer.minibatch_size": prompts,
        "rollout.n": n,
        "rollout.max_new_tokens": tokens,
        "optim.lr": lr,
    }


def _ranked(letter: str, state: str) -> float:
    """Return a reward of 0 to 1, no smooth function of letter and state."""
    return ((7 * LETTERS.index(letter) + 5 * LETTERS.index(state)) % 16) / 15


# A bandit with a KL penalty: the policy must end at the closed form, pi(a) ~ ref(a) exp(r(a) / beta).
BETA = 0.5


BANDIT = LearningTask(
    name="bandit",
    summary="a KL-constrained bandit ends at ref * exp(reward / beta)",
    vocabulary=LETTERS,
    prompts=[(state, "") for state in "abcd"],
    reward=lambda prompt, response: _ranked(response, prompt),
    settings={
        **_sizes(steps=100, prompts=4, n=128, tokens=1, lr=3e-3),
        **{"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
        **{"algorithm.kl": "loss", "algorithm.kl.coef": BETA},
    },
    variants=[
        Variant("rloo, KL in the loss", {"algorithm.advantage": "rloo"}),
        Variant("grpo, KL in the loss", {"algorithm.advantage": {"name": "grpo", "std": "none"}}),
        Variant(
            "gae, KL in the reward",
            {
                **{"algorithm.advantage": {"name": "gae", "whiten": False}, "algorithm.kl": "reward"},
                "optim.critic_lr": 3e-3,
            },
        ),
        Variant("grpo over the group's deviation", {"algorithm.advantage": "grpo"}, ablation=True),
        Variant("rloo, KL of weight 0", {"algorithm.advantage": "rloo", "algorithm.kl.coef": 0.0}, ablation=True),
    ],
    statements=[
        Statement(name, reaches=0.01)
        for name in ("rloo, KL in the loss", "grpo, KL in the loss", "gae, KL in the reward")
    ],
    measure=Measure(beta=BETA),
    unit="nats to the closed form",
    better="lower",
)

# Delayed credit: without values the reward has a share of lambda^47 = 0.007 in the first token's advantage.
CREDIT_STATES = "01"
CREDIT_LENGTH = 48
POLICY_LAMBDA = 0.9


def credit_reward(prompt: str, response: str) -> float:
    """Return 1 if the first token is one of the state's eight good letters, else 0."""
    first = response[0]
    return float(first in LETTERS and (LETTERS.index(first) + 4 * CREDIT_STATES.index(prompt)) % 16 < 8)


DELAYED_CREDIT = LearningTask(
    name="delayed_credit",
    summary="the first of 48 tokens decides the reward: with lambda 0.9 only a critic can tell",
    vocabulary=LETTERS + CREDIT_STATES,
    prompts=[(state, "") for state in CREDIT_STATES * 2],
    reward=credit_reward,
    settings={
        **_sizes(steps=35, prompts=4, n=16, tokens=CREDIT_LENGTH, lr=1e-3),
        "algorithm.advantage": {"name": "gae", "gae_lambda": 1.0, "policy_lambda": POLICY_LAMBDA},
        "algorithm.critic_warmup_steps": 10,
        "algorithm.epochs": 4,
        "optim.critic_lr": 3e-3,
    },
    variants=[
        Variant("critic"),
        Variant("critic frozen at 0", {"optim.critic_lr": 1e-12}),
        Variant(
            "rloo",  # the same number of policy updates
            {
                **{"trainer.steps": 25, "algorithm.advantage": "rloo"},
                **{"algorithm.critic_warmup_steps": 0, "optim.critic_lr": 1e-5},
            },
            ablation=True,
        ),
    ],
    statements=[Statement("critic", beats="critic frozen at 0"), Statement("critic", reaches=0.9)],
    measure=Measure("reward/mean"),
    unit="mean reward of the last 5 steps",
    final_points=5,
)

# Sorting two digits from scratch: random weights, no demonstrations, only the reward.
DIGITS = "0123456789"
STOP = "."
NUM_HELD_OUT = 20
WRONG_ESTIMATOR = Path(__file__).with_name("neighbours_advantage.py")  # not imported: it imports torch


def sorting_reward(prompt: str, response: str, answer: str, finish: str) -> float:
    """Return 0.2 for two digits and a stop, and 0.4 for each digit at its place."""
    if finish != "stop" or len(response) != 2 or not response.isdigit():
        return 0.0
    return 0.2 + 0.4 * sum(a == b for a, b in zip(response, answer, strict=True))


def _pairs() -> Rows:
    """Return every pair of digits with the pair in order, shuffled."""
    pairs = [a + b for a in DIGITS for b in DIGITS]
    random.Random(0).shuffle(pairs)
    return [(f"{pair}=", "".join(sorted(pair))) for pair in pairs]


SORTING = LearningTask(
    name="sorting",
    summary="GRPO learns to sort two digits from random weights",
    vocabulary=DIGITS + "=" + STOP + "+-*/",
    stop=STOP,
    prompts=_pairs()[NUM_HELD_OUT:],
    held_out=_pairs()[:NUM_HELD_OUT],
    reward=sorting_reward,
    settings={
        **_sizes(steps=200, prompts=32, n=32, tokens=4, lr=2e-3),
        "trainer.minibatch_size": 16,
        "trainer.val_interval": 10,
        "algorithm.advantage": "grpo",
        "algorithm.entropy_coef": 0.15,
        "optim.schedule": "linear",
        "optim.min_lr_ratio": 0.1,
        "optim.warmup_steps": 5,
    },
    variants=[
        Variant("grpo"),
        Variant("advantages of the next row", {"algorithm.advantage": f"{WRONG_ESTIMATOR}:NeighboursAdvantage"}),
    ],
    statements=[Statement("grpo", beats="advantages of the next row"), Statement("grpo", reaches=0.8)],
    measure=Measure("val/reward_mean"),
    unit="held-out reward, greedy, of the last 3 validations",
    final_points=3,
)

# Off-policy noise: with the noisy sampler's second token a precise response earns less than a safe one, with the
# policy's token it earns more. So only a corrected trainer learns the better response.
SAFE = "ab"  # first tokens that make a response safe
SAFE_REWARD = 0.8
NOISE = 0.6  # share of tokens that the sampler draws at random


def off_policy_reward(prompt: str, response: str) -> float:
    """Return the reward of two tokens in a state."""
    return SAFE_REWARD if response[0] in SAFE else _ranked(response[1], prompt)


OFF_POLICY = LearningTask(
    name="off_policy",
    summary="with a sampler that is not the policy, importance sampling finds the better response",
    vocabulary=LETTERS,
    prompts=[(state, "") for state in "abcd"],
    reward=off_policy_reward,
    settings={
        **_sizes(steps=150, prompts=4, n=128, tokens=2, lr=2e-3),
        "algorithm.advantage": "rloo",
        "algorithm.entropy_coef": 0.02,  # keeps both kinds of response in use, so that luck at the start is not the end
        # The noise is on purpose, so the guards against a wrong engine are open.
        "rollout.mismatch.mean_limit": 100.0,
        "rollout.mismatch.share_limit": 1.0,
        "rollout.mismatch.max_limit": 1000.0,
    },
    variants=[
        Variant(
            "sequence TIS", {"algorithm.correction": {"name": "tis", "level": "sequence", "cap": 8.0}}, noise=NOISE
        ),
        Variant("no correction", noise=NOISE),
        Variant("no noise, no correction", ablation=True),
        Variant("token TIS", {"algorithm.correction": {"name": "tis", "cap": 8.0}}, ablation=True, noise=NOISE),
    ],
    statements=[Statement("sequence TIS", beats="no correction"), Statement("sequence TIS", reaches=0.85)],
    measure=Measure(length=2),
    unit="expected reward of the policy",
)

# A reused batch: without a clip the objective is linear in the policy, and its maximum is the batch's luckiest arm.
REUSED_STATES = "abcdefgh"
NUM_ROWS = 40  # rows of each state
BEST_SHARE, SHARE = 0.9, 0.4  # share of rows on which a state's best arm pays, and any other arm
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e6, "dual_clip": 0.0}


def best_arm(state: str) -> str:
    """Return the arm of a state that pays most often."""
    return LETTERS[(5 * REUSED_STATES.index(state) + 3) % len(LETTERS)]


def _reused_rows() -> Rows:
    """Return rows in which every arm pays on exactly its share, each on other rows."""
    shuffled = random.Random(0)
    rows = []
    for state in REUSED_STATES:
        pays = {arm: int(NUM_ROWS * (BEST_SHARE if arm == best_arm(state) else SHARE)) for arm in LETTERS}
        luck = {arm: shuffled.sample(range(NUM_ROWS), count) for arm, count in pays.items()}
        rows += [(state, "".join(arm for arm in LETTERS if row in luck[arm])) for row in range(NUM_ROWS)]
    return rows


REUSED_BATCH = LearningTask(
    name="reused_batch",
    summary="16 updates on every batch: without a clip the policy settles on the luck of a few rows",
    vocabulary=LETTERS,
    prompts=_reused_rows(),
    reward=lambda prompt, response, answer: float(response in answer),  # answer: arms that pay on this row
    settings={
        **_sizes(steps=40, prompts=16, n=16, tokens=1, lr=1e-3),
        "algorithm.advantage": "rloo",
        "algorithm.epochs": 16,
    },
    variants=[
        Variant("clip"),
        Variant("no clip", {"algorithm.loss": NO_CLIP}),
        Variant("no clip, 1 update", {"algorithm.loss": NO_CLIP, "algorithm.epochs": 1}, ablation=True),
    ],
    statements=[Statement("clip", beats="no clip"), Statement("clip", reaches=0.75)],
    measure=Measure(),
    unit="expected reward of the policy",
)

TASKS: dict[str, LearningTask] = {
    task.name: task for task in (BANDIT, DELAYED_CREDIT, SORTING, OFF_POLICY, REUSED_BATCH)
}


MOST_SEEDS = 10
# Quantile 0.975 of Student's t by degrees of freedom, 1 to MOST_SEEDS - 1.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Curve(NamedTuple):
    """Result of one run."""

    seed: int
    points: tuple[tuple[int, float], ...]  # (steps done, value)
    seconds: float

    def final(self, count: int) -> float:
        """Return the mean of the last `count` values."""
        return statistics.fmean(value for _, value in self.points[-count:])


class ConfidenceBand(NamedTuple):
    """A mean over seeds with its 95 % confidence interval; one seed has no width."""

    mean: float
    low: float
    high: float


def band(values: Sequence[float]) -> ConfidenceBand:
    """Return mean -+ t * s / sqrt(n), by Student's t; s is the sample deviation."""
    mean, n = statistics.fmean(values), len(values)
    half = T_975[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return ConfidenceBand(mean, mean - half, mean + half)


@dataclass(frozen=True)
class TaskResult:
    """Curves of a task by variant, one of each seed, with points at the same steps."""

    task: LearningTask
    curves: Mapping[str, Sequence[Curve]]

    @cached_property
    def finals(self) -> dict[str, ConfidenceBand]:
        """Return the band of each variant's result."""
        count = self.task.final_points
        return {name: band([run.final(count) for run in runs]) for name, runs in self.curves.items()}

    @cached_property
    def verdicts(self) -> list[tuple[Statement, str, bool]]:
        """Return each statement in words, and whether it holds."""
        return [(each, *judge(self.task, each, self.finals)) for each in self.task.statements]

    @property
    def holds(self) -> bool:
        """Return whether every statement holds."""
        return all(holds for _, _, holds in self.verdicts)


def judge(task: LearningTask, statement: Statement, finals: Mapping[str, ConfidenceBand]) -> tuple[str, bool]:
    """Return a statement in words, and whether it holds for the final bands of the variants."""
    above, own = task.better == "higher", finals[statement.variant]
    end = own.low if above else own.high  # the worse end of the band
    if statement.beats:
        other = finals[statement.beats]
        return f"beats {statement.beats}, bands apart", end > other.high if above else end < other.low
    sign, holds = (">=", end >= statement.reaches) if above else ("<=", end <= statement.reaches)
    return f"band {sign} {statement.reaches:g}", holds


def record(result: TaskResult) -> dict[str, object]:
    """Return a result for JSON."""
    task = result.task
    return {
        **{"task": task.name, "summary": task.summary, "unit": task.unit, "better": task.better},
        "holds": result.holds,
        "statements": [{"text": f"{each.variant}: {text}", "holds": holds} for each, text, holds in result.verdicts],
        "variants": [
            {
                "name": name,
                "final": result.finals[name]._asdict(),
                "seeds": [
                    {"seed": curve.seed, "seconds": round(curve.seconds, 1), "points": curve.points} for curve in curves
                ],
            }
            for name, curves in result.curves.items()
        ],
    }
