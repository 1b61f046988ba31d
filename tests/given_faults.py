"""Faults of learning from given answers (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

GIVEN: Table = {
    ("given answers", "data/test_examples.py"): [
        ("mask shifted by one", "spans.append((start, stop))", "spans.append((start + 1, stop + 1))"),
        (
            "the end of a turn out of the mask",
            "stop = ends[-1] + 1 if ends else stop",
            "stop = ends[-1] if ends else stop",
        ),
        ("templates that break prefixes pass", "if not whole.startswith(text):", "if not whole:"),
    ],
    ("given answers", "algorithms/test_preferences.py"): [
        (
            "chosen and rejected swapped",
            "kind.losses(answers(lambda x: x[0::2]), answers(lambda x: x[1::2]), worths[0::2])",
            "kind.losses(answers(lambda x: x[1::2]), answers(lambda x: x[0::2]), worths[0::2])",
        ),
        (
            "means in place of sums in DPO",
            "x, e = rewards[0] - rewards[1], self.label_smoothing",
            "x, e = rewards[0] / chosen.tokens - rewards[1] / rejected.tokens, self.label_smoothing",
        ),
        (
            "pairs split over micro-batches",
            'units = rows_of_units(len(lengths), getattr(batch, "unit", None))',
            "units = rows_of_units(len(lengths), None)",
        ),
        (
            "the score read at the padding",
            "for first, end in [(len(one.token_ids), len(one.token_ids) + 1)] if scores else one.spans:",
            "for first, end in [(tokens.size(1) - 1, tokens.size(1))] if scores else one.spans:",
        ),
    ],
    ("given answers", "trainer/test_given.py"): [
        (
            "the reference moves with the policy",
            "partial(reference_logprobs, frozen)",
            "partial(reference_logprobs, roles.actor)",
        ),
        (
            "KTO compares each prompt with its own answer",
            "zip(prompts, [*prompts[1:], prompts[0]], strict=True)",
            "zip(prompts, prompts, strict=True)",
        ),
    ],
}
