"""Signs of symptoms in the histories of metrics: each function yields a metric, a step, and what was seen."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.report.glossary import reward_parts
from mega_rl.report.history import Histories, History, correlation

Sign = tuple[str, int, str]  # metric, step since which it is so, what was seen


def logprob_mismatch(histories: Histories) -> Iterator[Sign]:
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_max"):
        history = histories.get(name)
        if history and history.grows(5.0, above=1e-3):
            yield _growth(name, history)
            return


def skipped_steps(histories: Histories) -> Iterator[Sign]:
    for name in ("actor/skipped_steps", "critic/skipped_steps"):
        history = histories.get(name)
        if history and max(history.values) > 0:
            total = sum(history.values)
            first = next(s for s, v in zip(history.steps, history.values, strict=True) if v > 0)
            yield name, first, f"{total:g} optimizer steps were not made, the first in step {first}"


def gradient_norm(histories: Histories) -> Iterator[Sign]:
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


def clipped(histories: Histories) -> Iterator[Sign]:
    name = "actor/grad_clipped_fraction"
    history = histories.get(name)
    if history and history.has_trend and min(history.values[len(history.values) // 2 :]) >= 1.0:
        yield name, history.first_beyond(0.999), "every gradient is scaled down to optim.clip_grad"


def large_updates(histories: Histories) -> Iterator[Sign]:
    for name, limit in (("actor/clip_fraction_high", 0.3), ("actor/clip_fraction_low", 0.3), ("actor/ppo_kl", 0.1)):
        history = histories.get(name)
        if history and history.has_trend and history.end > limit:
            yield name, history.first_beyond(limit), f"{history.end:.3g} in the last steps, more than {limit:g}"


def ratio(histories: Histories) -> Iterator[Sign]:
    name = "actor/ratio_mean"
    history = histories.get(name)
    if history and history.has_trend and abs(history.end - 1.0) > 0.1:
        yield name, history.steps[-1], f"{history.end:.3g} in the last steps, not near 1"


def kl(histories: Histories) -> Iterator[Sign]:
    name = "kl/ref"
    history = histories.get(name)
    if history and history.grows(3.0, above=0.2) and history.end > 1.1 * history.before_end:
        yield _growth(name, history)


def entropy(histories: Histories) -> Iterator[Sign]:
    name = "actor/entropy"
    history, reward = histories.get(name), histories.get("reward/mean")
    if not history or not history.has_trend or history.end > 0.1 * history.beginning or history.beginning <= 0.0:
        return
    if reward and reward.has_trend and reward.end > _highest_early(reward):
        return  # a task with one right answer needs no entropy once it is solved
    seen = f"{history.end:.3g} from {history.beginning:.3g} nats, and the reward does not rise"
    yield name, history.first_below(0.1 * history.beginning), seen


def gamed(histories: Histories) -> Iterator[Sign]:
    reward, held_out = histories.get("reward/mean"), histories.get("val/reward_mean")
    if not reward or not held_out or not reward.has_trend or len(held_out.values) < 3:
        return
    best = max(held_out.values)
    spread = max(best - min(held_out.values), 1e-12)
    step = held_out.steps[held_out.values.index(best)]
    later = [v for s, v in zip(reward.steps, reward.values, strict=True) if s >= step]
    if held_out.values[-1] < best - 0.3 * spread and len(later) > 1 and reward.end > later[0]:
        yield "val/reward_mean", step, f"{held_out.values[-1]:.3g} from {best:.3g} at step {step}; reward/mean rises on"


def length_with_reward(histories: Histories) -> Iterator[Sign]:
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


def pays_for_length(histories: Histories) -> Iterator[Sign]:
    cut, ended = histories.get("reward/truncated_mean"), histories.get("reward/finished_mean")
    if cut and ended and cut.has_trend and ended.has_trend and cut.end > ended.end:
        seen = f"responses that were cut off get {cut.end:.3g}, those that ended {ended.end:.3g}"
        yield "reward/truncated_mean", cut.steps[-1], seen


def equal_rewards(histories: Histories) -> Iterator[Sign]:
    yield from share_above(histories, "reward/equal_groups_fraction", 0.9, "prompts whose samples all got one reward")


def uniform_groups(histories: Histories) -> Iterator[Sign]:
    yield from share_above(histories, "reward/best_groups_fraction", 0.8, "prompts that are always answered best")
    yield from share_above(histories, "reward/worst_groups_fraction", 0.8, "prompts that are never answered well")


def part_never_earned(histories: Histories) -> Iterator[Sign]:
    """Yield the named parts of the reward that no sample of the run has earned."""
    for name in reward_parts(histories):
        history = histories[name]
        if history.has_trend and not any(history.values):
            yield name, history.steps[0], f"0 in every sample of {len(history.values)} steps"


def stuck(histories: Histories) -> Iterator[Sign]:
    """Yield a policy without exploration whose groups are mostly equal and whose held-out reward stands still."""
    entropy, equal = histories.get("actor/entropy"), histories.get("reward/equal_groups_fraction")
    if not (entropy and equal and entropy.has_trend) or entropy.end > 0.1 * entropy.beginning:
        return
    held_out = histories.get("val/reward_mean")
    last = list(held_out.values[-3:]) if held_out else []
    flat = not held_out or (len(last) == 3 and max(last) - min(last) <= 0.01 * max(map(abs, last)))
    if flat and min(equal.values[-5:]) > 0.5:
        seen = f"entropy {entropy.end:.3g} from {entropy.beginning:.3g}, {equal.end:.0%} of groups have equal rewards"
        yield "reward/equal_groups_fraction", equal.first_beyond(0.5), seen


def truncated(histories: Histories) -> Iterator[Sign]:
    yield from share_above(histories, "rollout/truncated_fraction", 0.2, "responses that the length limit cut off")


def repeated(histories: Histories) -> Iterator[Sign]:
    name = "rollout/repeated_fraction"
    history = histories.get(name)
    if history and history.grows(3.0, above=0.1):
        yield _growth(name, history)


def critic(histories: Histories) -> Iterator[Sign]:
    name = "values/explained_variance"
    history = histories.get(name)
    if history and history.has_trend and history.end < -0.2:
        yield name, history.first_below(-0.2), f"{history.end:.3g} in the last steps: worse than a constant"


def stale(histories: Histories) -> Iterator[Sign]:
    name = "importance/effective_fraction"
    history = histories.get(name)
    if history and history.has_trend and history.end < 0.5:
        yield name, history.first_below(0.5), f"{history.end:.3g}: less than half of the tokens carry the gradient"
    yield from share_above(histories, "rollout/stale_tokens_fraction", 0.9, "tokens that older weights sampled")


def share_above(histories: Histories, name: str, limit: float, noun: str) -> Iterator[Sign]:
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
