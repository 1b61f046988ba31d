"""Units and meanings of metrics come from docs/metrics.md."""

from __future__ import annotations

import runpy
from pathlib import Path

from mega_rl.report.glossary import explain, theme_of

ROOT = Path(__file__).parents[3]


def test_the_table_of_reports_is_that_of_the_page() -> None:
    """`make docs` has been run."""
    script = runpy.run_path(str(ROOT / "scripts" / "metrics_table.py"))
    assert script["TABLE"].read_text(encoding="utf-8") == script["table"]()


def test_a_metric_has_its_unit_and_meaning() -> None:
    entry = explain("kl/ref")
    assert entry is not None
    assert entry.unit == "nats per token"
    assert "`" not in entry.meaning


def test_quantiles_bins_and_parts_are_explained_by_their_pattern() -> None:
    for name in ("rollout/response_tokens_p90", "rollout/logprob_diff_share_below_1e-06", "reward/correct"):
        assert explain(name) is not None, name
    assert explain("own/number") is None


def test_every_metric_has_a_theme() -> None:
    assert theme_of("rollout/logprob_diff_max") == "Importance"
    assert theme_of("rollout/response_tokens_mean") == "Responses"
    assert theme_of("own/number") == "Checkpoints, data and others"
