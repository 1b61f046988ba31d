"""Conversion of samples into the rows of a Rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.generation.samples import Key, RoutedLayers, Sample, SampleRequest
from mega_rl.types import Rollout


def rollout_of(
    requests: Sequence[SampleRequest],
    samples: Mapping[Key, Sample],
    *,
    weight_version: int,
    with_failed: bool,
    with_token_versions: bool,
    routed: RoutedLayers | None = None,
) -> Rollout:
    """Return one row per request, in their order: prompt and response, right-padded with 0, on the host.

    A request without a sample is a row without a response. A row's version is its oldest token's; `weight_version`
    where it has none. routed: samples carry the experts of their tokens; None: they do not.

    Raises RunError for a sample whose experts are not those of `routed`.
    """
    answers = [samples.get(request.key, Sample()) for request in requests]
    lengths = [len(request.prompt) + len(answer.token_ids) for request, answer in zip(requests, answers, strict=True)]
    width = max(lengths, default=0)

    def rows(of_prompt: int, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        """Return [B, S]: `of_prompt` on the prompts, one value per response token, 0 on padding."""
        table = torch.zeros(len(requests), width, dtype=dtype)
        for row, request, own in zip(table, requests, values, strict=True):
            row[: len(request.prompt)] = of_prompt
            row[len(request.prompt) : len(request.prompt) + len(own)] = torch.tensor(own, dtype=dtype)
        return table

    tokens = rows(0, [answer.token_ids for answer in answers], torch.int64)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.prompt)] = torch.tensor(request.prompt)
    versions = [min(answer.versions, default=weight_version) for answer in answers]
    return Rollout.from_rows(
        tokens,
        prompt_lengths=_integers([len(request.prompt) for request in requests]),
        lengths=_integers(lengths),
        rollout_logprobs=rows(0, [answer.logprobs for answer in answers], torch.float32),
        finished=_integers([answer.finish == "stop" for answer in answers]).bool(),
        prompt_index=_integers([request.key[0] for request in requests]),
        sample_index=_integers([request.key[1] for request in requests]),
        weight_version=_integers(versions),
        token_versions=rows(0, [answer.versions for answer in answers], torch.int64) if with_token_versions else None,
        failed=_integers([request.key not in samples for request in requests]).bool() if with_failed else None,
        routing=None if routed is None else _routing(answers, lengths, routed),
    )


def _routing(answers: Sequence[Sample], lengths: Sequence[int], routed: RoutedLayers) -> Tensor:
    """Return [B, S, L, K] int16, the experts of each token in each of L mixtures; -1 where no server knows them.

    lengths: of the rows, prompt and response. Unknown are padding, the last token of a response, which was never an
    input, and rows without a response or whose request was aborted at its last token: an abort reports no experts.
    """
    mixtures = [layer for layer, mixed in enumerate(routed.mixtures) if mixed]
    table = torch.full((len(answers), max(lengths, default=0), len(mixtures), routed.top_k), -1, dtype=torch.int16)
    of_token = len(routed.mixtures) * routed.top_k
    for row, answer, length in zip(table, answers, lengths, strict=True):
        if not answer.routing:
            continue
        experts = torch.frombuffer(bytearray(answer.routing), dtype=torch.int32)
        if len(experts) != (length - 1) * of_token:
            raise RunError(
                f"a server reported {len(experts)} experts for the {length - 1} inputs of a sample, and the "
                f"model has {len(routed.mixtures)} layers with {routed.top_k} experts of each token: it serves another "
                "model, or its routed experts have another form; set rollout.sglang.return_routing=false"
            )
        experts = experts.view(-1, len(routed.mixtures), routed.top_k)
        row[: len(experts)] = experts[:, mixtures].to(torch.int16)
    return table


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
