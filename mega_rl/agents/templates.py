"""Token ids around the turns of a policy, from differences between a chat template's renderings.

A turn is the ids that the policy sampled. No text of it is tokenised: renderings hold a word in its place. Messages of
users and tools are data: a special token that their text spells stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from mega_rl.config.values import shown
from mega_rl.data.chat import ChatTemplate, TemplateRefusal, difference
from mega_rl.data.columns import Message

Ids: TypeAlias = tuple[int, ...]
_WORD = "Zq7"  # begins the words that stand for texts in renderings; neither templates nor messages have it
_DATA = ("user", "tool", "function", "ipython")  # roles whose text is data
ASKED: list[Message] = [{"role": "user", "content": "?"}]
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys by which templates take an assistant's thoughts
_FORMS = ("calls", "text calls", "plain")  # how templates take a turn before a tool's message
_OF_THOUGHTS = ("<think>", "</think>")
_BLANKS = "\n\n"  # between thoughts and answer


class TurnRule(NamedTuple):
    """Findings about a template's text between a turn and messages of one role."""

    form: str = "plain"  # how renderings hold the turn, one of _FORMS
    stop: int = -1  # id with which a turn ends before such messages
    refused: str = ""  # why nothing can follow a turn
    rewritten: str = ""  # how the template changes the turns before such messages


_rules: dict[str, dict[str, TurnRule]] = {}  # the key is the hash of template, variables and tokens


class TurnTemplate:
    """Ids around the turns of conversations, for one template and list of tools."""

    def __init__(self, template: ChatTemplate, stop_ids: Collection[int], tools: Sequence[Mapping[str, Any]] = ()):
        """stop_ids: ids that end a response in this run."""
        self._renderer = _Renderer(template, frozenset(stop_ids), list(tools))
        known: list[Any] = [self._renderer.source, template.kwargs, template.date, tools, sorted(stop_ids)]
        known.append(sorted(self._renderer.added.items()))
        key = hashlib.sha256(json.dumps(known, default=str, sort_keys=True).encode("utf-8", "replace")).hexdigest()
        if key not in _rules:
            _rules[key] = {role: _prove(self._renderer, role) for role in ("user", "tool")}
        self._rules = _rules[key]

    def rule(self, answers: Sequence[Message]) -> TurnRule:
        """Return the rule for the these messages, which follow a turn."""
        roles = ["user" if one["role"] == "user" else "tool" for one in answers]
        own = [self._rules[role] for role in dict.fromkeys(roles)]
        return own[0]._replace(
            refused=next((one.refused for one in own if one.refused), ""),
            rewritten=next((one.rewritten for one in own if one.rewritten), ""),
        )

    def opening(self, history: Sequence[Message | Ids]) -> Ids:
        """Return the ids of a conversation, ready for a turn; ids in it are earlier turns.

        A turn loses its thoughts if the template drops the thoughts of an assistant at this place.

        Raises:
            TemplateRefusal: the template refuses the messages, or does not leave the turns whole.
        """
        word = _unused(history)
        turns = [one for one in history if isinstance(one, tuple)]
        texts = list(self._renderings(history, word))
        pieces = re.split(rf"{word}turn(\d+)x", texts[0])
        if pieces[1::2] != [str(number) for number in range(len(turns))]:
            raise TemplateRefusal("the chat template leaves out a turn, or writes it twice")
        ids = self._renderer.ids(pieces[0], word)
        for number, (turn, before, after) in enumerate(zip(turns, pieces[::2], pieces[2::2], strict=False)):
            own = turn[:-1] if turn[-1:] and turn[-1] in self._renderer.stop_ids else turn
            rest, is_whole = own, any(f"{word}thought{number}x" in text for text in texts)
            if not is_whole:
                has_blanks = f"{_BLANKS}{word}turn{number}x" in texts[1] and not before.endswith(_BLANKS)
                rest = self._without_thoughts(own, has_blanks)
            if rest == own and not self._renderer.begins(before, is_whole):
                raise TemplateRefusal(f"the chat template writes {shown(before[-30:])} before an earlier turn")
            stop, place = self._renderer.closing(after, "plain")
            if stop < 0:
                raise TemplateRefusal(f"no token ends an earlier turn: {shown(after)} follows it")
            ids += rest + self._renderer.ids(after[place:], word)
        return ids

    def between(self, answers: Sequence[Message], last: int, *, keep: bool = False) -> Ids:
        """Return the ids between a turn that ends with the id `last` and the next turn.

        keep: earlier turns stay as they were sampled, even if the template would change them.

        Raises:
            TemplateRefusal: the template changes earlier turns, and a new branch begins with `opening`; or nothing can
                follow the turn.
        """
        rule = self.rule(answers)
        if problem := rule.refused or (not keep and rule.rewritten):
            raise TemplateRefusal(problem)
        if last != rule.stop:
            names = self._renderer.tokenizer.convert_ids_to_tokens([last, rule.stop])
            raise TemplateRefusal(f"the turn ends with {names[0]}, and the chat template ends it with {names[1]}")
        word = _unused(answers)
        after = self._renderer.text([*ASKED, _turn(word, 0, rule.form, answers), *answers], word).split(
            f"{word}turn0x"
        )[-1]
        ids = self._renderer.ids(after[self._renderer.closing(after, rule.form)[1] :], word)
        return ids[1:]

    def _renderings(self, history: Sequence[Message | Ids], word: str) -> Iterator[str]:
        """Yield a history's text with words for turns, then also with words for thoughts."""
        for thoughts in ("", "inline", *_THOUGHTS):
            numbers = iter(range(len(history)))
            messages = [
                _turn(word, next(numbers), "plain", (), thoughts) if isinstance(one, tuple) else one for one in history
            ]
            yield self._renderer.text(messages, word)
            if len(messages) and not next(numbers):
                return  # no turns

    def _without_thoughts(self, turn: Ids, has_blanks: bool) -> Ids:
        """Return a turn after its thoughts, and after blanks that the template does not write."""
        of_thoughts = self._ends_of_thoughts()
        ends = [place + 1 for place, token_id in enumerate(turn) if token_id in of_thoughts]
        if not ends:
            return turn
        rest = turn[ends[-1] :]
        while rest and not has_blanks and not self._renderer.tokenizer.decode(rest[:1]).strip():
            rest = rest[1:]
        return rest

    def _ends_of_thoughts(self) -> set[int]:
        """Return the last special token between thoughts and answer, for each way to give thoughts."""
        ends = {self._renderer.added[one] for one in _OF_THOUGHTS[1:] if one in self._renderer.added}
        for thoughts in _THOUGHTS:
            text = self._renderer.render([*ASKED, _turn(_WORD, 0, "plain", (), thoughts)], ready=False)
            _, thought, behind = text.partition(f"{_WORD}thought0x")
            between = self._renderer.special.findall(behind.partition(f"{_WORD}turn0x")[0])
            ends |= {self._renderer.added[between[-1]]} if thought and between else set()
        return ends


class _Renderer:
    """Renderings of conversations by one template with one list of tools, and their ids."""

    def __init__(self, template: ChatTemplate, stop_ids: frozenset[int], tools: list[Mapping[str, Any]]) -> None:
        self.stop_ids, self.tokenizer = stop_ids, cast(Any, template.tokenizer)
        self._template, self._variables = template, {"tools": tools} if tools else {}
        self.source = json.dumps(self.tokenizer.chat_template, ensure_ascii=False)
        # Tokens that mean something. Others that were added, as HTML tags or runs of blanks, are text.
        self.added: dict[str, int] = {
            one.content: token_id
            for token_id, one in self.tokenizer.added_tokens_decoder.items()
            if len(one.content) > 1 and (one.special or one.content in self.source or one.content in _OF_THOUGHTS)
        }
        longest_first = sorted(self.added, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(self, messages: list[Message], *, ready: bool = True) -> str:
        """Return the text of messages; ready: for a turn. Raises TemplateRefusal."""
        return self._template.render(messages, self._variables, ready=ready)

    def text(self, messages: Sequence[Message], word: str) -> str:
        """Return a rendering in which the mark parts the special tokens that data spell."""
        mark = f"{word}mark"

        def parted(text: str) -> str:
            while self.special.search(text):
                text = self.special.sub(lambda match: match[0][:1] + mark + match[0][1:], text)
            return text

        def apart(text: str) -> str:
            return mark + parted(text) + mark if text.strip() else text

        text, other = (self.render([_mapped(one, change) for one in messages]) for change in (parted, apart))
        # Where they differ, the template's text and the data spell a special token together.
        return text if self.special.findall(text) == self.special.findall(other) else other

    def ids(self, text: str, word: str) -> Ids:
        """Return the ids of a rendering; its marks part tokens."""
        pieces = [piece for piece in text.split(f"{word}mark") if piece]
        encoded = self.tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
        return tuple(int(token_id) for ids in encoded for token_id in ids)

    def closing(self, after: str, form: str) -> tuple[int, int]:
        """Return (id, place) of the token that ends a turn, or (-1, 0).

        The first stop token; after a plain turn only blanks and special tokens may stand before it. Without one, the
        first special token.
        """
        first, end = (-1, 0), 0
        for match in self.special.finditer(after):
            token_id = self.added[match[0]]
            if form == "plain" and after[end : match.start()].strip():
                break
            if token_id in self.stop_ids:
                return token_id, match.start()
            first, end = first if end else (token_id, match.start()), match.end()
        return first

    def rest(self, messages: list[Message], *, ready: bool = True) -> str:
        """Return the text after the word of the last turn. Raises TemplateRefusal."""
        _, turn, after = self.render(messages, ready=ready).rpartition(f"{_WORD}turn0x")
        if not turn:
            raise TemplateRefusal("the chat template leaves out a turn")
        return after

    def begins(self, text: str, is_whole: bool) -> bool:
        """Return whether a text ends as the template begins a turn; in part, if not is_whole."""
        asked, ready = (self.render(ASKED, ready=ready) for ready in (False, True))
        ready = ready.removeprefix(asked)
        first = self.special.search(ready)
        shortest = first.end() if first and not is_whole else len(ready)
        return any(text.endswith(ready[:end]) for end in range(shortest, len(ready) + 1))


def _prove(renderer: _Renderer, role: str) -> TurnRule:
    """Return the rule for messages of a role."""
    answers = [{"role": role, "content": f"{_WORD}answer", "name": "tool", "tool_call_id": "call00000"}]
    if role == "user":
        answers = [{"role": role, "content": f"{_WORD}answer"}]
    reasons = []
    for form in _FORMS if role == "tool" else ("plain",):
        try:
            return _proved(renderer, form, answers)
        except TemplateRefusal as error:
            reasons.append(str(error))
    return TurnRule(
        refused=f"after a turn, messages of the role {role!r} cannot follow: {'; '.join(dict.fromkeys(reasons))}"
    )


def _proved(renderer: _Renderer, form: str, answers: list[Message]) -> TurnRule:
    """Return the rule with turns of a form. Raises TemplateRefusal."""
    asked, word = ASKED, f"{_WORD}answer"
    dummy = _turn(_WORD, 0, form, answers)
    after = renderer.rest([*asked, dummy, *answers])
    if after.count(word) != 1:
        raise TemplateRefusal(f"the chat template writes their text {after.count(word)} times")
    (stop, place), (own, _) = (
        renderer.closing(after, form),
        renderer.closing(renderer.rest([*asked, dummy], ready=False), form),
    )
    if stop < 0 or {stop, own}.isdisjoint(renderer.stop_ids):
        raise TemplateRefusal(f"no stop token ends a turn: {shown(after[:60])} follows it; see rollout.stop_token_ids")
    for earlier in _earlier(form, answers):
        try:
            other = renderer.rest([*earlier, dummy, *answers])
        except TemplateRefusal:  # a role or an order that the template does not know
            continue
        if other[renderer.closing(other, form)[1] :] != after[place:]:
            texts = difference(after[place:], other[renderer.closing(other, form)[1] :])
            raise TemplateRefusal(f"the chat template writes {texts[0]}, and later in a conversation {texts[1]}")
    rewritten = _rewritten(renderer, form, answers)
    if own in renderer.stop_ids - {stop}:
        names = renderer.tokenizer.convert_ids_to_tokens([own, stop])
        rewritten = f"the chat template changes earlier turns: their end {names[0]} becomes {names[1]}"
    return TurnRule(form, stop, rewritten=rewritten)


def _rewritten(renderer: _Renderer, form: str, answers: list[Message]) -> str:
    """Return how the template changes a turn before answers; "" if it leaves it whole."""
    ready, problem, is_sampled = renderer.render(ASKED), "", False
    turn, thought = f"{_WORD}turn0x", f"{_WORD}thought0x"
    for thoughts in ("", "inline", *_THOUGHTS):
        dummy = _turn(_WORD, 0, form, answers, thoughts)
        whole, kept = (
            renderer.render([*ASKED, dummy, *more], ready=bool(more)).partition(turn)[0] for more in ([], answers)
        )
        is_dropped = bool(thoughts) and thought not in whole
        if not whole.startswith(ready) or (is_dropped and (thoughts != "inline" or form != "plain")):
            continue  # no turn begins so, or the template takes no such thoughts
        if is_dropped:
            whole = f"{ready}{dummy['content']}"
        elif not thoughts:
            whole, kept = ready, kept[: len(ready)]
        is_sampled = True
        if whole != kept:
            problem = "the chat template changes earlier turns: {} becomes {}".format(*difference(whole, kept))
    if not is_sampled:
        problem = "the chat template changes earlier turns: {} becomes {}".format(*difference(ready, kept))
    return problem


def _turn(word: str, number: int, form: str, answers: Sequence[Message], thoughts: str = "") -> Message:
    """Return an assistant's message with words for its content or arguments, and its thoughts."""
    text, thought = f"{word}turn{number}x", f"{word}thought{number}x"
    message: Message = {"role": "assistant", "content": text if form == "plain" else ""}
    if thoughts == "inline":
        message["content"] = _BLANKS.join((f"<think>\n{thought}\n</think>", message["content"]))
    elif thoughts:
        message[thoughts] = thought
    if form != "plain":
        arguments: Any = {"text": text} if form == "calls" else json.dumps({"text": text})
        message["tool_calls"] = [
            {
                "id": one.get("tool_call_id", "call00000"),
                "type": "function",
                "function": {"name": one.get("name", "tool"), "arguments": arguments},
            }
            for one in answers
            if one["role"] != "user"
        ]
    return message


def _earlier(form: str, answers: list[Message]) -> Iterator[list[Message]]:
    """Yield longer conversations before the same turn."""
    said: Message = {"role": "assistant", "content": "!"}
    yield [{"role": "system", "content": "."}, *ASKED, said, *ASKED]
    for tools_answer in ([], [said, *ASKED]) if answers[0]["role"] == "tool" else ():
        yield [*ASKED, _turn(".", 0, form, answers), *answers, *tools_answer]


def _mapped(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with clean texts, those of data changed."""
    is_data = message["role"] in _DATA

    def of(key: str, value: Any) -> Any:
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens
            return change(value) if is_data and key in ("content", "text", "name", "tool_call_id") else value
        if isinstance(value, list):
            return [of(key, one) for one in value]
        return {name: of(name, one) for name, one in value.items()} if isinstance(value, dict) else value

    return cast(Message, of("", message))


def _unused(messages: Sequence[Message | Ids]) -> str:
    """Return a word that no message has."""
    text, word = json.dumps([one for one in messages if isinstance(one, dict)], default=str), _WORD
    while word in text:
        word += "7"
    return word
