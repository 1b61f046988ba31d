"""Faults of evaluations, for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import fault

ESTIMATES = "algorithms/test_evaluation.py"
VALIDATION = "trainer/test_validation.py"

EVALUATION = (
    fault(
        "evaluation",
        "intervals of more samples than there are",
        "min(count * bernoulli / variance, float(count * samples)) if variance",
        "count * bernoulli / variance if variance",
        ESTIMATES,
    ),
    fault(
        "evaluation",
        "an answer with as many votes wins alone",
        "        if taken < own:\n            joined",
        "        if taken <= own:\n            joined",
        ESTIMATES,
    ),
    fault(
        "evaluation",
        "evaluations draw the random numbers of training",
        "return () if draws is None else (EVALUATION, draws.stream)",
        "return ()",
        "workers/test_rollout.py",
    ),
    fault(
        "evaluation",
        "sets of prompts share their random numbers",
        "replace(draws, stream=crc32(one.name.encode()), first=part.start)",
        "replace(draws, stream=0, first=part.start)",
        VALIDATION,
    ),
    fault(
        "evaluation",
        "samples without a reward count as wrong",
        "value > above if known else None for value",
        "value > above for value",
        VALIDATION,
    ),
    fault(
        "evaluation",
        "each part of a set draws the random numbers of the first",
        "first=part.start)\n",
        "first=0)\n",
        VALIDATION,
    ),
    fault(
        "evaluation",
        "rows of a part point into the set",
        "rows.prompt_index - draws.first",
        "rows.prompt_index",
        "workers/test_rollout.py",
    ),
    fault(
        "evaluation",
        "prompts with fewer than k samples count",
        "if len(right) >= k]",
        "if len(right) >= 1]",
        VALIDATION,
    ),
    fault(
        "evaluation",
        "samples without the judged part are wrong",
        "scored & ~judged.isnan().to(scored.device)",
        "scored",
        VALIDATION,
    ),
    fault(
        "evaluation",
        "an evaluation's responses end where those of training do",
        "draws.max_new_tokens or max_new_tokens",
        "max_new_tokens",
        "rollout/test_hf.py",
    ),
    fault(
        "evaluation",
        "the first part of a set is its result",
        "tables = [_with_parts(table, own, names) for",
        "tables = [_with_parts(self._tables[0], self._parts[0], names) for",
        VALIDATION,
    ),
    fault(
        "metrics",
        "quantiles of ratios count what does not train",
        "_places(x.flatten()), chosen.flatten().double())",
        "_places(x.flatten()), torch.ones(x.numel(), dtype=torch.float64))",
        "engines/test_outcome.py",
    ),
    fault(
        "replay",
        "responses without a reward count as those with one",
        "return np.where(known, values, np.nan)",
        "return np.nan_to_num(values)",
        "verify/test_replay.py",
    ),
)
