"""Rules that look for the symptoms of docs/debugging.md, "It diverges", in the metrics of a run. Pure functions.

A rule gets the histories of all metrics and returns the signs that it sees, each with a metric and a step. Limits are
wide: a warning is worth reading, and a run without one may still go wrong.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files

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

RULES = tuple(
    SymptomRule(**texts, seen_in=getattr(signs, sign))
    for sign, texts in tomllib.loads(files("mega_rl.report").joinpath("symptoms.toml").read_text("utf-8")).items()
)
