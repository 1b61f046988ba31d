"""Test of a sampler: are recorded tokens draws from the distributions of the weights that sampled them?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mega_rl.verify.rl.independent.records import ScoredSample
from mega_rl.verify.rl.independent.sampling import groups_of


class SamplerTest:
    """Four sums over tokens, which for a right sampler are normal with mean 0 and deviation 1.

    Of log p + entropy, which another temperature, a cut of the distribution or a penalty moves. Of u - 1/2, u being the
    randomised place of a token in the cumulated distribution, uniform and independent of all others. Of products of
    neighbouring u in a response, and of u at one position of neighbouring samples and prompts: a random number that is
    used twice moves these.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._sums, self._variances = [0.0] * 4, [0.0] * 4
        self._noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def add(self, samples: Sequence[ScoredSample], logits: Callable[[ScoredSample], Tensor]) -> None:
        """Count all samples of neighbouring prompts; logits: returns those of each response token, [n, V] float64."""
        places: dict[tuple[int, int], Tensor] = {}
        for prompt, group in enumerate(groups_of(samples)):
            for number, sample in enumerate(group):
                logprobs = torch.log_softmax(logits(sample) / self._temperature, dim=-1)
                places[prompt, number] = self._place(logprobs, torch.tensor(sample.tokens[sample.prompt_length :]))
        for (prompt, number), place in places.items():
            self._count(2, place[:-1] * place[1:], (len(place) - 1) / 144)
            for other in ((prompt, number + 1), (prompt + 1, number)):
                if other in places:
                    length = min(len(place), len(places[other]))
                    self._count(3, place[:length] * places[other][:length], length / 144)

    def deviations(self) -> list[float]:
        """Return each sum in units of its deviation; 0 without a token that is random."""
        sums = zip(self._sums, self._variances, strict=True)
        return [total / math.sqrt(variance) if variance > 1e-12 else 0.0 for total, variance in sums]

    def _place(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Count the first two sums of a response; returns [n], u - 1/2 of each token."""
        probabilities, rows = logprobs.exp(), torch.arange(len(tokens))
        entropy = -(probabilities * logprobs).sum(-1)
        self._count(
            0, logprobs[rows, tokens] + entropy, float(((probabilities * logprobs**2).sum(-1) - entropy**2).sum())
        )
        noise = torch.rand(len(tokens), generator=self._noise, dtype=torch.float64)
        place = (probabilities.cumsum(-1) - probabilities * noise[:, None])[rows, tokens] - 0.5
        self._count(1, place, len(place) / 12)
        return place

    def _count(self, number: int, values: Tensor, variance: float) -> None:
        self._sums[number] += float(values.sum())
        self._variances[number] += variance
