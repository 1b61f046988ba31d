"""Advantages of a step's responses, by the papers: one function per name, listed in `ADVANTAGES`.

A response's advantages are a list with one number for each of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mega_rl.verify.rl.independent import formulas
from mega_rl.verify.rl.independent.formulas import Row, returns_to_go
from mega_rl.verify.rl.independent.records import NamedSettings, ScoredSample


@dataclass(frozen=True)
class Responses:
    """A step's responses with their data from before the first update; lists go over responses."""

    samples: Sequence[ScoredSample]
    rewards: Row  # one per response, with the punishment of overlong ones
    token_rewards: list[Row]  # the same on the last token of each row, less a KL penalty of each token
    turn_rewards: list[Row]  # the same with the scores of turns where they end
    old: list[Row]  # log-probs of the policy
    ref: list[Row]  # log-probs of the reference
    values: list[Row]
    parts: Sequence[Mapping[str, float]]  # parts of the rewards by name, with the punishment of overlong ones
    part_weights: Mapping[str, float]

    def groups(self) -> list[list[int]]:
        """Return the numbers of the responses to each prompt."""
        prompts = [sample.prompt for sample in self.samples]
        return [[i for i, prompt in enumerate(prompts) if prompt == one] for one in sorted(set(prompts))]

    def of_groups(self, judge: Callable[[Row, list[int]], Row], of: Row | None = None) -> Row:
        """Return a number for each response, by `judge` (rewards, lengths) of the responses to one prompt.

        of: numbers of all responses in the place of their rewards.
        """
        numbers, judged_numbers = [0.0] * len(self.samples), self.rewards if of is None else of
        for group in self.groups():
            rewards = [judged_numbers[i] for i in group]
            if max(rewards) == min(rewards):  # nothing to compare, up to rounding
                continue
            judged = judge(rewards, [self.samples[i].length for i in group])
            for i, number in zip(group, judged, strict=True):
                numbers[i] = number
        return numbers

    def to_go(self, numbers: list[Row], gamma: float) -> list[Row]:
        """Return the discounted sum of each token's number and those after it, the mean over the ways from it."""
        samples = zip(self.samples, numbers, strict=True)
        return [mean_of_ways(one, [returns_to_go(way.of(own), gamma) for way in one.ways()]) for one, own in samples]

    def on_every_token(self, numbers: Row) -> list[Row]:
        """Return each response's number on all of its tokens."""
        return [[number] * sample.length for number, sample in zip(numbers, self.samples, strict=True)]


def mean_of_ways(sample: ScoredSample, numbers: Sequence[Row]) -> Row:
    """Return for each token the mean of its numbers in the ways that lead over it."""
    shares, sums = [0.0] * sample.length, [0.0] * sample.length
    for way, own in zip(sample.ways(), numbers, strict=True):
        for token, number in zip(way.tokens, own, strict=True):
            shares[token] += way.share
            sums[token] += way.share * number
    return [total / share for total, share in zip(sums, shares, strict=True)]


def centred(rewards: Row, lengths: list[int]) -> Row:
    """Return the rewards less their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def normalized(rewards: Row, lengths: list[int]) -> Row:
    """Return the centred rewards divided by their deviation."""
    below = formulas.sample_deviation(rewards) + 1e-6
    return [number / below for number in centred(rewards, lengths)]


def against_others(rewards: Row, lengths: list[int]) -> Row:
    """Return each reward less the mean of the others (RLOO, arXiv:2402.14740)."""
    others = len(rewards) - 1
    return [reward - (sum(rewards) - reward) / others for reward in rewards]


def generalized(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return GAE (arXiv:1506.02438), lambda by the row's length or the policy's own (VAPO, arXiv:2504.05118)."""

    def decay(length: int) -> float:
        if choice["length_alpha"] > 0:
            return max(1 - 1 / (choice["length_alpha"] * length), 0.0)
        return choice["policy_lambda"] or choice["gae_lambda"]

    rows = [advantages for advantages, _ in estimates(responses, choice, decay)]
    return formulas.whitened(rows) if choice["whiten"] else rows


def estimates(responses: Responses, choice: NamedSettings, decay: Callable[[int], float]) -> list[tuple[Row, Row]]:
    """Return GAE's advantages and returns of each response; decay: lambda by tokens of a row.

    With discount_per=turn gamma and lambda are 1 but from one turn to the next.
    """
    every = []
    for sample, rewards, values in zip(responses.samples, responses.turn_rewards, responses.values, strict=True):
        decays = [decay(len(row.places)) for row in sample.rows for _ in row.places]
        judged = []
        for way in sample.ways():
            counts = [ends or choice.words["discount_per"] == "token" for ends in way.ends]
            gammas = [choice["gamma"] if one else 1.0 for one in counts]
            lambdas = [own if one else 1.0 for own, one in zip(way.of(decays), counts, strict=True)]
            judged.append(formulas.gae(way.of(rewards), way.of(values), gammas, lambdas))
        every.append((mean_of_ways(sample, [a for a, _ in judged]), mean_of_ways(sample, [r for _, r in judged])))
    return every


def value_targets(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the critic's targets: the returns of GAE by the critic's own lambda."""
    return [returns for _, returns in estimates(responses, choice, lambda length: choice["gae_lambda"])]


def group_relative(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return (r - mean) / (std + 1e-6) of the prompt's responses (GRPO, arXiv:2402.03300, section 4.1.2).

    std: group; none, which divides by nothing (Dr. GRPO, arXiv:2503.20783); batch, the deviation of centred rewards
    (after Lite PPO, arXiv:2508.08221).
    """
    if choice.words["std"] == "group":
        return responses.on_every_token(responses.of_groups(normalized))
    numbers = responses.of_groups(centred)
    below = formulas.sample_deviation(numbers) + 1e-6 if choice.words["std"] == "batch" else 1.0
    return responses.on_every_token([number / below for number in numbers])


def parts_relative(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the weighted sum of the parts' own group-relative advantages, normalised over the batch.

    Source: GDPO, arXiv:2601.05242, section 3; deviations and what is added to them are those of `group_relative`.
    """
    totals = [0.0] * len(responses.samples)
    for name in responses.parts[0]:
        numbers = responses.of_groups(normalized, of=[parts[name] for parts in responses.parts])
        weight = responses.part_weights.get(name, 1.0)
        totals = [total + weight * number for total, number in zip(totals, numbers, strict=True)]
    return responses.on_every_token(normalized(totals, []))


def leave_one_out(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the reward less the mean of the prompt's other responses (RLOO, arXiv:2402.14740)."""
    return responses.on_every_token(responses.of_groups(against_others))


def whitened_returns(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the returns of token rewards, whitened over the batch (REINFORCE++, arXiv:2501.03262)."""
    return formulas.whitened(responses.to_go(responses.turn_rewards, choice["gamma"]))


def whitened_centred_returns(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the same, undiscounted, of rewards less the prompt's mean (with a baseline, arXiv:2501.03262)."""
    baselines = [a - b for a, b in zip(responses.rewards, responses.of_groups(centred), strict=True)]
    rows = responses.to_go(responses.token_rewards, 1.0)
    return formulas.whitened([[one - base for one in row] for row, base in zip(rows, baselines, strict=True)])


def less_greedy(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return token rewards to go, less the reward of the prompt's greedy response (ReMax, arXiv:2310.10505)."""
    rows = zip(responses.samples, responses.to_go(responses.token_rewards, 1.0), strict=True)
    return [[number - sample.greedy_reward for number in numbers] for sample, numbers in rows]


def optimal_baseline(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return the reward less the prompt's mean reward weighted by length (OPO, arXiv:2505.23585)."""

    def judged(rewards: Row, lengths: list[int]) -> Row:
        baseline = sum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
        return [reward - baseline for reward in rewards]

    return responses.on_every_token(responses.of_groups(judged))


def pass_at_k(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return pass@k advantages by analytical derivation (arXiv:2508.10751); one right response makes a set right."""
    k = int(choice["k"])

    def judged(rewards: Row, lengths: list[int]) -> Row:
        n, wrong = len(rewards), sum(reward <= choice["right_above"] for reward in rewards)
        mean = 1 - math.comb(wrong, k) / math.comb(n, k)
        if mean in (0.0, 1.0):  # all sets are wrong, or all are right
            return [0.0] * n
        below = math.sqrt(mean * (1 - mean)) if choice.words["std"] == "group" else 1.0
        of_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        return [((1.0 if reward > choice["right_above"] else of_wrong) - mean) / below for reward in rewards]

    return responses.on_every_token(responses.of_groups(judged))


def teacher_advantages(responses: Responses, choice: NamedSettings) -> list[Row]:
    """Return each token's discounted sum of log q - log p from it on (q: teacher).

    Reverse KL on the student's own samples (GKD, arXiv:2306.13649), with reward_weight times the reward less the mean
    of the prompt's other responses.
    """
    rewards = responses.of_groups(against_others) if choice["reward_weight"] else [0.0] * len(responses.samples)
    models = zip(responses.old, responses.ref, strict=True)
    gaps = [[q - p for p, q in zip(student, teacher, strict=True)] for student, teacher in models]
    later = zip(responses.to_go(gaps, choice["gamma"]), rewards, strict=True)
    return [[gap + choice["reward_weight"] * reward for gap in row] for row, reward in later]


# Name -> (formula, the settings that it reads).
ADVANTAGES: Mapping[str, tuple[Callable[[Responses, NamedSettings], list[Row]], frozenset[str]]] = {
    "gae": (generalized, frozenset({"discount_per", "gamma", "gae_lambda", "policy_lambda", "length_alpha", "whiten"})),
    "grpo": (group_relative, frozenset({"std"})),
    "gdpo": (parts_relative, frozenset()),
    "rloo": (leave_one_out, frozenset()),
    "reinforce_plus_plus": (whitened_returns, frozenset({"gamma"})),
    "reinforce_plus_plus_baseline": (whitened_centred_returns, frozenset()),
    "remax": (less_greedy, frozenset()),
    "opo": (optimal_baseline, frozenset()),
    "pass_at_k": (pass_at_k, frozenset({"k", "right_above", "std"})),
    "distillation": (teacher_advantages, frozenset({"gamma", "reward_weight"})),
}
