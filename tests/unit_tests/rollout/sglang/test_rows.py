from __future__ import annotations

import torch

from mega_rl.rollout.sglang.generation.rows import rollout_of
from mega_rl.rollout.sglang.generation.samples import Sample, SampleRequest

REQUESTS = [
    SampleRequest((4, 0), (7, 8, 9), seed=1),
    SampleRequest((4, 1), (7, 8, 9), seed=2),
    SampleRequest((6, 0), (5,), seed=3),
]
SAMPLES = {
    (6, 0): Sample([2, 3], [-0.5, -0.25], [3, 4], "length"),
    (4, 0): Sample([1], [-1.0], [4], "stop"),
}


def test_rows_are_prompt_response_padding_in_the_order_of_the_requests() -> None:
    rows = rollout_of(REQUESTS, SAMPLES, weight_version=4, with_failed=True, with_token_versions=True)
    assert rows.tokens.tolist() == [[7, 8, 9, 1], [7, 8, 9, 0], [5, 2, 3, 0]]
    assert rows.loss_mask.tolist() == [[False] * 3 + [True], [False] * 4, [False, True, True, False]]
    assert rows.rollout_logprobs.tolist() == [[0, 0, 0, -1.0], [0] * 4, [0, -0.5, -0.25, 0]]
    assert rows.prompt_lengths.tolist() == [3, 3, 1]
    assert rows.lengths.tolist() == [4, 3, 3]
    assert rows.finished.tolist() == [True, False, False]
    assert rows.prompt_index.tolist() == [4, 4, 6]
    assert rows.sample_index.tolist() == [0, 1, 0]
    assert rows.weight_version.tolist() == [4, 4, 3]  # the oldest token's
    assert rows.token_versions is not None
    assert rows.token_versions.tolist() == [[0, 0, 0, 4], [0] * 4, [0, 3, 4, 0]]
    assert rows.failed is not None
    assert rows.failed.tolist() == [False, True, False]
    assert [rows.tokens.dtype, rows.rollout_logprobs.dtype, rows.finished.dtype] == [
        torch.int64,
        torch.float32,
        torch.bool,
    ]


def test_fields_that_a_run_does_not_ask_for_are_absent() -> None:
    rows = rollout_of(REQUESTS, SAMPLES, weight_version=4, with_failed=False, with_token_versions=False)
    assert rows.failed is None
    assert rows.token_versions is None


def test_no_requests_are_no_rows() -> None:
    rows = rollout_of([], {}, weight_version=4, with_failed=False, with_token_versions=False)
    assert rows.tokens.shape == (0, 0)
    assert len(rows) == 0
