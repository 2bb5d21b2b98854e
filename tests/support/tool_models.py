"""Small chat templates of models that call tools and think, in the manner of those that are published; and calls as
models of every family write them.
"""

import json
import re
from functools import cache
from typing import Any

from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.harmony import MARKS
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_formats import (
    HARMONY,
    TOOL_FORMATS,
    GemmaCall,
    JsonCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)
from tokenizers import AddedToken, Tokenizer

from tests.support.model_folders import byte_level

_HEAD = (
    "{% if tools %}<|start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|end|>\n{% endif %}"
)
_TURN = "<|start|>{{ message.role }}\n{{ message.content }}"
_ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"

HERMES_TEMPLATE = (
    _HEAD + '{# <tool_call>{"name": ..., "arguments": ...}</tool_call> #}'
    "{% for message in messages %}" + _TURN + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>\n{% endfor %}" + _ASK
)
LLAMA_TEMPLATE = (
    _HEAD + "{% for message in messages %}" + _TURN + "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "<|end|>\n{% endfor %}" + _ASK
)
THINKING_TEMPLATE = HERMES_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENING_TEMPLATE = HERMES_TEMPLATE + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"
OTHER_TEMPLATE = _HEAD + "<|tool_call:begin|>{{ messages[0].content }}"


def family_template(form: ToolFormat) -> str:
    """A template with the signs of a family."""
    signs = " ".join(sign if isinstance(sign, str) else sign[0] for sign in form.signs)
    return f"{_HEAD}{{# {signs} #}}{{% for message in messages %}}{_TURN}<|end|>\n{{% endfor %}}{_ASK}"


_MARK = re.compile(r"</?[|｜]?[^<>{}\s\"=]+>|\[[A-Z_]+\]|｜DSML｜|<[|]\"[|]>")
_KNOWN = {"<think>", *(token for token in byte_level().get_vocab())}


def marks_of(*formats: ToolFormat) -> list[str]:
    """Whatever may be a token of its own in these formats."""
    return sorted({mark for each in formats for text in each.texts for mark in _MARK.findall(text)})


def with_marks(*, special: bool) -> Tokenizer:
    """A tokenizer that has the marks of all formats as tokens."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    marks = ["</think>", *marks_of(*TOOL_FORMATS), *MARKS]
    added = [AddedToken(mark, special=special, normalized=False) for mark in dict.fromkeys(marks) if mark not in _KNOWN]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them in this format."""
    one = [_written_call(form, number, *call) for number, call in enumerate(calls)]
    if form is HARMONY:
        return "<|start|>assistant".join(f"{form.begin}{each}" for each in one)
    opening, closing = ("[", "]") if form.listed else ("", "")
    if form.between is None:
        return form.gap.join(f"{form.begin}{opening}{each}{closing}{form.end}" for each in one)
    return f"{form.begin}{opening}{form.between.join(one)}{closing}{form.end}" if one else ""


def _written_call(form: ToolFormat, number: int, name: str, arguments: dict[str, Any]) -> str:
    call = form.call
    if isinstance(call, PythonCall):
        return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    if isinstance(call, GemmaCall):
        return f"call:{name}{_gemma(arguments, call.quote)}{call.tail}"
    head = call.head.replace("{name}", name).replace("{number}", str(number))
    if isinstance(call, (JsonCall, NamedCall)):
        return head + json.dumps(arguments, ensure_ascii=False) + call.tail
    return head + "".join(_tagged(call, *each) for each in arguments.items()) + call.tail


def _python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _tagged(call: TaggedCall, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    tag = call.key.replace("{key}", key).replace("{kind}", str(is_text).lower())
    return tag + (value if is_text else json.dumps(value, ensure_ascii=False)) + call.value_end


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each, quote)}" for key, each in value.items()) + "}"
    return f"[{','.join(_gemma(each, quote) for each in value)}]" if isinstance(value, list) else json.dumps(value)


def tokenizer_with(template: str, tokenizer: Tokenizer | None = None) -> ModelTokenizer:
    """The tokenizer of such a model, which has this template."""
    return ModelTokenizer(tokenizer or byte_level(), compiled(template))


@cache
def compiled(template: str) -> ChatTemplate:
    """A template that many tests use, most of whose time it would take to compile it."""
    return ChatTemplate(template, {}, "the test")


def tool(name: str = "get", **more: object) -> dict[str, object]:
    """A tool with one argument."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}
