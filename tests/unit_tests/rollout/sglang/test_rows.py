from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.generation.engine import RoutedLayers, rollout_of
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


def test_rows_are_prompt_response_padding_in_request_order() -> None:
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


def routing_of(tokens: int, *, layers: int = 3, top_k: int = 2) -> tuple[Tensor, bytes]:
    """Experts [tokens - 1, layers, top_k] and how a server sends them."""
    experts = torch.arange((tokens - 1) * layers * top_k, dtype=torch.int32).view(tokens - 1, layers, top_k)
    return experts, experts.numpy().tobytes()


def routed_rows(samples: Mapping[Any, Any]) -> Any:
    return rollout_of(
        REQUESTS, samples, weight_version=4, with_failed=True, with_token_versions=False,
        routed=RoutedLayers((False, True, True), top_k=2),
    )  # fmt: skip


def test_experts_go_with_their_tokens_and_mixtures() -> None:
    """The dense first layer is left out; padding, last tokens, failed and aborted rows are unknown."""
    (long, long_bytes), (short, short_bytes) = routing_of(4), routing_of(3)
    aborted = {(4, 0): replace(SAMPLES[4, 0], routing=long_bytes), (6, 0): SAMPLES[6, 0]}
    routing = routed_rows(aborted | {(6, 0): replace(SAMPLES[6, 0], routing=short_bytes)}).routing
    assert (routing.dtype, routing.shape) == (torch.int16, (3, 4, 2, 2))
    assert torch.equal(routing[0, :3], long[:, 1:].short())
    assert torch.equal(routing[2, :2], short[:, 1:].short())
    unknown = (routing[0, 3:], routing[1], routing[2, 2:], routed_rows(aborted).routing[2])
    assert all((experts == -1).all() for experts in unknown)


@pytest.mark.parametrize("experts", [routing_of(4, layers=4)[1], routing_of(9)[1]], ids=["four layers", "more tokens"])
def test_experts_of_another_model_are_an_error(experts: bytes) -> None:
    samples = {key: replace(sample, routing=experts) for key, sample in SAMPLES.items()}
    with pytest.raises(RunError, match=r"the model has 3 layers with 2 experts of each token: .*return_routing=false"):
        routed_rows(samples)
