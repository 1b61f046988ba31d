"""Chat templates in the style of each family, in few words, and what is to be found of them."""

from __future__ import annotations

from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "tool",
            "description": "Repeat a text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "The text."}},
                "required": ["text"],
            },
        },
    }
]
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
_READY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_STRIP = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set t = m.content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in t and loop.index0 < last.user %}"
    "{% set t = t.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ t }}"
)


class Family(NamedTuple):
    """A template, the tokens that end a response, and whether turns go on before messages of users and tools."""

    template: str
    stops: tuple[str, ...]
    user: str = "kept"  # "kept", "rewritten" or "refused"
    tool: str = "kept"


FAMILIES = {
    "chatml": Family(f"{_TOOLS}{_CHATML}{_CALLS}<|im_end|>\n{{% endfor %}}{_READY}", ("<|im_end|>",)),
    "no line end after a turn": Family(f"{_CHATML}{_CALLS}<|im_end|>{{% endfor %}}{_READY}", ("<|im_end|>",)),
    "qwen3": Family(f"{_TOOLS}{_STRIP}{_CALLS}<|im_end|>\n{{% endfor %}}{_READY}", ("<|im_end|>",), "rewritten"),
    "another stop token": Family(f"{_CHATML}<|im_end|>\n{{% endfor %}}{_READY}", ("<|endoftext|>",), "refused", "refused"),
    "numbered turns": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _READY, ("<|im_end|>",), "refused", "refused",
    ),
    "llama3": Family(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
        "{% endif %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|end_of_text|>", "<|eot_id|>"),
    ),
    "mistral": Family(
        "<s>{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": "
        "{{ m.content | tojson }}, \"call_id\": \"{{ m.tool_call_id }}\"}[/TOOL_RESULTS]{% elif m.tool_calls %}"
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}", ("</s>",), "rewritten", "rewritten",
    ),
    "deepseek": Family(
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
        "<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
        "<｜tool▁call▁begin｜>{{ c.function.name }}\n{{ c.function.arguments + '' }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        ("<｜end▁of▁sentence｜>",), "rewritten",
    ),
    "glm": Family(
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
        "<|{{ m.role }}|>\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
        "{% for key, value in c.function.arguments.items() %}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}"
        "</arg_value>{% endfor %}\n</tool_call>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "gemma": Family(
        "<bos>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}", ("<end_of_turn>",), "kept", "refused",
    ),
    "phi": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", ("<|end|>",),
    ),
    "harmony": Family(
        "{% set last = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions."
        "{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
        "{% if m.thinking and (m.tool_calls or loop.last) %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
        "<|end|>{% endif %}{% if m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}<|start|>assistant to="
        "functions.{{ last.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
        "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}", ("<|return|>", "<|call|>"), "rewritten",
    ),
    "command": Family(
        "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'assistant': 'CHATBOT'}.get(m.role, 'SYSTEM') "
        "}}_TOKEN|>{% if m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}"
        "{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}", ("<|END_OF_TURN_TOKEN|>",),
    ),
    "no tokens": Family(
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n",
        ("<|endoftext|>",), "refused", "refused",
    ),
    "a name within a token": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} <|{{ m.name }}|>{% endif %}{{ '\n' }}{% if m.role == 'tool' %}"
        "<{{ m.content }}>{% else %}{{ m.content or '' }}{% endif %}"
        f"{_CALLS}<|im_end|>\n{{% endfor %}}{_READY}", ("<|im_end|>",),
    ),
    "drops tools": Family(
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _READY, ("<|im_end|>",), "kept", "refused",
    ),
}  # fmt: skip
