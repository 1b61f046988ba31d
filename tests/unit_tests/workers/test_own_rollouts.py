"""What a user's rollout source is given, and the rows that are refused, over an engine of fixed answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from mega_rl.agents.environment import (
    Answer,
    Environment,
    Policy,
    Runner,
    TurnQueue,
    TurnRequest,
    TurnSampling,
    in_batches,
)
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.role import EnvironmentScorer
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Draws, Prompt, Rollout
from mega_rl.workers.rollout import EVALUATION, CheckedRollouts, EnvironmentRollouts, RolloutContext

PROMPTS = [Prompt(index=7, token_ids=(3, 4), text="a", answer=""), Prompt(index=8, token_ids=(5,), text="b", answer="")]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=5, stop_token_ids=(1,))


class Answers:
    """An engine that answers every turn with 9 and a stop, as far as its limit goes; it loses turns once."""

    def __init__(self, *, loses: bool = False) -> None:
        self.loses, self.calls = loses, list[dict[str, Any]]()

    def turns(self, asked: TurnQueue, how: TurnSampling) -> None:
        in_batches(asked, partial(self._answers, how=how))

    def _answers(self, requests: Sequence[TurnRequest], how: TurnSampling) -> list[Answer]:
        self.calls.append({"requests": list(requests), **how._asdict()})
        answers = [Turn(ids, (-0.5,) * len(ids), (), len(ids) == 2) for ids in ((9, 1)[: r.limit] for r in requests)]
        return ["lost" if self.loses and one.key[1] else got for one, got in zip(requests, answers, strict=True)]

    def settle(self, lost: Callable[[], int], again: Callable[[], None], *, holds: bool = True) -> None:
        self.loses = False
        if lost():
            again()

    def metrics(self) -> dict[str, float]:
        return {"engine/tokens": 3.0}


@dataclass
class Tool(Environment):
    """A tool that answers with 7 once, a second time with 7 8 9."""

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn()
        trajectory.give([7])
        await policy.turn()
        trajectory.give([7, 8, 9])


def context_over(engine: Answers | None, *, reads_scores: bool = False) -> RolloutContext:
    return RolloutContext(
        tokenizer=None,  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        sampling=SAMPLING,
        n=2,
        seed=11,
        data_parallel=SingleRank(),
        replica=SingleRank(),
        weight_version=lambda: 6,
        reads_scores=reads_scores,
    )


def played(engine: Answers, own: Environment | None = None) -> EnvironmentRollouts:
    return EnvironmentRollouts(
        Runner(own or Tool(), "rollout.source='own.py:Own'", 10), context_over(engine), SingleRank()
    )


def test_turns_of_a_trajectory() -> None:
    """Each trajectory reads all that came before, has random numbers of its own and what room is left."""
    source = played(engine := Answers())
    rows = source.generate(PROMPTS, step=3)
    first, *later = engine.calls
    assert first == {
        "requests": [TurnRequest(ids, (p, n, 0), 5) for p, ids in enumerate([(3, 4), (5,)]) for n in range(2)],
        "seed": (11, 3), "greedy": False, "draws": None,
    }  # fmt: skip
    again = sorted(one for call in later for one in call["requests"])
    assert again == sorted(
        TurnRequest((*ids, 9, 1, 7), (p, n, 1), 2) for p, ids in enumerate([(3, 4), (5,)]) for n in range(2)
    )
    assert rows.tokens[1].tolist() == [3, 4, 9, 1, 7, 9, 1]
    assert rows.loss_mask[1].tolist() == [False, False, True, True, False, True, True]
    assert rows.rollout_logprobs[1].tolist() == [0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert rows.end.tolist() == [1] * 4  # the tool's second answer did not fit: not done, though a stop token came
    assert rows.lengths.tolist() == [7, 7, 6, 6]
    assert (rows.prompt_index.tolist(), rows.sample_index.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert rows.weight_version.tolist() == [6] * 4
    assert (rows.failed, rows.branch) == (None, None)
    metrics = source.metrics()
    assert metrics["agent/turns_mean"] == 2.0
    assert metrics["agent/given_tokens_mean"] == 1.0
    assert metrics["agent/end_length_fraction"] == 1.0


def test_turns_of_an_evaluation_have_random_numbers_and_limits_of_their_own() -> None:
    draws = Draws(3, 0.6, stream=8, first=20, max_new_tokens=4)
    source = checked(played(engine := Answers()))
    rows = source.generate(PROMPTS, step=3, draws=draws)
    assert rows.sample_index.tolist() == [0, 1, 2] * 2
    assert {call["seed"] for call in engine.calls} == {(11, 3, EVALUATION, 8)}
    assert {call["draws"] for call in engine.calls} == {draws}
    asked = sorted(one for call in engine.calls for one in call["requests"])
    assert asked[0] == TurnRequest((3, 4), (20, 0, 0), 4)
    assert asked[3] == TurnRequest((3, 4, 9, 1, 7), (20, 0, 1), 1)
    with pytest.raises(RunError, match=r"legal: \[4, 6\]"):  # two samples of each prompt, those of training
        checked(rows).generate(PROMPTS, step=3)


def test_trajectories_of_lost_servers_run_again_with_the_same_requests() -> None:
    rows = played(engine := Answers(loses=True)).generate(PROMPTS, step=3)
    whole = played(Answers()).generate(PROMPTS, step=3)
    assert torch.equal(rows.tokens, whole.tokens)
    assert torch.equal(rows.end, whole.end)
    assert len(engine.calls[0]["requests"]) == 4


@dataclass
class Fails(Environment):
    max_failed_share: float = 0.25

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        if (trajectory.prompt_index, trajectory.sample_index) == (1, 0):
            raise ValueError("the tool broke")
        await policy.turn()


def test_a_failed_sample_is_a_row_without_a_response(caplog: pytest.LogCaptureFixture) -> None:
    source = played(Answers(), Fails())
    rows = source.generate(PROMPTS, step=0)
    assert rows.failed is not None
    assert rows.failed.tolist() == [False, False, True, False]
    assert rows.end.tolist() == [0, 0, 3, 0]
    assert rows.loss_mask.any(dim=1).tolist() == [True, True, False, True]
    assert rows.lengths.tolist() == [4, 4, 1, 3]
    assert checked(rows).generate(PROMPTS, step=0) is rows
    assert source.metrics()["agent/failed_error"] == 1.0
    assert "sample 0 of prompt 8: raised ValueError: the tool broke" in caplog.text
    with pytest.raises(RunError, match=r"1 of 4 trajectories failed, more than .*=0.2; .* the tool broke"):
        played(Answers(), Fails(max_failed_share=0.2)).generate(PROMPTS, step=0)


class Routed(Answers):
    """An engine that reports an expert of two mixtures for each input: its position, and the tokens that were read."""

    def _answers(self, requests: Sequence[TurnRequest], how: TurnSampling) -> list[Answer]:
        answers = super()._answers(requests, how)
        for one, turn in zip(requests, answers, strict=True):
            assert isinstance(turn, Turn)
            read, inputs = len(one.token_ids), len(one.token_ids) + len(turn.token_ids) - 1
            turn.routing = torch.tensor([[[place], [read]] for place in range(inputs)], dtype=torch.int16)
        return answers


def test_rows_have_the_experts_of_their_turns() -> None:
    rows = played(Routed()).generate(PROMPTS, step=3)
    assert rows.routing is not None
    assert rows.routing[1, :, 1, 0].tolist() == [2, 2, 2, 5, 5, 5, -1]  # tokens 3 4, 9 1, 7, 9 1
    assert rows.routing[3, :, 0, 0].tolist() == [0, 1, 2, 3, 4, -1, -1]
    failed = played(Routed(), Fails()).generate(PROMPTS, step=0).routing
    assert failed is not None
    assert failed.amax(dim=(1, 2, 3)).tolist() == [2, 2, -1, 1]


@dataclass
class Scores(Environment):
    """Sets a number for each sample, the last a wrong one."""

    last: object = None
    max_failed_share: float = 0.25

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        place = 2 * trajectory.prompt_index + trajectory.sample_index
        trajectory.score = self.last if place == 3 else 0.5 * place  # type: ignore[assignment]
        await policy.turn()


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (None, "set neither trajectory.score nor a turn's, which are the reward with reward.source=environment"),
        (float("nan"), "set the score nan; legal: a finite number"),
        (1e39, "set the score 1e+39; legal: a finite number"),
        ("1", "set the score '1'; legal: a finite number"),
    ],
)
def test_a_trajectory_without_a_score_has_failed(last: object, what: str, caplog: pytest.LogCaptureFixture) -> None:
    source = scored(Scores(last=last))
    rows = source.generate(PROMPTS, step=0)
    assert rows.failed is not None
    assert rows.scores is not None
    assert rows.failed.tolist() == [False, False, False, True]
    assert rows.scores.tolist() == EnvironmentScorer().score(rows, PROMPTS).totals.tolist() == [0.0, 0.5, 1.0, 0.0]
    assert source.metrics()["agent/failed_error"] == 1.0
    assert f"sample 1 of prompt 8: {what}" in caplog.text
    assert checked(rows, reads_scores=True).generate(PROMPTS, step=0) is rows
    with pytest.raises(RunError, match=r"sets scores, and reward.source is not environment"):
        checked(rows).generate(PROMPTS, step=0)


def test_scores_that_nothing_reads_are_refused() -> None:
    with pytest.raises(RunError, match=r"4 of 4 .* set a score, which needs reward.source=environment"):
        played(Answers(), Scores(last=1.5)).generate(PROMPTS, step=0)
    assert scored(Fails(max_failed_share=1.0), reads_scores=False).generate(PROMPTS, step=0).scores is None
    with pytest.raises(RunError, match="row 0, prompt 0 and sample 0, has no finite score"):
        checked(two_turns(reads_scores=True), reads_scores=True).generate(PROMPTS, step=0)
    with pytest.raises(RunError, match="sets no scores"):
        checked(two_turns(), reads_scores=True).generate(PROMPTS, step=0)


def scored(own: Environment, *, reads_scores: bool = True) -> EnvironmentRollouts:
    return replace(played(Answers(), own), context=context_over(Answers(), reads_scores=reads_scores))


def two_turns(*, reads_scores: bool = False) -> Rollout:
    """The rows of a source that samples nothing itself."""
    context = context_over(None, reads_scores=reads_scores)
    trajectories = context.start(PROMPTS)
    for one in trajectories:
        one.add([9, 1], [-0.5, -0.5], stopped=True)
    return context.rollout(trajectories)


class Returned:
    """A source that returns these rows."""

    def __init__(self, rows: Any, metrics: Any) -> None:
        self.rows, self.of_source = rows, metrics

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        return self.rows  # type: ignore[no-any-return]

    def metrics(self) -> dict[str, float]:
        return self.of_source  # type: ignore[no-any-return]


def checked(rows: Any, metrics: Any = None, *, replica: Any = None, reads_scores: bool = False) -> CheckedRollouts:
    return CheckedRollouts(
        rows if hasattr(rows, "generate") else Returned(rows, {} if metrics is None else metrics),
        "rollout.source='own.py:Own'",
        replace(context_over(Answers(), reads_scores=reads_scores), replica=replica or SingleRank()),
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
    rows.end = rows.lengths
    return rows


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda rows: {"tokens": rows.tokens}, "generate() returned dict, not a Rollout"),
        (lambda rows: rows[:3], "tokens has shape [3, 4] and type torch.int64; legal: [4, 4]"),
        (number_finished, "end has shape [4] and type torch.int64; legal: [4]"),
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
    rows = two_turns()
    assert checked(rows).generate(PROMPTS, step=0) is rows
    with pytest.raises(RunError) as error:
        checked(broken(rows)).generate(PROMPTS, step=0)
    assert str(error.value).startswith(f"rollout.source='own.py:Own': {message}")


class Other(SingleRank):
    """A replica whose other rank has a larger number."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (tensor > 0)


def test_ranks_of_a_replica_return_the_same_rows() -> None:
    rows = two_turns()
    with pytest.raises(RunError, match="the ranks of a replica return different rows; gather them"):
        checked(rows, replica=Other()).generate(PROMPTS, step=0)
