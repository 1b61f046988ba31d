"""Errors that end a run with one message instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in what the user gave us: shown as one message, exit code 2, never a traceback.

    The message names the thing, its value, the rule it breaks and the fix.
    """

    exit_code = 2


class RunError(RuntimeError):
    """A run that cannot go on for a reason that its own numbers or the user's code gave: one message, exit code 1.

    Raised on all ranks alike. The message names what was found and where.
    """

    exit_code = 1


class UserErrors(UserError):
    """Several mistakes, shown together, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "UserErrors needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))
