"""Rules that look for the symptoms of docs/debugging.md, "It diverges", in the metrics of a run. Pure functions.

A rule gets the histories of all metrics and returns the signs that it sees, each with a metric and a step. Limits are
wide: a warning is worth reading, and a run without one may still go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from mega_rl.report import signs
from mega_rl.report.history import Histories, history_of
from mega_rl.report.runs import Series
from mega_rl.storage.strict_json import JsonFields

PAGE = "docs/debugging.md, It diverges"
LOOKS_BACK = 24  # points of a run at which the rules look for symptoms that went away


@dataclass(frozen=True)
class SymptomRule:
    """A symptom of the page, and how metrics show it."""

    name: str
    row: str  # beginning of the symptom's row in docs/debugging.md
    meaning: str
    action: str
    seen_in: Callable[[Histories], Iterator[signs.Sign]]


@dataclass(frozen=True)
class Symptom:
    """A symptom that a rule saw in a run."""

    rule: str
    metric: str
    step: int
    seen: str
    meaning: str
    action: str
    until: int | None = None  # the last step at which it was seen, of a symptom that went away
    page: str = PAGE

    def to_json(self) -> JsonFields:
        """Return the symptom for the page."""
        return asdict(self)


def symptoms_of(series: Mapping[str, Series]) -> list[Symptom]:
    """Return the warnings of a run, in the order of the rules, which is that of the page; those that went away last."""
    now = [*_not_finite(series), *_symptoms(series)]
    shown = {symptom.rule for symptom in now}
    past: dict[str, Symptom] = {}
    last = max((one.steps[-1] for one in series.values() if one.steps), default=0)
    for step in sorted({last * part // LOOKS_BACK for part in range(1, LOOKS_BACK)}):
        for symptom in _symptoms({name: one.until(step) for name, one in series.items()}):
            past[symptom.rule] = replace(symptom, until=step)
    return [*now, *(symptom for rule, symptom in past.items() if rule not in shown)]


def _symptoms(series: Mapping[str, Series]) -> list[Symptom]:
    """Return the symptoms at the end of histories."""
    histories = {name: history_of(one.steps, one.values) for name, one in series.items()}
    there = {name: history for name, history in histories.items() if history.values}
    return [
        Symptom(rule.name, metric, step, seen, rule.meaning, rule.action)
        for rule in RULES
        for metric, step, seen in rule.seen_in(there)
    ]


def _not_finite(series: Mapping[str, Series]) -> Iterator[Symptom]:
    """Yield a warning for the metric that was NaN or infinite first: the others follow from it."""
    bad = [
        (step, name, value)
        for name, one in series.items()
        for step, value in zip(one.steps, one.values, strict=True)
        if value != value or value in (float("inf"), float("-inf"))
    ]
    if bad:
        step, name, value = min(bad, key=lambda entry: entry[:2])
        rule = NOT_FINITE
        others = len({entry[1] for entry in bad}) - 1
        seen = f"{value} at step {step}" + (f", and {others} other metrics" if others else "")
        yield Symptom(rule.name, name, step, seen, rule.meaning, rule.action)


NOT_FINITE = SymptomRule(
    "A metric is not finite",
    "a metric is NaN or infinite",
    "An overflow or a division by zero; what is computed after it means nothing.",
    "Go back to a checkpoint before that step (checkpoint.resume=PATH); lower optim.lr; try model.dtype=fp32.",
    lambda histories: iter(()),  # `symptoms_of` looks at values that histories leave out
)

RULES: tuple[SymptomRule, ...] = (
    SymptomRule(
        "Trainer and rollout engine drift apart",
        "`RolloutMismatchError`, or `rollout/logprob_diff_max` far above its first steps",
        "They do not run the same weights, dtype or tokenizer, so every other number is of two policies.",
        "rollout.verify_interval=1 compares checksums at every publish; look at rollout.dtype, "
        "sync/probe_logprob_diff_max; do not raise rollout.mismatch.mean_limit first.",
        signs.logprob_mismatch,
    ),
    SymptomRule(
        "Optimizer steps were skipped",
        "`NonFiniteGradientError`, or `actor/skipped_steps` above 0 time and again",
        "Gradient norms were not finite, or mini-batches had no token that trains. No weight changed in those steps.",
        "Look at actor/trained_tokens, rollout/filtered_fraction, reward/masked_fraction; else at actor/ratio_max, "
        "kl/ref of the step; lower optim.lr; try model.dtype=fp32.",
        signs.skipped_steps,
    ),
    SymptomRule(
        "The gradient norm grows or has spikes",
        "`actor/grad_norm` grows step by step",
        "The learning rate is too high, or a few tokens dominate.",
        "Look at actor/ratio_max and actor/clip_fraction_high; algorithm.loss_settings.dual_clip, optim.warmup_steps, "
        "lower optim.lr.",
        signs.gradient_norm,
    ),
    SymptomRule(
        "Every gradient is clipped",
        "`actor/grad_norm` grows step by step, or is always above `optim.clip_grad`",
        "The size of each update is optim.clip_grad, whatever the gradient says.",
        "Lower optim.lr, or raise optim.clip_grad.",
        signs.clipped,
    ),
    SymptomRule(
        "Updates are too large for their batch",
        "`actor/ppo_kl` or the clip fractions jump",
        "The policy leaves the region in which its samples say something.",
        "Fewer algorithm.epochs, larger trainer.minibatch_size, lower optim.lr.",
        signs.large_updates,
    ),
    SymptomRule(
        "The probability ratio is not near 1",
        "`actor/ratio_mean` is not near 1",
        "Old log-probs are of other weights or another mask.",
        "Look for a mismatch of trainer and rollout engine first: rollout/logprob_diff_max.",
        signs.ratio,
    ),
    SymptomRule(
        "The KL to the reference grows",
        "`kl/ref` grows without end",
        "Nothing holds the policy near the reference.",
        "algorithm.kl.placement, algorithm.kl.coef, algorithm.kl.control=adaptive.",
        signs.kl,
    ),
    SymptomRule(
        "The entropy collapses",
        "`actor/entropy` falls to 0 while the reward stands still",
        "The policy gives one answer whatever it is asked, and samples no longer differ.",
        "algorithm.entropy_coef, rollout.temperature, the KL term; rollout.top_p and rollout.top_k.",
        signs.entropy,
    ),
    SymptomRule(
        "The held-out reward falls while the reward rises",
        "`reward/mean` rises, `val/reward_mean` falls",
        "The reward is gamed, or the prompts are learned by heart.",
        "Read the samples below; more prompts.",
        signs.gamed,
    ),
    SymptomRule(
        "Length and reward grow together",
        "`rollout/response_tokens_mean` grows with `reward/mean`, or `reward/truncated_mean`",
        "Longer reasoning, or a reward that is gamed by length.",
        "Read the samples below; compare rollout/right_response_tokens_mean with the wrong ones'; reward.overlong.",
        signs.length_with_reward,
    ),
    SymptomRule(
        "Truncated responses get more reward than finished ones",
        "`rollout/response_tokens_mean` grows with `reward/mean`, or `reward/truncated_mean`",
        "The reward pays for length.",
        "Read the samples below; reward.overlong, rollout.max_new_tokens.",
        signs.pays_for_length,
    ),
    SymptomRule(
        "Samples of a prompt get equal rewards",
        "`reward/std` is 0, `reward/equal_groups_fraction` is 1",
        "There is nothing to prefer, so nothing is learned.",
        "The reward function, rollout.n, rollout.temperature.",
        signs.equal_rewards,
    ),
    SymptomRule(
        "A part of the reward is never earned",
        "a named part of the reward is 0 in every sample",
        "No sample shows the policy what that part wants. (A punishment that is never given is no fault.)",
        "Easier prompts, a demonstration phase, a reward for half of the way; more samples: rollout.n.",
        signs.part_never_earned,
    ),
    SymptomRule(
        "The policy has stopped exploring",
        "`actor/entropy` at a tenth, groups with equal rewards, a flat held-out reward",
        "The policy repeats what it has found. If the reward can be higher, it will not find the rest.",
        "Look at the named parts of the reward; algorithm.entropy_coef, rollout.temperature, harder prompts.",
        signs.stuck,
    ),
    SymptomRule(
        "Prompts are too easy or too hard",
        "`reward/best_groups_fraction` or `reward/worst_groups_fraction` near 1",
        "Such prompts teach GRPO nothing.",
        "Other prompts, rollout.n, rollout.dynamic_sampling.",
        signs.uniform_groups,
    ),
    SymptomRule(
        "Responses are cut off",
        "`rollout/finished_fraction` is low",
        "The length limit ends them before their answer.",
        "rollout.max_new_tokens, reward.overlong, the stop tokens in the start-up table.",
        signs.truncated,
    ),
    SymptomRule(
        "Responses repeat themselves",
        "`rollout/repeated_fraction` rises",
        "The policy falls into loops.",
        "Read the samples below; actor/entropy, rollout.temperature, the KL term.",
        signs.repeated,
    ),
    SymptomRule(
        "The critic is worse than a constant",
        "`values/explained_variance` far below 0",
        "Advantages point in wrong directions.",
        "optim.critic_lr, algorithm.critic_warmup_steps.",
        signs.critic,
    ),
    SymptomRule(
        "Samples are old",
        "`rollout/staleness_max`, `rollout/stale_tokens_fraction`",
        "Few tokens still speak of the policy that learns.",
        "algorithm.correction=tis; trainer.async_steps=0 to compare.",
        signs.stale,
    ),
)
