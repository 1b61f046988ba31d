"""What each rank does in test_answers.py: answers by functions of a user, called after one another."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from mega_rl.parallel.comm import GroupRanks
from mega_rl.rewards.role import answers_together


def answers_on(rank: int) -> list[object]:
    """Return the answers of each function, or what was raised; the last ones fail on rank 1 alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60.0))
    everyone = GroupRanks(dist.new_group(timeout=timedelta(seconds=60.0)))

    def fails(response: str) -> str:
        return response if rank == 0 else str(1 // 0)

    def counts(response: str) -> object:
        return response if rank == 0 else len(response)

    def hangs(response: str) -> str:
        for _ in range(600 * rank):
            time.sleep(0.1)
        return response

    results: list[object] = []
    for function, timeout_s in ((str.upper, 60.0), (fails, 60.0), (counts, 60.0), (hangs, 0.5)):
        texts = ["a", "b"] if rank == 0 else ["c"]
        try:
            results.append(
                answers_together(function, texts, setting="answer_of=a.py:f", everyone=everyone, timeout_s=timeout_s)
            )
        except (ValueError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results
