"""Rows with given answers: conversations, prompts with a completion, pairs, labelled answers, plain text.

A row's text is rendered once as a whole, and once up to the begin and the end of every turn that trains. Tokens train
between those places, counted in token ids: a rendering that is no prefix of the whole, in characters or in tokens, is a
problem of the row, since the model would learn to answer another prompt than it will see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mega_rl.config.values import shown
from mega_rl.data.chat import TemplateRefusal, common, difference
from mega_rl.data.columns import Message, RowProblem, kind_of, messages_of, template_columns
from mega_rl.data.prompts import PromptReading
from mega_rl.data.rows import PromptRow, Text, check_unicode
from mega_rl.types import Given, Prompt

_SHOWN = 30  # characters of a text in a message, on both sides of a place


@dataclass(frozen=True)
class Rendered:
    """Text of a whole row, and the places in it between which tokens train."""

    text: str
    spans: Sequence[tuple[int, int]]  # in characters
    is_plain: bool  # no template has put special tokens

    @property
    def prefixes(self) -> list[str]:
        """Return the texts up to each place, and the whole."""
        places = [place for span in self.spans for place in span]
        return [*(self.text[:place] for place in places), self.text]


@dataclass(frozen=True)
class ExampleRow(PromptRow):
    """A readable row with its answers that is not tokenised yet."""

    answers: Sequence[Rendered]

    @property
    def texts(self) -> list[Text]:
        return [(text, one.is_plain) for one in self.answers for text in one.prefixes if text]


@dataclass(frozen=True)
class ExampleReading(PromptReading):
    """Reading of rows with given answers; limits are those of whole rows."""

    form: str = "answers"  # "answers", "labelled" or "pairs"
    train_on: str = "assistant"  # "assistant", "last" or "all"
    stop_ids: Collection[int] = ()  # an answer ends with one
    end_id: int = -1  # appended to plain text that has no end

    def _parsed(self, row: Any, where: str, index: int) -> PromptRow:
        if isinstance(row, RowProblem):
            raise row
        if not isinstance(row, dict):
            raise RowProblem(f"is {kind_of(row)}, not an object")
        prompt, variables, worth = row.get(self.columns.prompt), template_columns(row), 0.0
        answer = row.get(self.columns.answer, row.get("completion"))
        if self.form == "pairs":
            given = [_need(row, "chosen"), _need(row, "rejected")]
            worth = _number(row.get("margin", 0), "margin")
            if not _is_conversation(given[0]) and prompt is None:
                raise RowProblem(f"has no {self.columns.prompt!r}, and 'chosen' is not a whole conversation")
        elif self.form == "labelled":
            given = [_need({"completion": answer}, "completion")]
            worth = 1.0 if _number(_need(row, "label"), "label") > 0 else -1.0
        else:
            talk = row.get("messages", prompt if answer is None and _is_conversation(prompt) else None)
            there = [(talk, None), (answer, prompt), (row.get("text"), "")]
            if all(one is None for one, _ in there):
                raise RowProblem(
                    f"has none of 'messages', {self.columns.answer!r}, 'completion' and 'text'; its keys are "
                    f"{', '.join(map(repr, row))}; set data.prompt_key and data.answer_key"
                )
            whole_or_answer, prompt = next(one for one in there if one[0] is not None)
            given = [whole_or_answer]
        talks = [self._messages(prompt, one, number) for number, one in enumerate(given)]
        if any(talk is None for talk in talks) or self.template is None:
            answers, messages = [self._plain(prompt, one) for one in given], list[Message]()
            text = str(prompt) or str(given[0])
        else:
            whole, starts = [talk[0] for talk in talks if talk], [talk[1] for talk in talks if talk]
            first = max(starts)
            if len(whole) == 2 and not first:  # the prompt of two conversations is what they have in common
                first = common(*whole)
            answers = [self._conversation(one, first, variables) for one in whole]
            messages = whole[0][:first] or whole[0]
            text = messages[-1]["content"] or ""
        check_unicode({f"answer {number}": one.text for number, one in enumerate(answers, start=1)})
        prompt_row = Prompt(
            index,
            token_ids=(),
            text=text,
            answer=None,
            messages=tuple((turn["role"], turn["content"] or "") for turn in messages),
            source=self.columns.source_of(row),
            worth=worth,
        )
        unread = self.template.unread(variables) if self.template is not None and messages else frozenset(variables)
        longest = max((one.text for one in answers), key=len)
        return ExampleRow(where, prompt_row, longest, unread, answers)

    def _messages(self, prompt: object, given: object, number: int) -> tuple[list[Message], int] | None:
        """Return (whole conversation, messages of the prompt); None of plain text. Raises RowProblem."""
        of_strings = self.template is not None and self.template.of_strings and prompt != ""
        if not (of_strings or isinstance(prompt, list) or isinstance(given, list)):
            return None
        if self.template is None:
            raise RowProblem(
                "has lists of messages, which need data.chat.template=auto and a tokenizer with a template"
            )
        if _is_conversation(given):
            asked: list[Any] = []
        elif isinstance(prompt, str):
            asked = [{"role": "user", "content": prompt}]
        else:
            asked = messages_of(prompt, self.columns.prompt) if isinstance(prompt, list) else []
        turns = given if isinstance(given, list) else [{"role": "assistant", "content": given}]
        own = messages_of([*asked, *turns], f"answer {number + 1}")
        whole = self.template.complete(own)
        return whole, (len(asked) + len(whole) - len(own)) if asked else 0

    def _plain(self, prompt: object, given: object) -> Rendered:
        for value in (prompt, given):
            if not isinstance(value, str):
                raise RowProblem(f"prompt and answer are {kind_of(prompt)} and {kind_of(given)}, not both strings")
        if not str(given).strip():
            raise RowProblem("the answer is empty")
        text, first = f"{prompt}{given}", 0 if self.train_on == "all" else len(str(prompt))
        return Rendered(text, [(first, len(text))], is_plain=True)

    def _conversation(self, messages: list[Message], first: int, variables: Mapping[str, object]) -> Rendered:
        """Return the text of a conversation with the places of the turns that train."""
        template = self.template
        assert template is not None

        def render(count: int, *, ready: bool) -> str:
            try:
                return template.render(messages[:count], variables, ready=ready)
            except TemplateRefusal as error:
                raise RowProblem(f"the tokenizer's chat template refuses it: {error}") from error

        whole = render(len(messages), ready=False)
        if self.train_on == "all":
            return Rendered(whole, [(0, len(whole))], is_plain=False)
        turns = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]
        if not turns:
            raise RowProblem("has no message of the assistant to train on")
        spans = []
        for turn in turns[-1:] if self.train_on == "last" else turns:
            before, through = render(turn, ready=True), render(turn + 1, ready=False)
            for text, count in ((before, turn), (through, turn + 1)):
                if not whole.startswith(text):
                    raise RowProblem(_broken(text, whole, count, len(messages)))
            spans.append((len(before), len(through)))
        return Rendered(whole, spans, is_plain=False)

    def _with_ids(self, row: PromptRow, ids: Mapping[Text, list[int]]) -> Prompt:
        assert isinstance(row, ExampleRow)
        given = tuple(self._given(one, ids) for one in row.answers)
        return replace(row.prompt, token_ids=given[0].token_ids[: given[0].spans[0][0]], given=given)

    def _given(self, answer: Rendered, ids: Mapping[Text, list[int]]) -> Given:
        """Return an answer's tokens and those that train, with ends of turns. Raises RowProblem."""
        whole = ids[answer.text, answer.is_plain]
        if answer.is_plain and self.end_id >= 0 and whole[-1] not in self.stop_ids:
            whole = [*whole, self.end_id]
        spans = []
        for first, end in answer.spans:
            start, stop = (self._count(answer, place, ids) for place in (first, end))
            stop = len(whole) if end == len(answer.text) else stop
            if self.train_on != "all":
                # The model stops at the end of its turn: what a template writes behind it is never sampled.
                ends = [place for place in range(start, stop) if whole[place] in self.stop_ids]
                stop = ends[-1] + 1 if ends else stop
            if (start := max(start, 1)) < stop:  # nothing predicts the first token
                spans.append((start, stop))
        if not spans:
            raise RowProblem("no token of it trains")
        return Given(tuple(whole[: spans[-1][1]]), tuple(spans))

    def _count(self, answer: Rendered, place: int, ids: Mapping[Text, list[int]]) -> int:
        """Return the number of tokens before a place of the text. Raises RowProblem within a token."""
        if not place:
            return 0
        text = answer.text[:place]
        own, whole = ids[text, answer.is_plain], ids[answer.text, answer.is_plain]
        if whole[: len(own)] != own:
            behind = shown(answer.text[place : place + _SHOWN])
            raise RowProblem(
                f"its tokens are others with what follows: {shown(text[-_SHOWN:])} and {behind} share a token; "
                "end the prompt, or begin the answer, with a space or a line's end"
            )
        return len(own)


def _is_conversation(value: object) -> bool:
    """Return whether a column holds messages from the first one on, not only the assistant's."""
    return isinstance(value, list) and bool(value) and dict(value[0]).get("role") != "assistant"


def _need(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise RowProblem(f"has no {name!r}, which algorithm.kind needs of its rows")
    return row[name]


def _number(value: object, name: str) -> float:
    if value is not None and not isinstance(value, bool | int | float):
        raise RowProblem(f"{name!r} is {kind_of(value)}, not a number")
    return float(value or 0.0)


def _broken(text: str, whole: str, count: int, total: int) -> str:
    """Return that a template breaks prefixes, with both texts around the first difference."""
    own, other = difference(text, whole)
    return (
        f"the chat template breaks prefixes: the first {count} of {total} messages end in {own}, and within the whole "
        f"it is {other}; set algorithm.kind.train_on=last, or take a template that leaves earlier turns as they were"
    )
