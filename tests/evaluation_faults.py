"""Faults of evaluations, for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

EVALUATION: Table = {
    ("evaluation", "algorithms/test_evaluation.py"): [
        (
            "intervals of more samples than there are",
            "min(count * bernoulli / variance, float(count * samples)) if variance",
            "count * bernoulli / variance if variance",
        ),
        (
            "an answer with as many votes wins alone",
            "if vote is not None and count == most]",
            "if vote is not None and count == most][:1]",
        ),
    ],
    ("evaluation", "workers/test_rollout.py"): [
        (
            "evaluations draw the random numbers of training",
            "return () if draws is None else (EVALUATION, draws.stream)",
            "return ()",
        ),
        ("rows of a part point into the set", "rows.prompt_index - draws.first", "rows.prompt_index"),
    ],
    ("evaluation", "trainer/test_validation.py"): [
        (
            "sets of prompts share their random numbers",
            "stream=crc32(one.name.encode()), first=part.start",
            "stream=0, first=part.start",
        ),
        (
            "samples without a reward count as wrong",
            "value > above if known else None for value",
            "value > above for value",
        ),
        ("each part of a set draws the random numbers of the first", "first=part.start, max_new", "first=0, max_new"),
        ("prompts with fewer than k samples count", "if len(right) >= k]", "if len(right) >= 1]"),
        ("samples without the judged part are wrong", "scored & ~judged.isnan().to(scored.device)", "scored"),
        (
            "the first part of a set is its result",
            "with_parts(table, own, names, first=_COLUMNS",
            "with_parts(self._tables[0], self._parts[0], names, first=_COLUMNS",
        ),
    ],
    ("evaluation", "rollout/test_hf.py"): [
        (
            "an evaluation's responses end where those of training do",
            "draws.max_new_tokens or max_new_tokens",
            "max_new_tokens",
        )
    ],
    ("metrics", "engines/test_outcome.py"): [
        (
            "quantiles of ratios count what does not train",
            "_places(x.flatten()), chosen.flatten().double())",
            "_places(x.flatten()), torch.ones(x.numel(), dtype=torch.float64))",
        )
    ],
}
