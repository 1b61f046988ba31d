"""Orders to the harness inside a sandbox, and its verdicts."""

from __future__ import annotations

import functools
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from mega_rl.rewards.sandbox.limits import Execution

_PLACE = 'CANDIDATE = ""'
_FUTURE = "from __future__ import annotations\n"
_IMPORT = re.compile(r"^from mega_rl\.rewards\.sandbox\.inside\.(\w+) import .*\n", re.MULTILINE)


@functools.cache
def harness_text() -> str:
    """Return the harness with the candidate's program in it, as the text of one file."""
    harness = _program("harness")
    assert harness.count(_PLACE) == 1, "the harness has one place for the candidate's program"
    return harness.replace(_PLACE, f"CANDIDATE = {_program('candidate')!r}")


def _program(name: str) -> str:
    """Return the text of a program inside, with its modules in place of their imports."""
    text, parts = _IMPORT.sub("", _text(name)), dict.fromkeys(("values", *_IMPORT.findall(_text(name))))
    bodies = "".join(_IMPORT.sub("", _text(part)).replace(_FUTURE, "") for part in parts)
    return text.replace(_FUTURE, _FUTURE + bodies)


def _text(name: str) -> str:
    return (Path(__file__).parent / "inside" / f"{name}.py").read_text("utf-8")


@dataclass(frozen=True)
class Order:
    """One order: the standard input of the harness, and the token that its verdict carries."""

    stdin: bytes
    token: str

    @classmethod
    def to(cls, mode: str, **content: object) -> Order:
        """Return an order, with what `inside.harness` says that its mode needs."""
        token = secrets.token_hex(16)
        return cls(json.dumps({"token": token, "mode": mode, **content}).encode(), token)

    def verdict(self, outcome: Execution) -> dict[str, object]:
        """Return the harness's verdict: {"value"}, {"passed"}, or {"error"}, also without one."""
        if not outcome.succeeded:
            return {"error": outcome.status if outcome.status != "finished" else f"exit code {outcome.return_code}"}
        last = outcome.stdout.rstrip(b"\n").rpartition(b"\n")[2]
        token, _, text = last.partition(b" ")
        try:
            verdict = json.loads(text) if token.decode("ascii", "replace") == self.token else None
        except (ValueError, RecursionError):
            verdict = None
        return verdict if isinstance(verdict, dict) else {"error": "no verdict"}
