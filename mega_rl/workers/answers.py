"""Answers that responses vote for: a function of one response on every rank, and one failure for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mega_rl.errors import UserError
from mega_rl.parallel.agreement import raise_together, run_beside_meetings
from mega_rl.protocols import Ranks
from mega_rl.workers.user_files import users_code


class UsersAnswers:
    """Answers by a user's function, which may fail or hang on one rank alone."""

    def __init__(self, function: Callable[[str], object], *, setting: str, everyone: Ranks, timeout_s: float) -> None:
        """
        setting: names the function in messages, as "validation.answer_of='a.py:f'".
        everyone: all ranks, which wait for each other's answers however long they take all in all.
        timeout_s: a rank that reads one response for so long ends the run.
        """
        self._function = function
        self._setting = setting
        self._everyone = everyone
        self._timeout_s = timeout_s
        self._begin = 0.0

    def __call__(self, responses: Sequence[str]) -> list[str | None]:
        """Return the answer of each response of this rank, None where it has none; collective over all ranks.

        Raises UserError on every rank where the function fails on any, or returns anything but a string or None;
        StalledError where it does not return.
        """
        self._begin = time.monotonic()
        answers, failure = run_beside_meetings(lambda: self._read(responses), self._everyone, stalled=self._stalled)
        raise_together(failure, self._everyone, error=UserError)
        return answers

    def _read(self, responses: Sequence[str]) -> tuple[list[str | None], UserError | None]:
        """Return the answers of this rank's responses up to the first failure, and that failure."""
        answers: list[str | None] = []
        for response in responses:
            self._begin = time.monotonic()
            try:
                with users_code(f"{self._setting}: failed for a response"):
                    answer = self._function(response)
                if not (answer is None or isinstance(answer, str)):
                    raise UserError(
                        f"{self._setting}: returned {type(answer).__name__}; it must return a string, or None for none"
                    )
            except UserError as error:
                return answers, error
            answers.append(answer)
        return answers, None

    def _stalled(self) -> str | None:
        if time.monotonic() - self._begin < self._timeout_s:
            return None
        return (
            f"rank {self._everyone.rank}: {self._setting} has not returned for {self._timeout_s:g} s "
            "(trainer.timeout_s)"
        )
