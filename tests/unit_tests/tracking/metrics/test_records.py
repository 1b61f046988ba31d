"""Lines of metrics.jsonl: valid JSON, there and back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mega_rl.tracking.metrics.records import decode_step, encode_step, read_metrics, read_series


def test_numbers_come_back_from_strict_json() -> None:
    metrics = {"reward/mean": 0.1, "a/nan": math.nan, "a/inf": math.inf, "a/minus_inf": -math.inf, "a/count": 3}
    line = encode_step(7, metrics)
    assert "\n" not in line

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(line, parse_constant=refuse)["a/inf"] == "Infinity"
    record = decode_step(line)
    assert record.step == 7
    assert math.isnan(record.metrics.pop("a/nan"))
    metrics.pop("a/nan")
    assert record.metrics == metrics


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"step": "1", "a/b": 2}',
        '{"a/b": 2}',
        '{"step": 1, "a/b": "x"}',
        '{"step": 1, "a/b": true}',
        '{"step": 1, "a/b": {}}',
    ],
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_step(line)


def test_torn_end_is_left_out_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(encode_step(step, {"a/b": step}) + "\n" for step in (1, 2))
    path.write_text(whole + encode_step(3, {"a/b": 3})[:-4])
    assert [record.step for record in read_metrics(path)] == [1, 2]
    path.write_text("oops\n" + whole)
    with pytest.raises(ValueError, match="line 1"):
        list(read_metrics(path))


def test_series_are_by_metric_in_step_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [{"val/reward_mean": 0.1}, {"reward/mean": 0.5}, {"reward/mean": 1.0, "val/reward_mean": 0.9}]
    path.write_text("".join(f"{encode_step(step, metrics)}\n" for step, metrics in enumerate(steps)))
    series = read_series(path)
    assert list(series["val/reward_mean"].steps) == [0, 2]
    assert list(series["reward/mean"].values) == [0.5, 1.0]
