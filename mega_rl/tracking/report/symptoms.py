"""Rules for the symptoms of docs/debugging.md, "It diverges". Pure functions.

A rule is a table in symptoms.toml: its texts, and limits of metrics (`grows`, `above`, `below`, `share_above`), or a
function of the same name here. It gets the histories of all metrics and yields the signs that it sees, each with a
metric and a step. Limits are wide: a healthy run has no sign.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import chain
from statistics import correlation, median
from typing import Any

from mega_rl.tracking.metrics.records import Series
from mega_rl.tracking.report.page import reward_parts

MIN_STEPS = 10  # shorter histories say nothing of a trend
Sign = tuple[str, int, str]  # metric, step since which it is so, what was seen


class History:
    """Finite values of a metric by step; its beginning and its end are a fifth each."""

    def __init__(self, series: Series) -> None:
        kept = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
        self.steps, self.values = [step for step, _ in kept], [value for _, value in kept]
        self._window = window = max(1, len(kept) // 5)
        self.has_trend = len(kept) >= MIN_STEPS
        self.beginning = median(self.values[:window]) if kept else math.nan
        self.end = median(self.values[-window:]) if kept else math.nan

    @property
    def before_end(self) -> float:
        """Return the median of the fifth before the last one."""
        return median(self.values[-2 * self._window : -self._window])

    @property
    def highest_early(self) -> float:
        """Return the median of the second fifth plus a twentieth of the range."""
        middle = sorted(self.values[self._window : 2 * self._window])[self._window // 2]
        return middle + 0.05 * (max(self.values) - min(self.values))

    def grows(self, factor: float, *, above: float) -> bool:
        """Return whether the end is `factor` times the beginning, and above `above`."""
        long_enough = self.has_trend and self.end > above and self.end > factor * max(self.beginning, 0.0)
        return long_enough and self.end >= 0.9 * self.before_end

    def since(self, limit: float, *, below: bool = False) -> int:
        """Return the first step of the last unbroken stretch beyond `limit`."""
        step = self.steps[-1]
        for number in range(len(self.values) - 1, -1, -1):
            if self.values[number] == limit or (self.values[number] < limit) != below:
                break
            step = self.steps[number]
        return step


Histories = Mapping[str, History]


def logprob_mismatch(histories: Histories) -> Iterator[Sign]:
    signs = (_growth(histories, f"rollout/logprob_diff_{which}", 5.0, 1e-3) for which in ("mean", "max"))
    yield from list(chain(*signs))[:1]


def skipped_steps(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, ("actor/skipped_steps", "critic/skipped_steps")):
        if max(history.values) > 0:
            first = next(s for s, v in zip(history.steps, history.values, strict=True) if v > 0)
            yield name, first, f"{sum(history.values):g} optimizer steps were not made, the first in step {first}"


def gradient_norm(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, ("actor/grad_norm", "critic/grad_norm"), trend=True):
        if history.grows(5.0, above=0.0):
            yield from _growth(histories, name, 5.0, 0.0)
            continue
        late = list(zip(history.values, history.steps, strict=True))[len(history.values) // 5 :]
        size = median(map(abs, history.values))
        spikes = [(value, step) for value, step in late if value > 20 * size > 0]
        if spikes:
            value, step = max(spikes)
            yield name, spikes[0][1], f"{value:.3g} at step {step}, the median is {size:.3g}"


def clipped(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, ("actor/grad_clipped_fraction",), trend=True):
        if min(history.values[len(history.values) // 2 :]) >= 1.0:
            yield name, history.since(0.999), "every gradient is scaled down to optim.clip_grad"


def ratio(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, ("actor/ratio_mean",), trend=True):
        if abs(history.end - 1.0) > 0.1:
            yield name, history.steps[-1], f"{history.end:.3g} in the last steps, not near 1"


def kl(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, ("kl/ref",), trend=True):
        if history.end > 1.1 * history.before_end:
            yield from _growth(histories, name, 3.0, 0.2)


def entropy(histories: Histories) -> Iterator[Sign]:
    reward = histories.get("reward/mean")
    for name, history in _of(histories, ("actor/entropy",), trend=True):
        if history.end > 0.1 * history.beginning or history.beginning <= 0.0:
            continue
        if reward and reward.has_trend and reward.end > reward.highest_early:
            continue  # a task with one right answer needs no entropy once it is solved
        seen = f"{history.end:.3g} from {history.beginning:.3g} nats, and the reward does not rise"
        yield name, history.since(0.1 * history.beginning, below=True), seen


def gamed(histories: Histories) -> Iterator[Sign]:
    reward = histories.get("reward/mean")
    for name, held_out in _of(histories, ("val/reward_mean",)):
        if not reward or not reward.has_trend or len(held_out.values) < 3:
            continue
        last, best = held_out.values[-1], max(held_out.values)
        spread = max(best - min(held_out.values), 1e-12)
        step = held_out.steps[held_out.values.index(best)]
        later = [v for s, v in zip(reward.steps, reward.values, strict=True) if s >= step]
        if last < best - 0.3 * spread and len(later) > 1 and reward.end > later[0]:
            yield name, step, f"{last:.3g} from {best:.3g} at step {step}; reward/mean still rises"


def length_with_reward(histories: Histories) -> Iterator[Sign]:
    reward = histories.get("reward/mean")
    for name, length in _of(histories, ("rollout/response_tokens_mean",)):
        moves = reward is not None and len(set(reward.values)) > 1
        if reward and moves and length.steps == reward.steps and length.grows(2.0, above=0.0):
            together = correlation(length.values, reward.values)
            seen = f"{length.end:.3g} from {length.beginning:.3g} tokens, correlation with reward/mean {together:.2f}"
            if together > 0.9:
                yield name, length.since(1.5 * length.beginning), seen


def pays_for_length(histories: Histories) -> Iterator[Sign]:
    ended = histories.get("reward/finished_mean")
    for name, cut in _of(histories, ("reward/truncated_mean",), trend=True):
        if ended and ended.has_trend and cut.end > ended.end:
            yield name, cut.steps[-1], f"responses that were cut off get {cut.end:.3g}, finished ones {ended.end:.3g}"


def part_never_earned(histories: Histories) -> Iterator[Sign]:
    for name, history in _of(histories, reward_parts(histories), trend=True):
        if not any(history.values):
            yield name, history.steps[0], f"0 in every sample of {len(history.values)} steps"


def stuck(histories: Histories) -> Iterator[Sign]:
    """Yield a policy without exploration: groups mostly equal, and a held-out reward that does not move."""
    explores, held_out = histories.get("actor/entropy"), histories.get("val/reward_mean")
    if not (explores and explores.has_trend) or explores.end > 0.1 * explores.beginning:
        return
    last = held_out.values[-3:] if held_out else []
    flat = not held_out or (len(last) == 3 and max(last) - min(last) <= 0.01 * max(map(abs, last)))
    for name, equal in _of(histories, ("reward/equal_groups_fraction",)):
        if flat and min(equal.values[-5:]) > 0.5:
            seen = f"entropy {explores.end:.3g} from {explores.beginning:.3g}"
            yield name, equal.since(0.5), f"{seen}, {equal.end:.0%} of groups have equal rewards"


def _of(histories: Histories, names: Sequence[str], *, trend: bool = False) -> Iterator[tuple[str, History]]:
    """Yield those of the metrics that the run has; with `trend` only long enough histories."""
    there = [(name, histories[name]) for name in names if name in histories]
    yield from ((name, history) for name, history in there if history.has_trend or not trend)


def _growth(histories: Histories, name: str, factor: float, above: float) -> Iterator[Sign]:
    for _, history in _of(histories, (name,)):
        if history.grows(factor, above=above):
            step = history.since((history.beginning + history.end) / 2)
            yield name, step, f"{history.end:.3g} in the last steps, {history.beginning:.3g} in the first"


def _beyond(histories: Histories, name: str, limit: float, seen: str, *, below: bool = False) -> Iterator[Sign]:
    for _, history in _of(histories, (name,), trend=True):
        if history.end < limit if below else history.end > limit:
            yield name, history.since(limit, below=below), f"{history.end:.3g} in the last steps{seen}"


def _share_above(histories: Histories, name: str, limit: float, noun: str) -> Iterator[Sign]:
    for _, history in _of(histories, (name,)):
        if len(history.values) >= 5 and min(history.values[-5:]) > limit and history.end > limit:
            yield name, history.since(limit), f"{history.end:.0%} of {noun}"


# Key of a rule's limits in symptoms.toml -> test; each entry of a limit is the arguments behind the histories.
LIMITS: dict[str, Callable[..., Iterator[Sign]]] = {
    "grows": _growth,
    "above": _beyond,
    "below": partial(_beyond, below=True),
    "share_above": _share_above,
}


@dataclass(frozen=True)
class Symptom:
    """A symptom that a rule saw in a run."""

    rule: str
    metric: str
    step: int
    seen: str
    meaning: str
    action: str
    page: str = "docs/debugging.md, It diverges"


# Keys: "name", "row" (beginning of the symptom's row in docs/debugging.md), "meaning", "action", and limits.
RULES: dict[str, dict[str, Any]] = tomllib.loads(
    files("mega_rl.tracking.report").joinpath("symptoms.toml").read_text("utf-8")
)
NOT_FINITE = {
    "name": "A metric is not finite",
    "row": "a metric is NaN or infinite",
    "meaning": "An overflow or a division by zero; later results mean nothing.",
    "action": "Resume a checkpoint before that step (checkpoint.resume=PATH); lower optim.lr; try model.dtype=fp32.",
}


def symptoms_of(series: Mapping[str, Series]) -> list[Symptom]:
    """Return the warnings of a run in the order of the rules."""
    histories = {name: History(one) for name, one in series.items()}
    there = {name: history for name, history in histories.items() if history.values}
    symptoms = [*_not_finite(series)]
    for key, rule in RULES.items():
        looks = [partial(look, there, *entry) for limit, look in LIMITS.items() for entry in rule.get(limit, ())]
        for look in looks or [partial(globals()[key], there)]:
            symptoms += [_symptom(rule, *sign) for sign in look()]
    return symptoms


def _symptom(rule: Mapping[str, Any], metric: str, step: int, seen: str) -> Symptom:
    return Symptom(rule["name"], metric, step, seen, rule["meaning"], rule["action"])


def _not_finite(series: Mapping[str, Series]) -> Iterator[Symptom]:
    """Yield a warning for the metric that was first NaN or infinite."""
    bad = [
        (step, name, value)
        for name, one in series.items()
        for step, value in zip(one.steps, one.values, strict=True)
        if not math.isfinite(value)
    ]
    if bad:
        step, name, value = min(bad, key=lambda entry: entry[:2])
        others = len({entry[1] for entry in bad}) - 1
        seen = f"{value} at step {step}" + (f", and {others} other metrics" if others else "")
        yield _symptom(NOT_FINITE, name, step, seen)
