"""Sampler: the distribution it draws from, the log-prob it reports, and its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mega_rl.rollout.sampling import Sampler, _fixed_point, stream_keys, uniform_at
from tests.helpers.determinism import OnlyDeterministic

NUM_DRAWS = 40_000


def logits_of(vocab_size: int, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def reference_probs(logits: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """What the draw's probabilities must be, one token after the other in float64."""
    probs = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    if top_k:
        order = order[:top_k]
    mass = sum(float(probs[token]) for token in order)
    kept, held = [], 0.0
    for token in order:
        if held >= top_p * mass and kept:
            break
        kept.append(token)
        held += float(probs[token])
    truncated = torch.zeros_like(probs)
    truncated[kept] = probs[kept]
    return truncated / truncated.sum()


def draw_many(sampler: Sampler, logits: Tensor, *, num: int = NUM_DRAWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    uniforms = uniform_at(stream_keys((seed,), torch.arange(num)), 0)
    return sampler.draw(logits.expand(num, -1), uniforms)


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "top_p", "top_k"),
    [
        (131, 1.0, 1.0, 0),
        (64, 1.0, 1.0, 0),
        (5, 0.7, 1.0, 0),
        (131, 1.7, 1.0, 0),
        (131, 1.0, 0.8, 0),
        (131, 1.0, 1.0, 10),
        (131, 1.3, 0.9, 20),
        (131, 1.0, 1.0, 1000),
        (131, 1.0, 1e-6, 0),
        (1, 1.0, 1.0, 0),
    ],
)
def test_draws_have_the_exact_distribution(vocab_size: int, temperature: float, top_p: float, top_k: int) -> None:
    logits = logits_of(vocab_size)
    tokens, _ = draw_many(Sampler(temperature=temperature, top_p=top_p, top_k=top_k), logits)
    probs = reference_probs(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert not counts[probs == 0].any(), "a token that was cut away was drawn"
    expected = probs * NUM_DRAWS
    # Cells of fewer than 10 expected draws are joined: chi-square is not one there.
    rare = expected < 10
    cells = [(float(counts[t]), float(expected[t])) for t in range(vocab_size) if not rare[t]]
    if rare.any() and expected[rare].sum() > 0:
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    freedom = len(cells) - 1
    chi_square = sum((seen - want) ** 2 / want for seen, want in cells)
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1)), "p below about 1e-6 for these fixed draws"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.9])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 5)])
def test_logprob_is_of_the_full_distribution_at_the_temperature(temperature: float, top_p: float, top_k: int) -> None:
    logits = logits_of(131)
    tokens, logprobs = draw_many(Sampler(temperature=temperature, top_p=top_p, top_k=top_k), logits, num=500)
    expected = (logits.double() / temperature).log_softmax(-1)[tokens]
    # One float32 rounding of logits / temperature and of the sum: a few 1e-7 of numbers near 10.
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=3e-6)
    assert logprobs.dtype == torch.float32


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    for dead in (range(0, 3), range(5, 131), range(0, 130), range(60, 70), range(64, 128)):
        logits = logits_of(131)
        logits[list(dead)] = -torch.inf
        uniforms = torch.tensor([0.0, 2.0**-53, 0.25, 0.5, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
        tokens, logprobs = Sampler(temperature=1.0).draw(logits.expand(6, -1), uniforms)
        assert not set(tokens.tolist()) & set(dead)
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("size", [1, 64, 2374, 1 << 18])
def test_weights_in_fixed_point_neither_overflow_nor_lose_what_float32_holds(size: int) -> None:
    weights = torch.rand(2, size, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e-30]])
    whole, unit = _fixed_point(weights)
    assert int(whole.cumsum(-1)[:, -1].min()) > 0, "the sum of a row has not wrapped round"
    assert whole.sum(-1).max() <= 2**62
    # Rounded to a unit, of at most 2**-43 of the largest: float32 itself rounds that one by 2**-25.
    assert ((whole * unit - weights.double()).abs() <= unit).all()
    assert (unit <= weights.double().amax(-1, keepdim=True) * 2.0**-43).all()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.9, 7), (1.0, 7)])
def test_a_draw_needs_nothing_that_cuda_lacks_under_deterministic_algorithms(top_p: float, top_k: int) -> None:
    logits, uniforms = logits_of(4096, spread=0.3)[None], torch.tensor([0.4], dtype=torch.float64)
    with OnlyDeterministic():
        Sampler(temperature=1.0, top_p=top_p, top_k=top_k).draw(logits, uniforms)
        with pytest.raises(RuntimeError, match="cumsum"):
            uniforms.cumsum(0)


def test_nucleus_wider_than_the_quick_search_is_exact() -> None:
    """A flat distribution over 4096 tokens: the nucleus of 0.9 holds thousands."""
    logits = logits_of(4096, spread=0.3)
    probs = reference_probs(logits, temperature=1.0, top_p=0.9, top_k=0)
    sampler = Sampler(temperature=1.0, top_p=0.9)
    kept = sampler._truncate(logits.softmax(-1)[None], torch.ones(1, dtype=torch.float64))[0] > 0
    assert kept.sum() > 2000
    # One token may differ where float32 probabilities sum to the border.
    assert int((kept != (probs > 0)).sum()) <= 1


def test_most_likely_is_the_argmax_with_the_logprob_at_the_temperature() -> None:
    logits = torch.stack([logits_of(131, seed=seed) for seed in range(4)])
    tokens, logprobs = Sampler(temperature=0.5, top_k=2, top_p=0.1).most_likely(logits)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = (logits.double() / 0.5).log_softmax(-1).amax(-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=3e-6)
