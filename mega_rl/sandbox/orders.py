"""Orders to the harness inside a sandbox, and its verdicts."""

from __future__ import annotations

import functools
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from mega_rl.sandbox.limits import Execution

_PLACE = 'CANDIDATE = ""'
_FUTURE = "from __future__ import annotations\n"
_IMPORT = "from mega_rl.sandbox.inside.values import Value, decode, encode\n"


@functools.cache
def harness_text() -> str:
    """Return the harness with the candidate's program in it, as the text of one file."""
    harness = _program("harness")
    assert harness.count(_PLACE) == 1, "the harness has one place for the candidate's program"
    return harness.replace(_PLACE, f"CANDIDATE = {_program('candidate')!r}")


def _program(name: str) -> str:
    """Return the text of a program inside, with that of `values` in the place of its import."""
    folder = Path(__file__).parent / "inside"
    text, values = ((folder / f"{one}.py").read_text("utf-8") for one in (name, "values"))
    assert text.count(_IMPORT) == 1, "a program imports the values once"
    return text.replace(_IMPORT, values.replace(_FUTURE, ""))


@dataclass(frozen=True)
class Order:
    """One order: the standard input of the harness, and the token that its verdict carries."""

    stdin: bytes
    token: str

    @classmethod
    def of_call(cls, code: str, entry: str, arguments: list[object]) -> Order:
        """Return the order to call a function of the code."""
        return cls._make(mode="call", code=code, entry=entry, arguments=arguments)

    @classmethod
    def of_tests(cls, code: str, tests: str, entry: str = "") -> Order:
        """Return the order to run tests, Python with assert statements, over the code."""
        return cls._make(mode="tests", code=code, tests=tests, entry=entry)

    @classmethod
    def _make(cls, **order: object) -> Order:
        token = secrets.token_hex(16)
        return cls(json.dumps({"token": token, **order}).encode(), token)

    def verdict(self, outcome: Execution) -> dict[str, object]:
        """Return what the harness says: {"value"}, {"passed"} or {"error"}; {"error"} where it said nothing."""
        if not outcome.succeeded:
            return {"error": outcome.status if outcome.status != "finished" else f"exit code {outcome.return_code}"}
        last = outcome.stdout.rstrip(b"\n").rpartition(b"\n")[2]
        token, _, text = last.partition(b" ")
        try:
            verdict = json.loads(text) if token.decode("ascii", "replace") == self.token else None
        except (ValueError, RecursionError):
            verdict = None
        return verdict if isinstance(verdict, dict) else {"error": "no verdict"}
