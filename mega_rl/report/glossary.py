"""Units and meanings of metrics, from the table that `make docs` makes of docs/metrics.md; themes of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# Titles and the beginnings of names, the first that fits counts.
THEMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/", "val/")),
    ("Importance", ("importance/", "rollout/logprob", "rollout/stale", "rollout/ahead", "rollout/weight_version")),
    ("Responses", ("rollout/",)),
    ("Policy", ("actor/", "kl/", "advantage/")),
    ("Critic", ("critic/", "values/", "returns/")),
    ("Time", ("time/", "perf/", "sync/", "sglang/")),
    ("Memory", ("memory/",)),
    ("Checkpoints, data and others", ("",)),
)
OVERVIEW = (
    "reward/mean", "val/reward_mean", "kl/ref", "actor/entropy", "actor/grad_norm", "rollout/response_tokens_mean",
    "rollout/logprob_diff_max", "actor/clip_fraction_high", "values/explained_variance", "rollout/truncated_fraction",
    "reward/equal_groups_fraction", "time/step_s",
)  # fmt: skip
_PLACE = re.compile(r"<[a-z]+>")


class MetricEntry(NamedTuple):
    """A row of docs/metrics.md in plain words."""

    unit: str
    meaning: str
    expect: str  # "-" where there is no fixed range


def explain(name: str) -> MetricEntry | None:
    """Return what the page says of a metric, None of one that it does not list."""
    exact, patterns = _table()
    if name in exact:
        return exact[name]
    return next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)


def reward_parts(names: Iterable[str]) -> list[str]:
    """Return the metrics of named parts of the reward: those of "reward/" that the page does not list by name."""
    exact, _ = _table()
    return [name for name in names if name.startswith("reward/") and name.count("/") == 1 and name not in exact]


def theme_of(name: str) -> str:
    """Return the title under which a metric is drawn."""
    return next(title for title, beginnings in THEMES if name.startswith(beginnings))


@cache
def _table() -> tuple[dict[str, MetricEntry], list[tuple[re.Pattern[str], MetricEntry]]]:
    """Return rows by name, and those whose names have places for a quantile, bin or part."""
    exact: dict[str, MetricEntry] = {}
    patterns: list[tuple[re.Pattern[str], MetricEntry]] = []
    for line in files("mega_rl.report").joinpath("page", "metrics.tsv").read_text(encoding="utf-8").splitlines():
        name, *cells = line.split("\t")
        if _PLACE.search(name):
            parts = [re.escape(part) for part in _PLACE.split(name)]
            patterns.append((re.compile(".+".join(parts)), MetricEntry(*cells)))
        else:
            exact[name] = MetricEntry(*cells)
    return exact, patterns
