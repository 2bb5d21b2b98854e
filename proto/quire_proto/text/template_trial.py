"""What a chat template cannot do, tried when a model is loaded, so that it is known before the first request.

Conversations of the kinds that clients send are rendered, and a call that the template wrote is read back as a model's
answer is. If that fails, the notation of calls is only a guess from the template's words.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_proto.errors import QuireError
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.stream_scanner import ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tool_arguments import parameter_types
from quire_proto.text.tool_formats import ToolFormat
from quire_proto.text.tool_parser import new_tool_parser

Messages = Sequence[Mapping[str, Any]]
_NAME, _ARGUMENTS = "look_up", {"word": "quire"}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "Looks up.", "parameters": _SCHEMA}}]
_ASKED = {"role": "user", "content": "What is a quire?"}
_ANSWERED = {"role": "assistant", "content": "It is 24 sheets of paper."}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_012345678", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_RESULT = {"role": "tool", "tool_call_id": "call_012345678", "name": _NAME, "content": "24 sheets"}
_CONVERSATIONS: Mapping[str, Messages] = {
    "a user's message": [_ASKED],
    "a system message": [{"role": "system", "content": "Be brief."}, _ASKED],
    "several turns": [_ASKED, _ANSWERED, _ASKED],
}


def template_findings(template: ChatTemplate | None, tool_template: ChatTemplate | None) -> Iterator[str]:
    """Yields what the templates of a model cannot render, and what is only a guess, each as a part of a sentence.
    ``tool_template`` renders the conversations with tools.
    """
    if template is not None:
        for what, messages in _CONVERSATIONS.items():
            if reason := _refusal(template, messages):
                yield f"the chat template cannot render {what} ({reason})"
    elif tool_template is not None:
        yield "there is no chat template for conversations without tools, which are refused"
    if tool_template is not None and "tools" in tool_template.variables:
        yield from _tool_findings(tool_template)


def _tool_findings(template: ChatTemplate) -> Iterator[str]:
    if reason := _refusal(template, [_ASKED], _TOOLS):
        yield f"the chat template cannot render tools ({reason})"
        return
    form = template.tool_format
    if form is None:
        yield "the chat template writes tool calls in a notation that is not known: tools are left out of prompts"
        return
    if reason := _refusal(template, [_ASKED, _CALLED, _RESULT], _TOOLS):
        yield f"the chat template cannot render a call and its result ({reason})"
    if not _reads_back(template, form):
        yield f"the notation of tool calls is a guess, {form.name}: a call that the template wrote was not read back"


def _refusal(template: ChatTemplate, messages: Messages, tools: Messages = ()) -> str | None:
    """Why the template does not render a conversation; None if it does."""
    try:
        template.render(messages, tools)
    except QuireError as error:
        return error.message.rstrip(".")
    return None


def _reads_back(template: ChatTemplate, form: ToolFormat) -> bool:
    """Whether the call that the template writes in a conversation is the one that was made."""
    try:
        before = template.render([_ASKED], _TOOLS, add_generation_prompt=form.bare)
        after = template.render([_ASKED, _CALLED], _TOOLS, add_generation_prompt=False)
    except QuireError:
        return False
    pairs = enumerate(zip(before, after, strict=False))
    answer = after[next((place for place, (one, other) in pairs if one != other), len(before)) :]
    parser = new_tool_parser(form, [_NAME], {_NAME: parameter_types(_SCHEMA)})
    parts = merge_adjacent([*parser.push(answer), *parser.finish()])
    arguments = [part.text for part in parts if isinstance(part, ToolCallArguments)]
    try:
        return ToolCallStart(_NAME) in parts and [json.loads(text) for text in arguments] == [_ARGUMENTS]
    except ValueError:
        return False
