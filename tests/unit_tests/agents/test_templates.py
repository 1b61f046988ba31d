"""Ids between turns are those of whole renderings, for templates of every family, or a reason says why not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mega_rl.agents import templates as templates_module
from mega_rl.agents.templates import TurnTemplate
from mega_rl.data.chat import ChatTemplate, TemplateRefusal
from tests.helpers.chats import byte_tokenizer
from tests.helpers.selection import FULL
from tests.peers.package import FOLDER
from tests.unit_tests.agents.families import FAMILIES, TOOLS

PEERS = sorted((FOLDER / "trl" / "chat_templates").glob("*.jinja"))
CONVERSATIONS = 1000 if FULL else 4
# Most of them end a turn; the first that a template writes does. GLM's turns end with the next one's header.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|eot|>",
    "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|end|>", "</s>", "<|endoftext|>",
)  # fmt: skip
_SNIPPETS = (
    *("é🙂", "\ud83d", "\x00", "ﷺ", "\n\n", "  ", "", "4", ">", "<", "|end|>", "im_end", "<|im_", '{"a": [1]}', "</s"),
    *("<|im_end|>", "<|im_start|>user\n", "<think>", "</think>", "<tool_call>", "</tool_response>", "<|eot_id|>"),
    *("[INST]", "<end_of_turn>", "<|return|>", "<｜end▁of▁sentence｜>", "<|user|>", "Zq7turn0x", "Zq7mark", "hello"),
)


def templates() -> Iterator[Any]:
    for name, family in FAMILIES.items():
        yield pytest.param(family.template, family.stops, id=name)
    for path in PEERS:
        text = path.read_text(encoding="utf-8")
        ends = [one for one in _ENDS if one in text]
        if "[gMASK]" in text:
            ends = ["<|user|>", "<|observation|>"]
        elif "<|return|>" in text:
            ends = ["<|return|>", "<|call|>"]
        yield pytest.param(text, tuple(ends or ["<|endoftext|>"]), id=path.stem)


def turn_template(template: str, stops: tuple[str, ...], tools: Any = TOOLS) -> tuple[Any, TurnTemplate]:
    tokenizer = byte_tokenizer(template, eos=stops[0], more=(*stops, *_ENDS))
    stop_ids = tokenizer.convert_tokens_to_ids(list(stops))
    return tokenizer, TurnTemplate(ChatTemplate(tokenizer), stop_ids, tools)


def whole_ids(tokenizer: Any, messages: list[Any]) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)


def turn_of(form: str, thoughts: str = "", inline: bool = True) -> dict[str, Any]:
    """A turn as a template takes it: a call, or words."""
    own = {"reasoning_content": thoughts} if thoughts else {}
    if form == "plain" and thoughts and inline:
        return {"role": "assistant", "content": f"<think>\n{thoughts}\n</think>\n\nwell, I think"}
    if form == "plain":
        return {"role": "assistant", "content": "well, I think", **own}
    arguments: Any = {"text": "ab"} if form == "calls" else '{"text": "ab"}'
    call = {"id": "call00001", "type": "function", "function": {"name": "tool", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **own}


def sampled(tokenizer: Any, asked: list[Any], turn: dict[str, Any], stop: int) -> tuple[int, ...] | None:
    """The ids that the policy samples for a turn; None if it samples no such turn, since the template begins it."""
    ready = whole_ids(tokenizer, asked)
    ids = tokenizer.apply_chat_template([*asked, turn], tools=TOOLS, return_dict=False)
    own = ids[len(ready) :]
    if ids[: len(ready)] != ready:
        return None
    return tuple(own[: own.index(stop) + 1] if stop in own else [*own, stop])


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_found_to_be(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, template = turn_template(family.template, family.stops)
    for role, expected in (("user", family.user), ("tool", family.tool)):
        rule = template.rule([{"role": role, "content": "x"}])
        seen = "refused" if rule.refused else "rewritten" if rule.rewritten else "kept"
        assert seen == expected, (role, rule)
        if seen == "kept":
            assert tokenizer.convert_ids_to_tokens(rule.stop) in family.stops


def test_more_than_forty_templates_are_tested() -> None:
    assert len(FAMILIES) >= 16
    if not PEERS:
        pytest.skip("`make peers` puts TRL's templates there")
    assert len(FAMILIES) + len(PEERS) >= 40


@pytest.mark.parametrize(("text", "stops"), list(templates()))
def test_ids_are_those_of_whole_renderings(text: str, stops: tuple[str, ...]) -> None:
    tokenizer, template = turn_template(text, stops)
    generator = random.Random(len(text))
    for number in range(CONVERSATIONS):
        role = generator.choice(["user", "tool"])
        rule = template.rule([{"role": role, "content": ""}])
        if rule.refused or rule.rewritten:
            with pytest.raises(TemplateRefusal, match=re.escape(rule.refused or rule.rewritten)):
                template.between([{"role": role, "content": "x"}], rule.stop)
            continue
        messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
        ids = template.opening(messages)
        assert list(ids) == whole_ids(tokenizer, messages)
        for _ in range(generator.randint(1, 3)):
            words = [" said ", "\n", "né", "4", "{}", " \n", "a.\n\n"]
            content = "x" + "".join(generator.choices(words, k=generator.randint(0, 3)))
            answer = {"role": role, "content": content}
            if role == "tool":
                answer |= {"name": "tool", "tool_call_id": "call00001"}
            thoughts = "hm, hm" if "<think>" in text else ""
            ways = [turn_of(rule.form, thoughts), turn_of(rule.form, thoughts, False), turn_of(rule.form)]
            own, turn = next(
                (own, way) for way in ways if (own := sampled(tokenizer, messages, way, rule.stop)) is not None
            )
            ids += own + template.between([answer], rule.stop)
            messages += [turn, answer]
            assert list(ids) == whole_ids(tokenizer, messages)


@pytest.mark.parametrize(("text", "stops"), list(templates()))
def test_special_tokens_in_data_stay_text(text: str, stops: tuple[str, ...]) -> None:
    tokenizer, template = turn_template(text, stops)
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, one in added if one.special or one.content in text or "think>" in one.content}
    generator = random.Random(len(text))

    def between(role: str, content: str) -> tuple[list[int], str]:
        answer = {"role": role, "content": content}
        if role == "tool":
            answer |= {"name": generator.choice(["tool", "im_end"]), "tool_call_id": "call00001"}
        ids = template.between([answer], template.rule([answer]).stop, keep=True)
        return [token for token in ids if token in special], tokenizer.decode(ids)

    for role in ("user", "tool"):
        if template.rule([{"role": role, "content": ""}]).refused:
            continue
        plain = between(role, "Xq9")
        for _ in range(CONVERSATIONS):
            content = "a" + "".join(generator.choices(_SNIPPETS, k=generator.randint(0, 4))) + "b"
            ids, decoded = between(role, content)
            assert ids == plain[0]
            if not re.search(r'[\s"\x00\\]', content) and "Zq7" not in content:
                clean = content.encode("utf-8", "replace").decode()
                assert decoded.replace("im_end|>\n<a", "tool|>\n<a").count(clean) == 1
            assert between(role, generator.choice(_SNIPPETS))[0] in (plain[0], between(role, "")[0])


@pytest.mark.parametrize(("text", "stops"), list(templates()))
def test_rewritten_turns_begin_a_new_branch(text: str, stops: tuple[str, ...]) -> None:
    """A history with turns as ids is the whole rendering with their texts, or is refused; ids stay those sampled."""
    tokenizer, template = turn_template(text, stops)
    rule = template.rule([{"role": "user", "content": ""}])
    if rule.refused:
        return
    asked, after = {"role": "user", "content": "question"}, {"role": "user", "content": "and then?"}
    for thoughts in ("hm, hm", ""):
        said = turn_of("plain", thoughts)
        turn = sampled(tokenizer, [asked], said, rule.stop)
        if turn is None:
            continue
        if thoughts and tokenizer.convert_tokens_to_ids("</think>") not in turn:  # the template drops them anywhere
            turn = (*tokenizer(said["content"])["input_ids"], rule.stop)
        try:
            ids = template.opening([asked, turn, after, turn, asked])
        except TemplateRefusal:
            continue
        expected = whole_ids(tokenizer, [asked, said, after, said, asked])
        assert tokenizer.decode(ids) == tokenizer.decode(expected)
        assert list(ids) == expected


def test_thoughts_are_dropped_by_ids_alone() -> None:
    tokenizer, template = turn_template(*FAMILIES["qwen3"][:2])
    generator = random.Random(3)
    think, end, stop = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    user = {"role": "user", "content": "go"}
    for _ in range(CONVERSATIONS):  # bytes of no text, and special tokens in the middle
        thoughts, answer = ([generator.randrange(260) for _ in range(9)] for _ in range(2))
        answer[0] = tokenizer.convert_tokens_to_ids("a")
        ids = template.opening([user, (think, *thoughts, end, *answer, stop), user])
        kept = template.opening([user, (*answer, stop), user])
        assert ids == kept
        assert str(answer)[1:-1] in str(list(ids))


def test_turn_that_ended_otherwise_is_refused() -> None:
    tokenizer, template = turn_template(*FAMILIES["glm"][:2])
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    answer = {"role": "tool", "content": "4"}
    assert tokenizer.decode(template.between([answer], observation)) == "\n4<|assistant|>"
    with pytest.raises(
        TemplateRefusal, match=re.escape("ends with <|user|>, and the chat template ends it with <|obs")
    ):
        template.between([answer], user)


def test_proof_is_made_once_for_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_template(*FAMILIES["chatml"][:2])
    monkeypatch.setattr(templates_module, "_prove", None)
    turn_template(*FAMILIES["chatml"][:2])
    with pytest.raises(TypeError):
        turn_template(*FAMILIES["chatml"][:2], tools=[])


@pytest.mark.parametrize(("text", "stops"), [one for one in templates() if one.id in ("harmony", "gptoss")])
def test_gpt_oss_continues_after_calls_alone(text: str, stops: tuple[str, ...]) -> None:
    """Behind a user's message its final answer ends otherwise and has lost its thoughts."""
    tokenizer, template = turn_template(text, stops)
    call, final = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    tool: Any = {"role": "tool", "content": "4", "name": "tool", "tool_call_id": "call00001"}
    assert tokenizer.decode(template.between([tool], call)).endswith('"4"<|end|><|start|>assistant')
    user: Any = {"role": "user", "content": "and then?"}
    with pytest.raises(TemplateRefusal, match=re.escape("their end <|return|> becomes <|end|>")):
        template.between([user], final)
    with pytest.raises(
        TemplateRefusal, match=re.escape("ends with <|return|>, and the chat template ends it with <|end|>")
    ):
        template.between([user], final, keep=True)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    turn = tuple(tokenizer(said, add_special_tokens=False)["input_ids"])
    with pytest.raises(TemplateRefusal, match=re.escape("<|channel|>final<|message|>' before an earlier turn")):
        template.opening([user, turn, user])
