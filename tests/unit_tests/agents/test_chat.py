"""Conversations with tools over a scripted policy: ids are those of whole renderings, and nothing else trains."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mega_rl.agents.chat import ToolsEnvironment
from mega_rl.agents.environment import Answer, Played, Runner, TurnRequest, in_batches
from mega_rl.agents.trajectory import Trajectory, Turn, rows_of
from mega_rl.data.chat import ChatTemplate
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Prompt
from mega_rl.workers.rollout import RolloutContext
from tests.helpers.chats import byte_tokenizer
from tests.unit_tests.agents.families import FAMILIES

CHATML, READY = FAMILIES["chatml"].template, "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
STRIPS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set t = m.content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in t %}{% set t = t.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ t }}<|im_end|>\n{% endfor %}" + READY
)
END, OTHER_END = "<|im_end|>", "<|endoftext|>"
ASKED = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "2+3, twice?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def fail(text: str) -> None:
    """Fail.

    Args:
        text: Any.
    """
    raise KeyError("<|im_end|>")


class Calculator(ToolsEnvironment):
    """Two tools, one of which fails."""

    tools = (add, fail)


class Conversation:
    """One conversation over a policy that says the script's texts in turn."""

    def __init__(self, template: str, script: Sequence[str], *, limit: int = 2000, shown: bool = True, **own: Any):
        self.tokenizer = byte_tokenizer(template, eos=END, more=(OTHER_END,))
        environment = Calculator(context_of(self.tokenizer), **own)
        self.schemas = environment._box.schemas
        tokens = tuple(self.whole(ASKED, tools=self.schemas if shown else None))
        prompt = Prompt(0, tokens, "", "", tuple((one["role"], one["content"]) for one in ASKED))
        self.turns = [tuple(self.tokenizer(text)["input_ids"]) for text in script]
        said = Counter[tuple[int, ...]]()

        def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
            answers = list[Answer]()
            for one in requests:
                ids = self.turns[said[one.key[:2]]][: one.limit]
                said[one.key[:2]] += 1
                answers.append(
                    Turn(ids, (-0.5,) * len(ids), (), ids[-1] in environment.context.sampling.stop_token_ids)
                )
            return answers

        made = [Trajectory(prompt, 0, 0, limit)]
        runner = Runner(environment, "rollout.source='agent.py:Calculator'", len(self.tokenizer))
        self.outcome: Played = runner.run(made, partial(in_batches, sample=sample))[0]
        self.trajectory = self.outcome.trajectory

    def whole(self, messages: list[Any], *, tools: Any = None, ready: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=ready, return_dict=False
        )
        return ids

    def trained(self) -> list[tuple[int, ...]]:
        """Return the ids that train, row by row."""
        rows = rows_of([self.trajectory], version=1, with_failed=False, with_branches=True)
        assert ((rows.rollout_logprobs == -0.5) == rows.loss_mask).all()
        return [tuple(ids[mask].tolist()) for ids, mask in zip(rows.tokens, rows.loss_mask, strict=True)]


def context_of(tokenizer: Any) -> RolloutContext:
    stops = tuple(tokenizer.convert_tokens_to_ids([END, OTHER_END]))
    one = SingleRank()
    return RolloutContext(
        tokenizer, None, Sampling(1.0, 1.0, 0, 2000, stops), 1, 0, one, one, lambda: 1,
        ChatTemplate(tokenizer),
    )  # fmt: skip


def calls(*given: tuple[str, Any]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in given]
    return "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def called(*given: tuple[str, Any]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in given]
    return {"role": "assistant", "content": "", "tool_calls": made}


def answered(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": text} for text in texts]


def test_tokens_are_those_of_the_whole_conversation_and_only_turns_train() -> None:
    """Several calls in a turn, calls that fail, and a tool's answer that spells a special token."""
    first = (("add", {"a": 2, "b": 3}), ("fail", {"text": "x"}))
    second = (("add", {"a": "x", "b": 3}), ("divide", {}))
    one = Conversation(CHATML, [calls(*first) + END, calls(*second) + END, "5 and 5" + END])
    assert (one.outcome.failure, one.trajectory.ended(), len(one.trajectory.branches)) == (None, "done", 1)
    failed = [
        "error: KeyError: '!'",
        "error: 'a' must be of type integer",
        "error: no tool 'divide'; there are: add, fail",
    ]
    history = [
        *ASKED, called(*first), *answered("5", failed[0]), called(*second), *answered(*failed[1:]),
        {"role": "assistant", "content": "5 and 5"},
    ]  # fmt: skip
    expected = one.tokenizer.decode(one.whole(history, tools=one.schemas, ready=False)).removesuffix("\n")
    ids = list(one.trajectory.branch.token_ids)
    assert one.tokenizer.decode(ids) == expected.replace("'!'", "'<|im_end|>'")
    # A stop token for each of the messages, and none for the one that the answer spells.
    assert ids.count(one.tokenizer.convert_tokens_to_ids(END)) == len(history)
    assert one.trained() == [tuple(token for turn in one.turns for token in turn)]


def test_ids_are_bit_equal_to_the_rendering() -> None:
    given = ("add", {"a": 2, "b": 3})
    one = Conversation(CHATML, [calls(given) + END, calls(given, given) + END, "5" + END])
    history = [*ASKED, called(given), *answered("5"), called(given, given), *answered("5", "5")]
    assert list(one.trajectory.branch.token_ids) == one.whole(history, tools=one.schemas) + list(one.turns[2])


@pytest.mark.parametrize("keep_turns", [False, True])
def test_a_template_that_strips_thoughts_opens_a_branch_for_each_turn(keep_turns: bool) -> None:
    call = calls(("add", {"a": 2, "b": 3}))
    texts = [f"<think>\nhm\n</think>\n\n{call}", f"<think>\nwell\n</think>\n\n{call}", "5"]
    one = Conversation(STRIPS, [text + END for text in texts], keep_turns=keep_turns)
    assert one.outcome.failure is None, one.outcome.what
    branches = one.trajectory.branches
    if keep_turns:
        assert len(branches) == 1
        assert one.trained() == [tuple(token for turn in one.turns for token in turn)]
        return
    history: list[Any] = list(ASKED)
    for branch, text in zip(branches, texts, strict=True):
        assert list(branch.opening) == one.whole(history, tools=one.schemas)
        history += [{"role": "assistant", "content": text}, *answered("5")]
    assert one.trained() == one.turns


@pytest.mark.parametrize(
    ("script", "limit", "turns", "end"),
    [
        (["5" + END], 2000, 1, "done"),
        ([calls(("add", {"a": 2, "b": 3})) + OTHER_END], 2000, 1, "done"),  # no answer can follow
        ([calls(("add", {"a": 2, "b": 3}))] * 2, 30, 1, "length"),  # cut off within a call
        ([calls(("add", {"a": 2, "b": 3})) + END] * 9, 2000, 3, "turns"),
        ([calls(*[("add", {"a": 2, "b": 3})] * 9) + END, "5" + END], 2000, 2, "done"),
    ],
)
def test_how_a_conversation_ends(script: list[str], limit: int, turns: int, end: str) -> None:
    one = Conversation(CHATML, script, limit=limit, max_turns=3, most_calls=2)
    assert (one.outcome.failure, len(one.trajectory.turns), one.trajectory.ended()) == (None, turns, end)
    text = one.tokenizer.decode(list(one.trajectory.branch.token_ids))
    assert text.count("error: at most 2 calls in a turn") == (7 if len(script) == 2 and end == "done" else 0)


def test_a_prompt_that_does_not_show_the_tools_fails() -> None:
    one = Conversation(CHATML, ["5" + END], shown=False)
    assert one.outcome.failure == "error"
    assert "does not show the tools" in one.outcome.what
    assert not one.trajectory.turns


def test_what_cannot_work_is_refused_before_work_starts() -> None:
    gemma = byte_tokenizer(FAMILIES["gemma"].template, eos="<end_of_turn>", more=(END, OTHER_END))
    with pytest.raises(UserError, match="cannot be used with tools: after a turn, messages of the role 'tool' cannot"):
        Calculator(context_of(gemma))
    chatml = context_of(byte_tokenizer(CHATML, eos=END, more=(OTHER_END,)))
    with pytest.raises(UserError, match="tools is empty"):
        ToolsEnvironment(chatml)
    with pytest.raises(UserError, match=r"data\.chat\.template=true"):
        Calculator(replace(chatml, template=None))
