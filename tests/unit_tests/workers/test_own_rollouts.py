"""What a user's rollout source is given, and the rows that are refused, over an engine of fixed answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Draws, Prompt, Rollout
from mega_rl.workers.rollout import EVALUATION, CheckedRollouts, RolloutContext

PROMPTS = [Prompt(index=7, token_ids=(3, 4), text="a", answer=""), Prompt(index=8, token_ids=(5,), text="b", answer="")]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=5, stop_token_ids=(1,))


class Answers:
    """An engine that answers every prompt with 9 and a stop, as far as its limit goes."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        limits: Sequence[int] | None = None,
        draws: Draws | None = None,
    ) -> Rollout:
        own = {"index": list(prompt_index), "n": n, "seed": seed, "greedy": greedy, "limits": limits}
        self.calls.append(own if draws is None else own | {"draws": draws})
        self.read = [prompt.token_ids for prompt in prompts]
        limits = [5] * len(prompts) if limits is None else limits
        answers = [[9, 1][:limit] for limit in limits for _ in range(n)]
        contexts = [list(prompt.token_ids) for prompt in prompts for _ in range(n)]
        rows = [context + answer for context, answer in zip(contexts, answers, strict=True)]
        width = max(map(len, rows), default=0)
        first, end = (torch.tensor([len(row) for row in of], dtype=torch.int64) for of in (contexts, rows))
        mask = (torch.arange(width) >= first[:, None]) & (torch.arange(width) < end[:, None])
        return Rollout.from_rows(
            torch.tensor([row + [0] * (width - len(row)) for row in rows]).view(len(rows), width),
            prompt_lengths=first,
            lengths=end,
            rollout_logprobs=torch.where(mask, -0.5, 0.0),
            finished=torch.tensor([len(answer) == 2 for answer in answers]),
        )

    def metrics(self) -> dict[str, float]:
        return {"engine/tokens": 3.0}


def context_over(engine: Answers | None) -> RolloutContext:
    return RolloutContext(
        tokenizer=None,  # type: ignore[arg-type]
        engine=engine,
        sampling=SAMPLING,
        n=2,
        seed=11,
        data_parallel=SingleRank(),
        replica=SingleRank(),
        weight_version=lambda: 6,
    )


def test_turns_of_a_trajectory() -> None:
    """Each trajectory reads all that came before, has random numbers of its own and what room is left."""
    engine = Answers()
    context = context_over(engine)
    trajectories = context.sample(PROMPTS, step=3)
    assert [each.give([7, 8][: 1 + number % 2]) for number, each in enumerate(trajectories)] == [True] * 4
    context.extend(trajectories, step=3, turn=1)
    assert engine.read == [(3, 4, 9, 1, 7), (3, 4, 9, 1, 7, 8), (5, 9, 1, 7), (5, 9, 1, 7, 8)]
    assert engine.calls == [
        {"index": [0, 1], "n": 2, "seed": (11, 3), "greedy": False, "limits": None},
        {"index": [0, 1, 2, 3], "n": 1, "seed": (11, 3, 1), "greedy": False, "limits": [2, 1, 2, 1]},
    ]
    assert [each.room for each in trajectories] == [0] * 4
    rows = context.rollout(trajectories)
    assert rows.tokens[1].tolist() == [3, 4, 9, 1, 7, 8, 9]
    assert rows.loss_mask[1].tolist() == [False, False, True, True, False, False, True]
    assert rows.rollout_logprobs[1].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert rows.finished.tolist() == [True, False, True, False]  # the second and fourth ended for their length
    assert rows.lengths.tolist() == [7, 7, 6, 6]
    assert rows.prompt_index.tolist() == [0, 0, 1, 1]
    assert rows.sample_index.tolist() == [0, 1, 0, 1]
    assert rows.weight_version.tolist() == [6] * 4
    assert rows.failed is None


def test_turns_of_an_evaluation_have_random_numbers_and_limits_of_their_own() -> None:
    engine, draws = Answers(), Draws(3, 0.6, stream=8, first=20, max_new_tokens=4)
    context = context_over(engine)
    trajectories = context.sample(PROMPTS, step=3, draws=draws)
    assert [(each.sample_index, each.limit) for each in trajectories] == [(0, 4), (1, 4), (2, 4)] * 2
    assert trajectories[4].give([7])
    context.extend(trajectories[4:5], step=3, turn=1, draws=draws)
    usual = {"greedy": False, "draws": draws}
    assert engine.calls == [
        {"index": [20, 21], "n": 3, "seed": (11, 3, EVALUATION, 8), "limits": None, **usual},
        {"index": [21 * 3 + 1], "n": 1, "seed": (11, 3, EVALUATION, 8, 1), "limits": [1], **usual},
    ]
    rows = context.rollout(trajectories)
    source = checked(rows)
    assert source.generate(PROMPTS, step=3, draws=draws) is rows
    with pytest.raises(RunError, match=r"legal: \[4, 5\]"):  # two samples of each prompt, those of training
        source.generate(PROMPTS, step=3)


def test_what_does_not_fit_closes_a_trajectory_and_what_is_given_last_is_left_out() -> None:
    context = context_over(engine := Answers())
    first, second = context.sample(PROMPTS, step=0, greedy=True)
    assert not first.give([7, 8, 9])  # two sampled tokens, three given: no room for another
    assert first.room == 0
    assert second.give([7])
    rows = context.rollout([second, first])
    assert rows.tokens.tolist() == [[3, 4, 9, 1], [5, 9, 1, 0]]
    assert (first.end, rows.finished.tolist()) == ("length", [False, True])  # a tool call is no end of the task
    context.extend([first], step=0, turn=1, greedy=True)  # a rank whose trajectories are closed calls it, too
    assert engine.calls[-1]["limits"] == []


def test_a_failed_sample_is_a_row_without_a_response() -> None:
    context = context_over(Answers())
    trajectories = context.sample(PROMPTS, step=0)
    trajectories[2].end = "error"
    rows = context.rollout(trajectories)
    assert rows.failed is not None
    assert rows.failed.tolist() == [False, False, True, False]
    assert rows.loss_mask.any(dim=1).tolist() == [True, True, False, True]
    assert rows.lengths.tolist() == [4, 4, 1, 3]
    assert checked(rows).generate(PROMPTS, step=0) is rows


class Returned:
    """A source that returns these rows."""

    def __init__(self, rows: Any, metrics: Any) -> None:
        self.rows, self.of_source = rows, metrics

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        return self.rows  # type: ignore[no-any-return]

    def metrics(self) -> dict[str, float]:
        return self.of_source  # type: ignore[no-any-return]


def checked(rows: Any, metrics: Any = None, *, replica: Any = None) -> CheckedRollouts:
    return CheckedRollouts(
        Returned(rows, {} if metrics is None else metrics),
        "rollout.source='own.py:Own'",
        replace(context_over(Answers()), replica=replica or SingleRank()),
        max_prompt_tokens=2,
        vocab_size=10,
        everyone=SingleRank(),
    )


def change(name: str, place: tuple[int, ...], value: float) -> Callable[[Rollout], Any]:
    def changed(rows: Rollout) -> Rollout:
        getattr(rows, name)[place] = value
        return rows

    return changed


def fail_one_with_tokens(rows: Rollout) -> Rollout:
    rows.failed = torch.tensor([True, False, False, False])
    return rows


def number_finished(rows: Rollout) -> Rollout:
    rows.finished = rows.lengths
    return rows


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda rows: {"tokens": rows.tokens}, "generate() returned dict, not a Rollout"),
        (lambda rows: rows[:3], "tokens has shape [3, 4] and type torch.int64; legal: [4, 4]"),
        (number_finished, "finished has shape [4] and type torch.int64; legal: [4]"),
        (change("prompt_lengths", (0,), 3), "row 0, prompt 0 and sample 0, has no prompt, or one of more than"),
        (change("lengths", (2,), 0), "row 2, prompt 1 and sample 0, has a response of more than"),
        (change("lengths", (2,), 5), "row 2, prompt 1 and sample 0, has a response of more than"),
        (change("loss_mask", (1, 0), True), "row 1, prompt 0 and sample 1, has loss_mask set outside"),
        (change("loss_mask", (1,), False), "row 1, prompt 0 and sample 1, must have tokens on loss_mask"),
        (fail_one_with_tokens, "row 0, prompt 0 and sample 0, must have tokens on loss_mask"),
        (change("tokens", (2, 1), 10), "row 2, prompt 1 and sample 0, has token ids outside"),
        (change("rollout_logprobs", (0, 2), 0.5), "row 0, prompt 0 and sample 0, has log-probs that are not finite"),
        (change("rollout_logprobs", (0, 2), float("nan")), "row 0, prompt 0 and sample 0, has log-probs that are not"),
        (change("rollout_logprobs", (0, 1), -0.5), "row 0, prompt 0 and sample 0, has log-probs that are not"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(broken: Callable[[Rollout], Any], message: str) -> None:
    """Each by its row, the rule and the setting that chose the source; the rows before are accepted as they are."""
    context = context_over(Answers())
    rows = context.rollout(context.sample(PROMPTS, step=0))
    assert checked(rows).generate(PROMPTS, step=0) is rows
    with pytest.raises(RunError) as error:
        checked(broken(rows)).generate(PROMPTS, step=0)
    assert str(error.value).startswith(f"rollout.source='own.py:Own': {message}")


class Other(SingleRank):
    """A replica whose other rank has a larger number."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (tensor > 0)


def test_ranks_of_a_replica_return_the_same_rows() -> None:
    context = context_over(Answers())
    rows = context.rollout(context.sample(PROMPTS, step=0))
    with pytest.raises(RunError, match="the ranks of a replica return different rows; gather them"):
        checked(rows, replica=Other()).generate(PROMPTS, step=0)
