"""Small chat templates of models that call tools and think, in the manner of those that are published."""

from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
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
OTHER_TEMPLATE = _HEAD + "[TOOL_CALLS]{{ messages[0].content }}"


def with_marks(*, special: bool) -> Tokenizer:
    """A tokenizer that has the marks as tokens."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    marks = ["<tool_call>", "</tool_call>", "</think>", "<|python_tag|>"]
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def tokenizer_with(template: str, tokenizer: Tokenizer | None = None) -> ModelTokenizer:
    """The tokenizer of such a model, which has this template."""
    return ModelTokenizer(tokenizer or byte_level(), ChatTemplate(template, {}, "the test"))


def tool(name: str = "get", **more: object) -> dict[str, object]:
    """A tool with one argument."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}
