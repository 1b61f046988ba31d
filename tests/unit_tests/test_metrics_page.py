"""docs/metrics.md lists the metrics that the code writes, all of them and no other."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mega_rl.agents.environment import FAILURES
from mega_rl.algorithms.mismatch import LogprobMismatch
from mega_rl.algorithms.statistics import QUANTILES as TOKEN_QUANTILES
from mega_rl.rewards.role import AbsentScorer
from mega_rl.rollout.sglang.weights.sync import PHASES
from mega_rl.tracking.metrics.steps import TOKEN_PHASES, PhaseTimer
from mega_rl.trainer.mismatch import AGES
from mega_rl.trainer.step_metrics import LENGTH_QUANTILES as RESPONSE_QUANTILES
from mega_rl.types import ENDS, TRAINED_TOKENS
from mega_rl.workers import residency
from mega_rl.workers.models import SKIPPED
from mega_rl.workers.residency import MemoryLayout
from tests.helpers.fakes import FakeReward, FakeSink, held_out
from tests.helpers.loops import FakeRun, RunSettings

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"[a-z]+/[a-z][a-z0-9_]*")
# Packages in which a string of this form is a metric's name, and strings of it that are none.
WRITERS = [
    "algorithms",
    "checkpoint",
    "data",
    "engines",
    "tracking/metrics",
    "rewards",
    "rollout",
    "trainer",
    "workers",
]
OTHERS = {
    "dev/shm",
    "application/json",
    "actor/ratio",
    "rollout/logprob_diff",
    "val/reward_",
}
DERIVED = "console/"  # the console makes these of others and shows them alone
OF_PARTS = frozenset({"reward/<name>", "val/reward_<name>"})  # of rewards with named parts
OF_REWARDS = ("reward/", "val/reward_")
BARE = ("engines",)  # packages that write names without the role before them


@cache
def documented() -> frozenset[str]:
    """Return the names of the page with a value in each place, such as <q>; without those of named parts."""
    cells = re.findall(r"^- `([^`]+)` \(", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.M)
    assert len(cells) == len(set(cells)), "a name stands twice"
    names: set[str] = set()
    for cell in cells:
        quantiles = RESPONSE_QUANTILES if cell.startswith("rollout/") else TOKEN_QUANTILES
        places = {"<q>": list(quantiles), "<role>": ["actor", "critic"], "<phase>": list(TOKEN_PHASES)}
        expanded = [cell]
        places |= {"<end>": [*ENDS], "<failure>": [*FAILURES], "<age>": [str(age) for age in AGES[1:]]}
        for place, values in {**places, "<kind>": ["right", "wrong", "truncated"]}.items():
            expanded = [
                name.replace(place, value) for name in expanded for value in (values if place in name else [""])
            ]
        names |= set(expanded)
    return frozenset(names) - OF_PARTS


def strings(tree: ast.AST) -> Iterator[str]:
    """String constants of a module, those inside f-strings left out."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def keys_of_metrics(tree: ast.AST) -> Iterator[str]:
    """The constants of `metrics["name"] = ...` and of `metrics = {"name": ...}`."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "metrics":
                yield ast.literal_eval(target.slice)
            elif ast.unparse(target) == "metrics" and isinstance(node.value, ast.Dict):
                yield from (ast.literal_eval(key) for key in node.value.keys if key is not None)


def composed() -> set[str]:
    """Names that the step's metrics put together of parts."""
    kinds = ("", "right_", "wrong_", "truncated_")
    names = {f"rollout/{kind}response_tokens_{end}" for kind in kinds for end in ("mean", *RESPONSE_QUANTILES)}
    names |= {f"{area}/{end}" for area in ("advantage", "values") for end in ("std", "min", "max", *TOKEN_QUANTILES)}
    names |= {f"actor/ratio_{end}" for end in TOKEN_QUANTILES}
    names |= {f"perf/{phase}_tokens_per_s" for phase in TOKEN_PHASES}
    names |= {f"agent/end_{end}_fraction" for end in ENDS} | {f"agent/failed_{kind}" for kind in FAILURES}
    return names | {"rollout/failed_samples", "reward/finished_mean", "reward/truncated_mean"}


@cache
def written() -> frozenset[str]:
    """Names that the code writes, as far as its text says; the families that it composes, composed here."""
    package = ROOT / "mega_rl"
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8"))
        for name in WRITERS
        for file in package.glob(f"{name}/**/*.py")
    }
    names = {text for tree in trees.values() for text in strings(tree) if NAME.fullmatch(text)}
    names |= composed()
    mismatch = LogprobMismatch(0.0, 0, 0.0)
    names |= mismatch.metrics().keys()
    classes = ["kept", *(f"age_{age}" for age in AGES[1:])]
    names |= {f"{kind}_{one}" for kind in ("rollout/logprob_diff", "importance/effective") for one in classes}
    trainer = "".join(file.read_text(encoding="utf-8") for file in (package / "trainer").glob("*.py"))
    stages = re.findall(r'(?:self\.stage|self|_outputs)\("(\w+)"', trainer)
    names |= {f"time/{stage}_s" for stage in stages}
    names |= {f"sync/{phase}_seconds" for phase in PHASES}
    layouts = [
        value for value in vars(residency).values() if isinstance(value, MemoryLayout) and value is not residency.START
    ]
    names |= {f"memory/{layout.name}_bytes" for layout in layouts}
    bare = {
        name
        for file, tree in trees.items()
        if file.relative_to(package).parts[0] in BARE
        for name in keys_of_metrics(tree)
    }
    names |= {f"{role}/{name}" for role in ("actor", "critic") for name in bare}
    names |= {f"{role}/{name}" for role in ("actor", "critic") for name in (SKIPPED, TRAINED_TOKENS)}
    return frozenset(name for name in names if name not in OTHERS and not name.startswith(DERIVED))


def test_every_metric_is_documented() -> None:
    assert sorted(written() - documented()) == []


def test_every_documented_metric_is_written() -> None:
    assert sorted(documented() - written()) == []


@pytest.mark.parametrize("grpo", [False, True], ids=["gae", "grpo"])
def test_what_a_run_logs_is_documented(grpo: bool) -> None:
    settings = RunSettings(steps=2, val_interval=1, rollout_interval=1, rollout_samples=1)
    sink = FakeSink()
    trainer = FakeRun(grpo=grpo, settings=settings, metrics=sink, timer=PhaseTimer())
    trainer.validation = held_out(trainer.prompts.batch(0))
    trainer.fit()
    logged = {name for record in sink.records.values() for name in record}
    assert {"reward/mean", "time/step_s", "val/reward_mean"} <= logged
    assert sorted(logged - documented()) == []


def test_a_run_without_a_reward_logs_none_of_its_numbers() -> None:
    sink = FakeSink()
    settings = RunSettings(steps=1, val_interval=1)
    trainer = FakeRun(grpo=True, settings=settings, metrics=sink, reward=AbsentScorer())
    trainer.validation = held_out(trainer.prompts.batch(0))
    trainer.fit()
    assert not {name for record in sink.records.values() for name in record if name.startswith(OF_REWARDS)}


def test_parts_of_rewards_are_logged_under_the_documented_names() -> None:
    sink = FakeSink()
    settings = RunSettings(steps=1, val_interval=1)
    trainer = FakeRun(grpo=True, settings=settings, metrics=sink, reward=FakeReward([], parts=True))
    trainer.validation = held_out(trainer.prompts.batch(0))
    trainer.fit()
    others = {name for record in sink.records.values() for name in record} - documented()
    parts = ("early", "late", "token")
    assert others == {name.replace("<name>", part) for name in OF_PARTS for part in parts}
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"- `{name}` (" in page for name in OF_PARTS)


def test_an_entry_has_a_unit_and_a_meaning() -> None:
    """The table of reports has the same: `make docs` has been run."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    written = runpy.run_path(str(ROOT / "scripts" / "metrics_table.py"))
    table = written["table"]()
    assert table == written["TABLE"].read_text(encoding="utf-8")
    rows = [line.split("\t") for line in table.splitlines()]
    assert len(rows) == len(re.findall(r"^- `", page, re.M))
    assert [row for row in rows if len(row) != 4 or not all(row) or "-" in row[1:3]] == []


def test_pages_name_metrics_that_are_there() -> None:
    areas = {name.partition("/")[0] for name in documented()}
    for page in (ROOT / "docs").glob("**/*.md"):
        named = set(re.findall(r"`([a-z]+/[a-z]\w*)`", page.read_text(encoding="utf-8")))
        assert sorted(name for name in named - documented() if name.partition("/")[0] in areas) == [], page.name
