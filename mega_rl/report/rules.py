"""Rules that look for the symptoms of docs/debugging.md, "It diverges", in the metrics of a run. Pure functions.

A rule gets the histories of all metrics and returns the signs that it sees, each with a metric and a step. Limits are
wide: a warning is worth reading, and a run without one may still go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from mega_rl.report.history import Histories, History, correlation, history_of
from mega_rl.report.runs import Series
from mega_rl.storage.strict_json import JsonFields

PAGE = "docs/debugging.md, It diverges"

Sign = tuple[str, int, str]  # metric, step since which it is so, what was seen


@dataclass(frozen=True)
class SymptomRule:
    """A symptom of the page, and how metrics show it."""

    name: str
    row: str  # beginning of the symptom's row in docs/debugging.md
    meaning: str
    action: str
    signs: Callable[[Histories], Iterator[Sign]]


@dataclass(frozen=True)
class Symptom:
    """A symptom that a rule saw in a run."""

    rule: str
    metric: str
    step: int
    seen: str
    meaning: str
    action: str
    page: str = PAGE

    def to_json(self) -> JsonFields:
        """Return the symptom for the page."""
        return asdict(self)


def symptoms_of(series: Mapping[str, Series]) -> list[Symptom]:
    """Return the warnings of a run, in the order of the rules, which is that of the page."""
    histories = {name: history_of(one.steps, one.values) for name, one in series.items()}
    there = {name: history for name, history in histories.items() if history.values}
    symptoms = [
        Symptom(rule.name, metric, step, seen, rule.meaning, rule.action)
        for rule in RULES
        for metric, step, seen in rule.signs(there)
    ]
    return [*_not_finite(series), *symptoms]


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


def _logprob_mismatch(histories: Histories) -> Iterator[Sign]:
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_max"):
        history = histories.get(name)
        if history and history.grows(5.0, above=1e-3):
            yield _growth(name, history)
            return


def _skipped_steps(histories: Histories) -> Iterator[Sign]:
    for name in ("actor/skipped_steps", "critic/skipped_steps"):
        history = histories.get(name)
        if history and max(history.values) > 0:
            total = sum(history.values)
            first = next(s for s, v in zip(history.steps, history.values, strict=True) if v > 0)
            yield name, first, f"{total:g} optimizer steps were not made, the first in step {first}"


def _gradient_norm(histories: Histories) -> Iterator[Sign]:
    for name in ("actor/grad_norm", "critic/grad_norm"):
        history = histories.get(name)
        if not history or not history.has_trend:
            continue
        if history.grows(5.0, above=0.0):
            yield _growth(name, history)
            continue
        late = list(zip(history.values, history.steps, strict=True))[len(history.values) // 5 :]
        spikes = [(value, step) for value, step in late if value > 20 * history.size > 0]
        if spikes:
            value, step = max(spikes)
            yield (
                name,
                spikes[0][1],
                f"{value:.3g} at step {step}, the median is {history.size:.3g}",
            )


def _clipped(histories: Histories) -> Iterator[Sign]:
    name = "actor/grad_clipped_fraction"
    history = histories.get(name)
    if history and history.has_trend and min(history.values[len(history.values) // 2 :]) >= 1.0:
        yield name, history.first_beyond(0.999), "every gradient is scaled down to optim.clip_grad"


def _large_updates(histories: Histories) -> Iterator[Sign]:
    for name, limit in (("actor/clip_fraction_high", 0.3), ("actor/clip_fraction_low", 0.3), ("actor/ppo_kl", 0.1)):
        history = histories.get(name)
        if history and history.has_trend and history.end > limit:
            yield name, history.first_beyond(limit), f"{history.end:.3g} in the last steps, more than {limit:g}"


def _ratio(histories: Histories) -> Iterator[Sign]:
    name = "actor/ratio_mean"
    history = histories.get(name)
    if history and history.has_trend and abs(history.end - 1.0) > 0.1:
        yield name, history.steps[-1], f"{history.end:.3g} in the last steps, not near 1"


def _kl(histories: Histories) -> Iterator[Sign]:
    name = "kl/ref"
    history = histories.get(name)
    if history and history.grows(3.0, above=0.2) and history.end > 1.1 * history.before_end:
        yield _growth(name, history)


def _entropy(histories: Histories) -> Iterator[Sign]:
    name = "actor/entropy"
    history, reward = histories.get(name), histories.get("reward/mean")
    if not history or not history.has_trend or history.end > 0.1 * history.beginning or history.beginning <= 0.0:
        return
    if reward and reward.has_trend and reward.end > _highest_early(reward):
        return  # a task with one right answer needs no entropy once it is solved
    seen = f"{history.end:.3g} from {history.beginning:.3g} nats, and the reward does not rise"
    yield name, history.first_below(0.1 * history.beginning), seen


def _gamed(histories: Histories) -> Iterator[Sign]:
    reward, held_out = histories.get("reward/mean"), histories.get("val/reward_mean")
    if not reward or not held_out or not reward.has_trend or len(held_out.values) < 3:
        return
    best = max(held_out.values)
    spread = max(best - min(held_out.values), 1e-12)
    step = held_out.steps[held_out.values.index(best)]
    later = [v for s, v in zip(reward.steps, reward.values, strict=True) if s >= step]
    if held_out.values[-1] < best - 0.3 * spread and len(later) > 1 and reward.end > later[0]:
        yield "val/reward_mean", step, f"{held_out.values[-1]:.3g} from {best:.3g} at step {step}; reward/mean rises on"


def _length_with_reward(histories: Histories) -> Iterator[Sign]:
    name = "rollout/response_tokens_mean"
    length, reward = histories.get(name), histories.get("reward/mean")
    if length and reward and length.steps == reward.steps and length.grows(2.0, above=0.0):
        together = correlation(length.values, reward.values)
        if together > 0.9:
            yield (
                name,
                length.first_beyond(1.5 * length.beginning),
                (f"{length.end:.3g} from {length.beginning:.3g} tokens, correlation with reward/mean {together:.2f}"),
            )


def _pays_for_length(histories: Histories) -> Iterator[Sign]:
    cut, ended = histories.get("reward/truncated_mean"), histories.get("reward/finished_mean")
    if cut and ended and cut.has_trend and ended.has_trend and cut.end > ended.end:
        seen = f"responses that were cut off get {cut.end:.3g}, those that ended {ended.end:.3g}"
        yield "reward/truncated_mean", cut.steps[-1], seen


def _equal_rewards(histories: Histories) -> Iterator[Sign]:
    yield from _share_above(histories, "reward/equal_groups_fraction", 0.9, "prompts whose samples all got one reward")


def _uniform_groups(histories: Histories) -> Iterator[Sign]:
    yield from _share_above(histories, "reward/best_groups_fraction", 0.8, "prompts that are always answered best")
    yield from _share_above(histories, "reward/worst_groups_fraction", 0.8, "prompts that are never answered well")


def _truncated(histories: Histories) -> Iterator[Sign]:
    yield from _share_above(histories, "rollout/truncated_fraction", 0.2, "responses that the length limit cut off")


def _repeated(histories: Histories) -> Iterator[Sign]:
    name = "rollout/repeated_fraction"
    history = histories.get(name)
    if history and history.grows(3.0, above=0.1):
        yield _growth(name, history)


def _critic(histories: Histories) -> Iterator[Sign]:
    name = "values/explained_variance"
    history = histories.get(name)
    if history and history.has_trend and history.end < -0.2:
        yield name, history.first_below(-0.2), f"{history.end:.3g} in the last steps: worse than a constant"


def _stale(histories: Histories) -> Iterator[Sign]:
    name = "importance/effective_fraction"
    history = histories.get(name)
    if history and history.has_trend and history.end < 0.5:
        yield name, history.first_below(0.5), f"{history.end:.3g}: less than half of the tokens carry the gradient"
    yield from _share_above(histories, "rollout/stale_tokens_fraction", 0.9, "tokens that older weights sampled")


def _share_above(histories: Histories, name: str, limit: float, noun: str) -> Iterator[Sign]:
    history = histories.get(name)
    if history and len(history.values) >= 5 and min(history.values[-5:]) > limit and history.end > limit:
        yield name, history.first_beyond(limit), f"{history.end:.0%} of {noun}"


def _growth(name: str, history: History) -> Sign:
    limit = (history.beginning + history.end) / 2
    return (
        name,
        history.first_beyond(limit),
        f"{history.end:.3g} in the last steps, {history.beginning:.3g} in the first",
    )


def _highest_early(history: History) -> float:
    """Return the median of the second fifth, which a reward that still rises is above, and a twentieth of its range."""
    window = max(1, len(history.values) // 5)
    middle = sorted(history.values[window : 2 * window])[window // 2]
    return middle + 0.05 * (max(history.values) - min(history.values))


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
        _logprob_mismatch,
    ),
    SymptomRule(
        "Optimizer steps were skipped",
        "`NonFiniteGradientError`, or `actor/skipped_steps` above 0 time and again",
        "Gradient norms were not finite, or mini-batches had no token that trains. No weight changed in those steps.",
        "Look at actor/trained_tokens, rollout/filtered_fraction, reward/masked_fraction; else at actor/ratio_max, "
        "kl/ref of the step; lower optim.lr; try model.dtype=fp32.",
        _skipped_steps,
    ),
    SymptomRule(
        "The gradient norm grows or has spikes",
        "`actor/grad_norm` grows step by step",
        "The learning rate is too high, or a few tokens dominate.",
        "Look at actor/ratio_max and actor/clip_fraction_high; algorithm.loss_settings.dual_clip, optim.warmup_steps, "
        "lower optim.lr.",
        _gradient_norm,
    ),
    SymptomRule(
        "Every gradient is clipped",
        "`actor/grad_norm` grows step by step, or is always above `optim.clip_grad`",
        "The size of each update is optim.clip_grad, whatever the gradient says.",
        "Lower optim.lr, or raise optim.clip_grad.",
        _clipped,
    ),
    SymptomRule(
        "Updates are too large for their batch",
        "`actor/ppo_kl` or the clip fractions jump",
        "The policy leaves the region in which its samples say something.",
        "Fewer algorithm.epochs, larger trainer.minibatch_size, lower optim.lr.",
        _large_updates,
    ),
    SymptomRule(
        "The probability ratio is not near 1",
        "`actor/ratio_mean` is not near 1",
        "Old log-probs are of other weights or another mask.",
        "Look for a mismatch of trainer and rollout engine first: rollout/logprob_diff_max.",
        _ratio,
    ),
    SymptomRule(
        "The KL to the reference grows",
        "`kl/ref` grows without end",
        "Nothing holds the policy near the reference.",
        "algorithm.kl.placement, algorithm.kl.coef, algorithm.kl.control=adaptive.",
        _kl,
    ),
    SymptomRule(
        "The entropy collapses",
        "`actor/entropy` falls to 0 while the reward stands still",
        "The policy gives one answer whatever it is asked, and samples no longer differ.",
        "algorithm.entropy_coef, rollout.temperature, the KL term; rollout.top_p and rollout.top_k.",
        _entropy,
    ),
    SymptomRule(
        "The held-out reward falls while the reward rises",
        "`reward/mean` rises, `val/reward_mean` falls",
        "The reward is gamed, or the prompts are learned by heart.",
        "Read the samples below; more prompts.",
        _gamed,
    ),
    SymptomRule(
        "Length and reward grow together",
        "`rollout/response_tokens_mean` grows with `reward/mean`, or `reward/truncated_mean`",
        "Longer reasoning, or a reward that is gamed by length.",
        "Read the samples below; compare rollout/right_response_tokens_mean with the wrong ones'; reward.overlong.",
        _length_with_reward,
    ),
    SymptomRule(
        "Truncated responses get more reward than finished ones",
        "`rollout/response_tokens_mean` grows with `reward/mean`, or `reward/truncated_mean`",
        "The reward pays for length.",
        "Read the samples below; reward.overlong, rollout.max_new_tokens.",
        _pays_for_length,
    ),
    SymptomRule(
        "Samples of a prompt get equal rewards",
        "`reward/std` is 0, `reward/equal_groups_fraction` is 1",
        "There is nothing to prefer, so nothing is learned.",
        "The reward function, rollout.n, rollout.temperature.",
        _equal_rewards,
    ),
    SymptomRule(
        "Prompts are too easy or too hard",
        "`reward/best_groups_fraction` or `reward/worst_groups_fraction` near 1",
        "Such prompts teach GRPO nothing.",
        "Other prompts, rollout.n, rollout.dynamic_sampling.",
        _uniform_groups,
    ),
    SymptomRule(
        "Responses are cut off",
        "`rollout/finished_fraction` is low",
        "The length limit ends them before their answer.",
        "rollout.max_new_tokens, reward.overlong, the stop tokens in the start-up table.",
        _truncated,
    ),
    SymptomRule(
        "Responses repeat themselves",
        "`rollout/repeated_fraction` rises",
        "The policy falls into loops.",
        "Read the samples below; actor/entropy, rollout.temperature, the KL term.",
        _repeated,
    ),
    SymptomRule(
        "The critic is worse than a constant",
        "`values/explained_variance` far below 0",
        "Advantages point in wrong directions.",
        "optim.critic_lr, algorithm.critic_warmup_steps.",
        _critic,
    ),
    SymptomRule(
        "ShownSamples are old",
        "`rollout/staleness_max`, `rollout/stale_tokens_fraction`",
        "Few tokens still speak of the policy that learns.",
        "algorithm.correction=tis; trainer.async_steps=0 to compare.",
        _stale,
    ),
)
