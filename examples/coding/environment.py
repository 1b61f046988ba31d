"""A file that the policy edits until its tests pass; the tests run in the sandbox, and their end is the score."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field

import mega_rl
from mega_rl.rewards.sandbox import MIB, Limits
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool
from mega_rl.rewards.sandbox.suites import judge, suite_of

SANDBOX = LocalSandbox(Tool.find(), Limits(memory_bytes=256 * MIB))
TESTS = """
now, wanted = [f(0), f(1)], {wanted}
assert now == wanted, f"f(0) and f(1) are {{now[0]}} and {{now[1]}}, not {{wanted[0]}} and {{wanted[1]}}"
"""


@dataclass
class File:
    """The file of one trajectory, and the values that its tests want."""

    text: str
    wanted: str  # f(0) and f(1)
    tested: dict[str, str] = field(default_factory=dict)  # what the tests said of each text

    async def test(self) -> str:
        """Return why the tests fail, or that they pass."""
        if self.text not in self.tested:
            suite = suite_of(TESTS.format(wanted=self.wanted), "f")
            # The tests judge from another process, so that no edit of the file decides its verdict.
            verdict = await asyncio.to_thread(judge, SANDBOX, 5.0, "tests", code=self.text, suite=suite)
            failure = str(verdict.get("error")).removeprefix("AssertionError: ")
            self.tested[self.text] = "passed" if verdict.get("passed") is True else failure
        return self.tested[self.text]


FILE: ContextVar[File] = ContextVar("FILE")  # of this trajectory, whose tools run in its context


async def run_tests() -> str:
    """Run the file's tests."""
    return await FILE.get().test()


async def replace(old: str, new: str) -> str:
    """Replace a text of the file by another one, then run the file's tests.

    Args:
        old: The text, which occurs once.
        new: The other text.
    """
    file = FILE.get()
    if file.text.count(old) != 1:
        return "error: old must occur once"
    file.text = file.text.replace(old, new)
    return await file.test()


class Coder(mega_rl.ToolsEnvironment):
    """A conversation with the two tools."""

    tools = (run_tests, replace)
    style = "hermes"

    async def run(self, policy: mega_rl.Policy, prompt: mega_rl.Prompt, trajectory: mega_rl.Trajectory) -> None:
        """Play the conversation; the score is 1 if the tests pass in the end."""
        file = File(prompt.messages[0][1], str(prompt.answer))
        FILE.set(file)
        try:
            await super().run(policy, prompt, trajectory)
        finally:
            trajectory.score = float(await file.test() == "passed")
