"""Prompts, a rollout, and reward functions here and in workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from mega_rl.rewards.call import load_functions, plan
from mega_rl.rewards.pool import FunctionRewards, WorkerPool
from mega_rl.rewards.score import Item, Response, ResponseReader, RewardFailure
from mega_rl.types import Prompt, Rollout, ends_of

FILE = Path(__file__).with_name("reward_file.py")
PROMPTS = [
    Prompt(index=17, token_ids=(1, 2), text="1+1=", answer="2"),
    Prompt(index=23, token_ids=(3,), text="2+3=", answer="5"),
]
READER = ResponseReader(lambda token_ids: ",".join(map(str, token_ids)), stop_ids=(9,))


def rollout_of() -> Rollout:
    """Three rows: prompt 1 (finished), prompt 0 (cut off by length), prompt 1 (only a stop token)."""
    return Rollout.from_rows(
        torch.tensor([[3, 50, 51, 9, 0], [1, 2, 52, 53, 54], [3, 9, 0, 0, 0]]),
        prompt_lengths=torch.tensor([1, 2, 1]),
        lengths=torch.tensor([4, 5, 2]),
        end=ends_of(torch.tensor([True, False, True])),
        prompt_index=torch.tensor([1, 0, 1]),
        sample_index=torch.tensor([0, 0, 1]),
    )


def some(*responses: str) -> list[Item]:
    """Return responses to one prompt."""
    prompt = Prompt(index=17, token_ids=(1,), text="1+1=", answer="2")
    return [(prompt, Response(text, num_tokens=1, finish="stop")) for text in responses]


def called(*functions: Any, sources: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> FunctionRewards:
    """Return rewards by one function, or by several with names."""
    named = [one if isinstance(one, tuple) else ("", one) for one in functions]
    return FunctionRewards([plan(function, name=name, **settings) for name, function in named], sources or {})


def spec_of(functions: str | Mapping[str, str]) -> str | Mapping[str, str]:
    """Return the setting for functions, those of `FILE` by name alone."""
    of_file = isinstance(functions, str) and functions.isidentifier() and functions != "math_verify"
    return f"{FILE}:{functions}" if of_file else functions


def own(functions: str | Mapping[str, str], **settings: int) -> FunctionRewards:
    """Return rewards by functions of `spec_of` in this process."""
    return FunctionRewards(load_functions(spec_of(functions), **settings))


@contextmanager
def pooled(
    functions: str | Mapping[str, str], *, num_workers: int = 1, timeout_s: float = 20.0, memory_bytes: int = 0,
    alone: bool = True, **settings: int,
) -> Iterator[FunctionRewards]:  # fmt: skip
    """Yield rewards by functions of `spec_of` in workers; check that these leave no process.

    alone: whether no other thread starts processes meanwhile.
    """
    functions = spec_of(functions)
    loaded = load_functions(functions, **settings)
    before = set(psutil.Process().children(recursive=True))  # with what the file itself starts
    pool = WorkerPool(functions, num_workers=num_workers, timeout_s=timeout_s, memory_bytes=memory_bytes, **settings)
    try:
        yield FunctionRewards(loaded, pool=pool)
    finally:
        pool.close()
    assert not alone or set(psutil.Process().children(recursive=True)) <= before


def kinds(outcomes: Sequence[object]) -> list[object]:
    """Return the scores, and the kind of each failure."""
    return [outcome.kind if isinstance(outcome, RewardFailure) else outcome for outcome in outcomes]
