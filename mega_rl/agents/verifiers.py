"""Environments of the package verifiers, which call the policy as an API and score it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from mega_rl.agents.environment import Policy
from mega_rl.agents.gateway import Gateway
from mega_rl.agents.trajectory import Trajectory
from mega_rl.errors import RunError, UserError
from mega_rl.types import Prompt
from mega_rl.untrusted import shorten

_playing: ContextVar[Trajectory] = ContextVar("_playing")


@dataclass
class Verifiers(Gateway):
    """Base of an environment that is one of verifiers, unchanged: set `name`, or define `load`."""

    name: str = field(default="", kw_only=True)  # an installed environment, "gsm8k"

    def load(self) -> Any:
        """Return the environment, a `verifiers.Environment`. Raises UserError."""
        if not self.name:
            raise UserError("name is empty; set it to an environment of verifiers, or define the method load")
        return _packages()[0].load_environment(self.name)

    def __post_init__(self) -> None:
        """Load the environment and its rows. Raises UserError."""
        super().__post_init__()
        _packages()
        self._world = self.load()
        splits: tuple[Literal["train", "validation"], ...] = ("train", "validation")
        self._given = {
            _key(row["prompt"], row["answer"]): given for split in splits for row, given in _rows(self._world, split)
        }

    @staticmethod
    def rows(world: Any, split: Literal["train", "validation"]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of an environment, as a data source does: prompt and answer."""
        for row, _ in _rows(world, split):
            yield row

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Let the environment play; with reward.source=environment its reward is the score."""
        _playing.set(trajectory)  # this task's, and so seen by `play`
        await super().run(policy, prompt, trajectory)

    async def play(self, url: str, key: str, prompt: Prompt) -> None:
        """Play the row of a prompt. Raises RunError: there is none, or the environment failed."""
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        given = self._given.get(_key(messages, prompt.answer))
        if given is None:
            raise RunError(f"prompt {prompt.index} is not a row of the environment; take its rows and no system prompt")
        _, clients, openai = _packages()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None) as http:
            client = clients.OpenAIChatCompletionsClient(http)
            output = await self._world.run_rollout(given, client, "policy", {})
        if self.context.reads_scores:
            _playing.get().score = output["reward"]
        error = output.get("error")
        if error and error["error"] != "EmptyModelResponseError":  # which is the policy's doing
            raise RunError(f"the environment of verifiers failed: {shorten(str(error), 300)}")


def _rows(world: Any, split: Literal["train", "validation"]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (row of a data source, the environment's own row)."""
    for given in world.get_dataset() if split == "train" else world.get_eval_dataset():
        messages = [{"role": one["role"], "content": one["content"]} for one in given["prompt"]]
        yield {"prompt": messages, "answer": str(given.get("answer") or "")}, dict(given)


def _key(messages: list[dict[str, Any]], answer: object) -> str:
    return json.dumps([messages, str(answer or "")])


def _packages() -> tuple[Any, Any, Any]:
    """Return verifiers, its clients and openai. Raises UserError."""
    try:
        import openai
        import verifiers
        from verifiers import clients
    except ImportError as error:
        raise UserError(f"verifiers cannot be imported ({error}): pip install 'mega_rl[verifiers]'") from None
    return verifiers, clients, openai
