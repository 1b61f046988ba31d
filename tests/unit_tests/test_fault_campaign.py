"""The campaign of faults itself: an error of its own is a verdict, and one that was cut goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from tests.fault_campaign.judge import Judge
from tests.fault_campaign.plan import cases
from tests.fault_campaign.workers import Campaign, failed, in_order, read_verdicts


class BrokenJudge:
    """A judge that fails in every case."""

    def run(self, *_: Any) -> Any:
        raise KeyError("no rank")


def test_an_error_of_the_campaign_is_the_verdict_on_its_case(tmp_path: Path) -> None:
    (case,) = cases(0, 1)
    campaign = Campaign([case], 0, tmp_path, tmp_path / "results.jsonl", workers=1, keep=False)
    verdict = campaign._judge(cast(Judge, BrokenJudge()), case, 0)
    assert verdict.number == case.number
    assert verdict.defects[0].startswith("campaign: KeyError in ")


def test_a_line_that_was_cut_is_no_verdict(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    lines = [json.dumps(failed(case, "it was stopped", 1.0).as_json()) for case in cases(0, 2)]
    results.write_text(lines[0] + "\n" + lines[1][:40])
    assert [verdict.number for verdict in read_verdicts(results)] == [0]


def test_every_case_has_a_worker_and_those_of_a_cluster_have_one() -> None:
    drawn = cases(0, 300)
    takers = [{case.number for case in in_order(drawn, worker, 3)} for worker in range(3)]
    assert set.union(*takers) == set(range(300))
    for case in drawn:
        assert sum(case.number in one for one in takers) == (1 if case.cluster else 3)
