"""A sandbox at a service that speaks SandboxFusion's protocol. Imports no torch.

POST /run_code of {"code", "language": "python", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files",
"fetch_files"} answers {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result":
{"status": "Finished" | "Error" | "TimeLimitExceeded", "execution_time", "return_code", "stdout", "stderr"}, "files"}.
Source: bytedance/SandboxFusion, sandbox/server/sandbox_api.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.rewards.sandbox import MIB, Execution, Limits, SandboxError, Status
from mega_rl.rewards.score import shortened
from mega_rl.rewards.service import Poster, PostError

ANSWER_BYTES = 1 << 20  # without the two outputs, each of whose bytes takes up to six in JSON
RETRIES = 3
WAIT_S = 30.0  # for the service to take a request up, before the program's time


@dataclass(frozen=True)
class RemoteSandbox:
    """Runs programs at a service, with the limits that its protocol has."""

    poster: Poster
    limits: Limits

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        body = {
            "code": program,
            "language": "python",
            "compile_timeout": timeout_s,
            "run_timeout": timeout_s,
            "memory_limit_MB": self.limits.memory_bytes // MIB,
            "stdin": stdin.decode(errors="replace"),
            "files": {},
            "fetch_files": [],
        }
        limit = ANSWER_BYTES + 12 * self.limits.output_bytes
        try:
            content = asyncio.run(self.poster.post(json.dumps(body).encode(), limit=limit))
        except PostError as error:
            raise SandboxError(f"sandbox service {self.poster.address}: {error}") from None
        try:
            return self._outcome(json.loads(content)["run_result"])
        except (ValueError, RecursionError, TypeError, KeyError):
            raise self._failure(
                f"no run_result that finished with a return_code or was late: {self.poster.readable(content)}"
            ) from None

    def check(self) -> None:
        """Run a program. Raises SandboxError unless it ends as it must."""
        outcome = self.run("print(6 * 7)", b"", timeout_s=min(20.0, self.limits.timeout_s))
        if not outcome.succeeded or outcome.stdout != b"42\n":
            raise self._failure(f"{outcome.status}, output {shortened(outcome.stdout)} of print(6 * 7)")

    def _outcome(self, run: Mapping[str, object]) -> Execution:
        """Return a run's end. Raises TypeError or KeyError for the service's failures."""
        is_late, code = run["status"] == "TimeLimitExceeded", run.get("return_code")
        if not is_late and (run["status"] != "Finished" or type(code) is not int):
            raise TypeError
        stdout, stderr = (str(run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
        end: Status = "timeout" if is_late else "finished"
        if max(len(stdout), len(stderr)) > self.limits.output_bytes:
            end = "output"
        return Execution(end, code if type(code) is int and end == "finished" else None, stdout, stderr)

    def _failure(self, what: str) -> SandboxError:
        return SandboxError(f"sandbox service {self.poster.address} answered {what}")
