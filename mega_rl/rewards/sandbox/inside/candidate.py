"""Program of the candidate's process, which `harness` starts: it runs the candidate's code and answers calls.

Nothing here is a secret or decides anything: the code that it runs may read and change all of it.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from itertools import islice

from mega_rl.rewards.sandbox.inside.values import Value, decode, encode

MOST_ITEMS = 1_000_000  # of an iterator


class CandidateServer:
    """Answers of one candidate to requests."""

    def __init__(self, requests: Value, answers: Value) -> None:
        self._requests, self._answers = requests, answers

    def serve(self) -> None:
        """Answer requests until there are no more."""
        for line in self._requests:
            op, *parts = json.loads(line)
            with self:
                self._send("value", self._encode(OPERATIONS[op](*(self._decode(part) for part in parts))))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Answer with what the code raises, SystemExit and all."""
        if error is not None:
            names = [parent.__name__ for parent in type(error).__mro__ if hasattr(builtins, parent.__name__)]
            self._send("raised", [names[0], str(error)[:500]])
        return True

    def _send(self, kind: str, value: Value) -> None:
        self._answers.write(json.dumps([kind, value]) + "\n")
        self._answers.flush()

    def _encode(self, value: Value) -> Value:
        return encode(value, self._refer)

    def _refer(self, value: Value) -> Value:
        if not isinstance(value, type) and hasattr(value, "__next__"):
            return {"iterator": [self._encode(part) for part in islice(value, MOST_ITEMS)]}
        if not isinstance(value, type) and hasattr(value, "tolist"):  # numpy
            return self._encode(value.tolist())
        raise TypeError("an object of " + type(value).__name__ + " is no data")

    def _decode(self, value: Value) -> Value:
        return decode(value, self._referred)

    def _referred(self, kind: str, number: int) -> Value:
        return lambda *arguments: self._call_back(number, arguments)

    def _call_back(self, number: int, arguments: Value) -> Value:
        """Call a function of the tests and return its result."""
        self._send("callback", [number, [self._encode(part) for part in arguments]])
        kind, *parts = json.loads(self._requests.readline())
        if kind == "raised":
            raise getattr(builtins, parts[0], RuntimeError)(parts[1])
        return self._decode(parts[0])


module = types.ModuleType("solution")  # the code's own tests behind `if __name__ == "__main__"` stay out


def load(code: str) -> dict[str, bool]:
    """Run the code; return the names that it defines, and whether each can be called."""
    sys.modules["solution"] = module
    exec(compile(code, "program.py", "exec"), module.__dict__)
    return {name: callable(value) for name, value in module.__dict__.items() if not name.startswith("__")}


def call(name: str, arguments: list[Value], keywords: dict[str, Value]) -> list[Value]:
    """Return the result, and arguments that may have changed; name: maybe "Solution.method"."""
    kind, _, method = name.rpartition(".")
    target = getattr(getattr(module, kind)(), method) if kind else getattr(module, name)
    result = target(*arguments, **keywords)
    return [result, [part if isinstance(part, (list, dict, set)) else None for part in arguments]]


OPERATIONS: dict[str, Value] = {"load": load, "name": lambda name: getattr(module, name), "call": call}


def main() -> None:
    """Serve on descriptors that the code does not have as standard input and output."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    if not hasattr(builtins, "exit"):  # an interpreter that has been started without its packages
        builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    CandidateServer(requests, answers).serve()


if __name__ == "__main__":
    main()
