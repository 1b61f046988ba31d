"""Conversations as text by a chat template, and the variables that it reads. No torch."""

from __future__ import annotations

import ctypes
import datetime
import functools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.defaults import DEFAULT_NAMESPACE

from mega_rl.config.values import shown
from mega_rl.data.columns import Message
from mega_rl.errors import UserError

_REFUSED = (
    *(jinja2.nodes.Pow, jinja2.nodes.Import, jinja2.nodes.FromImport),
    *(jinja2.nodes.Include, jinja2.nodes.Extends, jinja2.nodes.Const),
)
MAX_CONSTANT = 10**7  # largest whole number in a chat template
OWN = frozenset({"messages", "add_generation_prompt"})  # variables that the run itself sets
_SHOWN = 30  # characters of a text in a message, on both sides of a place
_DATE = "strftime_now"  # function that templates call with a format
_FUNCTIONS = frozenset(DEFAULT_NAMESPACE) | {"raise_exception", _DATE}
# A template is a program of the model's author, and may end with any of these.
_ERRORS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    jinja2.TemplateError,
)  # fmt: skip
DEADLINE_S = 10.0  # seconds for one conversation; a usual one takes some ten microseconds
_begun: dict[int, float] = {}  # threads that render a template, with the time at which they began
_begun_lock = threading.Lock()


class TemplateRefusal(Exception):
    """A chat template does not render a conversation; the message says why, on one line."""


class Tokenizer(Protocol):
    """Hugging Face tokenizer with its chat template, as far as prompts need it."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return `{"input_ids": [[...], ...]}`, one list of ids per text."""

    def apply_chat_template(self, conversation: list[Message], **settings: Any) -> Any:
        """Return the conversation as one string (with tokenize=False)."""


def apply_template(tokenizer: Tokenizer, messages: list[Message], **settings: object) -> str:
    """Return a conversation's text by the checkpoint's template, whose loops may have no end.

    They are Python code, so an exception from another thread ends them.

    Raises:
        TemplateRefusal: the template refuses the conversation.
        UserError: the template takes longer than DEADLINE_S.
    """
    _watch()
    thread = threading.get_ident()
    with _begun_lock:
        _begun[thread] = time.monotonic()
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except _ERRORS as error:
        if thread not in _begun:  # the watch has ended it; Jinja may have wrapped the exception
            raise UserError(f"the chat template has not rendered one conversation in {DEADLINE_S:g} s") from error
        raise TemplateRefusal(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        with _begun_lock:
            _begun.pop(thread, None)


@functools.cache
def _watch() -> None:
    """Start the thread that ends late templates, once for a process."""

    def end_late_ones() -> None:
        while True:
            time.sleep(DEADLINE_S / 10)
            with _begun_lock:
                for thread in [one for one, begun in _begun.items() if time.monotonic() - begun > DEADLINE_S]:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RuntimeError))
                    del _begun[thread]

    threading.Thread(target=end_late_ones, name="templates", daemon=True).start()


@dataclass(frozen=True)
class ChatTemplate:
    """Rendering of a run's conversations as text, by the settings of data.chat."""

    tokenizer: Tokenizer
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    date: datetime.date | None = None  # date that the template writes; None: today's
    of_strings: bool = True  # a string is a message of the user; False: it is the text of the prompt

    def complete(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages after the system prompt; a conversation that has a system message keeps it."""
        if not self.system_prompt or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def render(self, messages: list[Message], variables: Mapping[str, object], *, ready: bool = True) -> str:
        """Return the text of the messages; ready: for the assistant's turn."""
        kwargs = {**self.kwargs, **variables} | ({} if self.date is None else {_DATE: self.date.strftime})
        return apply_template(self.tokenizer, messages, add_generation_prompt=ready, **kwargs)

    @cached_property
    def _reads(self) -> frozenset[str] | None:
        """Return the variables that the tokenizer's templates read; None if that is not known."""
        given = getattr(self.tokenizer, "chat_template", None)
        texts: list[Any] = list(given.values()) if isinstance(given, dict) else [given]
        try:
            return frozenset().union(*map(template_variables, texts))
        except (TypeError, jinja2.TemplateSyntaxError):  # no template, or one that rendering refuses
            return None

    def unread(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of the variables that no template of the tokenizer reads."""
        return frozenset() if self._reads is None else frozenset(names) - self._reads


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many first entries two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def difference(one: str, other: str) -> tuple[str, str]:
    """Return two texts for a message, around the first place at which they differ."""
    place = common(one, other)
    around = slice(max(place - _SHOWN, 0), place + _SHOWN)
    return shown(one[around]), shown(other[around])


def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and a run may set. Raises jinja2.TemplateSyntaxError."""
    return _names(template) - OWN - _FUNCTIONS


def writes_date(template: str) -> bool:
    """Return whether a template may write the date. Raises jinja2.TemplateSyntaxError."""
    return _DATE in _names(template)


def _names(template: str) -> frozenset[str]:
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


def check_template(template: str) -> None:
    """Raise ValueError for a template that could hang or abort, before it is compiled.

    A template is a program: Jinja's sandbox allows powers and numbers of many digits, which compiling computes.
    """
    try:
        nodes = list(_environment().parse(template).find_all(_REFUSED))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"its chat template is not a Jinja template: {error}") from error
    for node in nodes:
        constant = getattr(node, "value", None)
        if not isinstance(node, jinja2.nodes.Const) or (isinstance(constant, int) and abs(constant) > MAX_CONSTANT):
            what = type(node).__name__ if constant is None else f"the number {shown(constant)}"
            raise ValueError(f"line {node.lineno} of its chat template has {what}, which is never run")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(extensions=[jinja2.ext.loopcontrols, _GenerationBlock])


class _GenerationBlock(jinja2.ext.Extension):
    """The block that transformers adds to Jinja to mark the assistant's tokens; here, its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
