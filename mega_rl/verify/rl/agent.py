"""An agent whose rows have given tokens, forks and other contexts."""

from __future__ import annotations

from dataclasses import dataclass

import mega_rl
from mega_rl.verify.rl.inputs import STOP_TOKENS, VOCABULARY
from mega_rl.verify.rl.rewards import agent_scores


@dataclass
class Agent(mega_rl.Environment):
    """Two turns in a row; of three samples one forks, and one has another context."""

    context: mega_rl.RolloutContext

    async def run(self, policy: mega_rl.Policy, prompt: mega_rl.Prompt, trajectory: mega_rl.Trajectory) -> None:
        """Play and score a trajectory of at most 10 tokens in a row."""
        first = await policy.turn(limit=3)
        trajectory.give(self._answer(first))
        second = await policy.turn(limit=3)
        kind = trajectory.sample_index % 3
        if kind == 1:
            trajectory.fork(trajectory.branch, 2)
        elif kind == 2:
            trajectory.open((*prompt.token_ids[:2], *self._answer(second)))
        if kind:
            trajectory.give(self._answer(second))
            await policy.turn(limit=3)
        turns = trajectory.turns
        trajectory.score, scores = agent_scores(prompt.text, [turn.token_ids for turn in turns], str(prompt.answer))
        for turn, score in zip(turns, scores, strict=True):
            turn.score = score

    @staticmethod
    def _answer(turn: mega_rl.Turn) -> list[int]:
        """Return one or two tokens that depend on a turn, stop tokens among them."""
        total = sum(turn.token_ids)
        return [STOP_TOKENS[0] + (total + place) % (len(VOCABULARY) - STOP_TOKENS[0]) for place in range(1 + total % 2)]
