"""Conversations: turns and messages by a chat template; with tools, until a turn calls none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, ClassVar

from mega_rl.agents.environment import Environment, Policy
from mega_rl.agents.templates import ASKED, Ids, TurnTemplate
from mega_rl.agents.tool_servers import McpServer
from mega_rl.agents.tools import Call, Toolbox, ToolFunction
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.data.chat import TemplateRefusal
from mega_rl.data.columns import Message
from mega_rl.errors import UserError
from mega_rl.types import Prompt

TOOL_ANSWER: Message = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "!"}


@dataclass
class Conversation(Environment):
    """Base of environments in which turns and messages alternate, by the run's chat template."""

    context: Any  # a `RolloutContext`
    # Keep turns as they were sampled where the template changes them; else it opens a branch for each turn.
    keep_turns: bool = field(default=False, kw_only=True)

    def prove(self, answer: Message, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
        """Prove the template for messages such as `answer` after turns. Raises UserError."""
        given, what = self.context.template, "with tools" if schemas else "in a conversation"
        if given is None:
            raise UserError(
                f"{type(self).__name__} needs a chat template: data.chat.template=true, and a tokenizer that has one"
            )
        # One date for the whole run, as that of its prompts.
        template = replace(given, date=given.date or date.today())
        self._turns = TurnTemplate(template, self.context.sampling.stop_token_ids, schemas)
        self._rule = self._turns.rule([answer])
        self._reopens = bool(self._rule.rewritten) and not self.keep_turns
        try:
            if self._rule.refused:
                raise TemplateRefusal(self._rule.refused)
            if self._reopens:
                self._turns.opening([*ASKED, (self._rule.stop,), answer])
        except TemplateRefusal as error:
            raise UserError(f"the tokenizer's chat template cannot be used {what}: {error}") from error

    def opened(self, prompt: Prompt) -> list[Message | Ids]:
        """Return the prompt's messages, which are its tokens. Raises ValueError."""
        messages: list[Message | Ids] = [{"role": role, "content": content} for role, content in prompt.messages]
        if not messages:
            raise ValueError("the prompt is text; a conversation needs data.chat.template=true or a list of messages")
        if self._turns.opening(messages) != prompt.token_ids:
            raise ValueError(
                "the prompt does not show the tools, or has more than plain messages and tools; give each row a column "
                "'tools' with their JSON schemas, or set data.chat.template_kwargs.tools"
            )
        return messages

    def can_follow(self, turn: Turn) -> bool:
        """Return whether messages can follow a turn: it has ended, and as the template ends it."""
        return turn.stopped and (self._reopens or turn.token_ids[-1] == self._rule.stop)

    def tell(
        self, trajectory: Trajectory, history: list[Message | Ids], turn: Turn, answers: Sequence[Message]
    ) -> None:
        """Append a turn and the messages after it, and give the policy their tokens."""
        history += [turn.token_ids, *answers]
        if self._reopens:
            trajectory.open(self._turns.opening(history))
        else:
            trajectory.give(self._turns.between(answers, turn.token_ids[-1], keep=self.keep_turns))


@dataclass
class ToolsEnvironment(Conversation):
    """Base of a user's environment with tools: a class that sets `tools` and `style`."""

    call_timeout_s: float = field(default=30.0, kw_only=True)  # seconds that one call may take
    most_calls: int = field(default=8, kw_only=True)  # calls that one turn may make
    most_characters: int = field(default=20_000, kw_only=True)  # longest answer of a tool
    tools: ClassVar[Sequence[Callable[..., Any] | ToolFunction | McpServer]] = ()
    style: ClassVar[str] = "hermes"  # how the model writes calls, a key of `agents.tools.STYLES`

    def __post_init__(self) -> None:
        """Prove the chat template.

        Raises UserError: it takes no tools, or nothing is exact after its turns.
        """
        if not self.tools:
            raise UserError("tools is empty; set it to functions, as tools = (add, multiply)")
        tools = [tool for one in self.tools for tool in (one.tools() if isinstance(one, McpServer) else [one])]
        self._box = self._toolbox(tools)
        self.prove(TOOL_ANSWER, self._box.schemas)

    def _toolbox(self, tools: Sequence[Callable[..., Any] | ToolFunction]) -> Toolbox:
        return Toolbox(
            tools, self.style,
            timeout_s=self.call_timeout_s, most_calls=self.most_calls, most_characters=self.most_characters,
        )  # fmt: skip

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Take turns and answer their calls until a turn has no call."""
        async for _ in self.exchanges(self._box, policy, prompt, trajectory):
            pass

    async def exchanges(
        self, box: Toolbox, policy: Policy, prompt: Prompt, trajectory: Trajectory
    ) -> AsyncIterator[tuple[list[Call], list[Message]]]:
        """Yield the calls of each turn and their answers, until a turn has no call."""
        history = self.opened(prompt)
        while True:
            turn = await policy.turn()
            text = self.context.tokenizer.decode(list(turn.token_ids), clean_up_tokenization_spaces=False)
            calls = box.calls(text) if self.can_follow(turn) else []
            if not calls:
                return
            begin = time.monotonic()
            answers = await box.answers(calls)
            trajectory.tool_s += time.monotonic() - begin
            trajectory.tool_calls += len(calls)
            yield calls, answers
            self.tell(trajectory, history, turn, answers)
