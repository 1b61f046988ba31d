"""The test of a sampler finds what is wrong with it, and nothing where it is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.verify.layouts import SAMPLES, TOLERANCES
from mega_rl.verify.rl.compare import SamplerTest
from mega_rl.verify.rl.independent.records import ScoredSample

PROMPTS, NUMBER, LENGTH, VOCABULARY = 20, 4, 24, 32
# Which of (prompt, sample, place) seeds a random number; the wrong sums, by their numbers.
SAMPLERS = {
    "right": (1.0, (1, 1, 1), ()),
    "ten per cent hotter than reported": (1.1, (1, 1, 1), (0,)),
    "a random number for two tokens": (1.0, (1, 1, 2), (2,)),
    "neighbouring prompts share random numbers": (1.0, (2, 1, 1), (3,)),
    "samples share random numbers": (1.0, (1, 2, 1), (3,)),
}


def logits_of(prompt: int, number: int) -> Tensor:
    """Return [LENGTH, VOCABULARY] float64, at random."""
    generator = torch.Generator().manual_seed(1000 * prompt + number)
    return 2.0 * torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("temperature", "shared", "wrong"), SAMPLERS.values(), ids=SAMPLERS)
def test_sums_name_what_is_wrong_with_a_sampler(
    temperature: float, shared: tuple[int, int, int], wrong: tuple[int, ...]
) -> None:
    uniforms = torch.rand(PROMPTS, NUMBER, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    samples, test = [], SamplerTest(1.0)
    for prompt in range(PROMPTS):
        for number in range(NUMBER):
            places = torch.arange(LENGTH) // shared[2]
            drawn = uniforms[prompt // shared[0], number // shared[1], places]
            ends = (logits_of(prompt, number) / temperature).softmax(-1).cumsum(-1)
            ids = (ends < drawn[:, None]).sum(-1).clamp(max=VOCABULARY - 1)
            samples.append(ScoredSample([prompt, number, *ids.tolist()], 2, prompt, 0.0, [0.0] * LENGTH))
    test.add(samples, lambda sample: logits_of(sample.tokens[0], sample.tokens[1]))
    deviations = test.deviations()
    assert {number for number, one in enumerate(deviations) if abs(one) > TOLERANCES[SAMPLES]} == set(wrong), deviations


def test_tokens_that_are_certain_say_nothing() -> None:
    test = SamplerTest(1.0)
    certain = torch.zeros(2, 3, dtype=torch.float64)
    certain[:, 1] = 800.0
    test.add([ScoredSample([0, 1, 1], 1, 0, 0.0, [0.0, 0.0])], lambda sample: certain)
    assert test.deviations()[0] == 0.0
