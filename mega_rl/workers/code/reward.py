"""The reward function `code_tests`: the share of a row's tests that the program of a response passes in a sandbox."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mega_rl.config.schema import RewardSandboxConfig
from mega_rl.config.schema.sandbox import CODE_TESTS
from mega_rl.sandbox.limits import Sandbox
from mega_rl.workers.code.blocks import last_program
from mega_rl.workers.code.cases import Case, read_cases
from mega_rl.workers.code.sandboxes import build_sandbox


@dataclass(frozen=True)
class CodeTests:
    """Scores of responses by their rows' tests."""

    sandbox: Sandbox
    timeout_s: float  # of one case
    total_s: float  # of all cases of a response; those not begun by then have failed
    parallel: int  # cases at a time
    all_or_nothing: bool

    def __call__(self, response: str, answer: object, row: Mapping[str, object] | None = None) -> float:
        """Return the share of the cases that the last code block passes, or 1.0 for all and else 0.0.

        Raises UnknownTestsError for a row without tests, and SandboxError where the sandbox fails.
        """
        cases = read_cases(answer, row)
        program = last_program(response)
        if program is None or not program.strip():
            return 0.0
        passed = self._passed(program, cases)
        return float(passed == len(cases)) if self.all_or_nothing else passed / len(cases)

    def _passed(self, program: str, cases: Sequence[Case]) -> int:
        """Return how many cases pass; of all or nothing, none is begun once one has failed."""
        deadline = time.monotonic() + self.total_s
        passed = 0
        with ThreadPoolExecutor(self.parallel) as threads:
            waiting = iter(cases)
            while batch := list(itertools.islice(waiting, self.parallel)):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                runs = [threads.submit(case.run, self.sandbox, program, min(self.timeout_s, left_s)) for case in batch]
                results = [run.result()[0] for run in runs]
                passed += sum(results)
                if self.all_or_nothing and not all(results):
                    break
        return passed


def code_tests(response: str, answer: object, row: Mapping[str, object] | None = None) -> float:
    """Return the share of the row's tests that the response's program passes, in a sandbox of default settings."""
    return _built(RewardSandboxConfig())(response, answer, row)


def specification(settings: RewardSandboxConfig) -> str:
    """Return the name of the reward function with its settings behind it, as `resolve` reads it in any process."""
    return f"{CODE_TESTS} {json.dumps(dataclasses.asdict(settings), sort_keys=True)}"


def with_settings(text: str) -> CodeTests:
    """Return the reward function of settings in JSON. Raises UserError where there is no such sandbox."""
    return _built(RewardSandboxConfig(**json.loads(text)))


@functools.cache
def _built(settings: RewardSandboxConfig) -> CodeTests:
    return CodeTests(
        build_sandbox(settings),
        timeout_s=settings.timeout_s,
        total_s=settings.total_s,
        parallel=settings.parallel,
        all_or_nothing=settings.score == "all",
    )
