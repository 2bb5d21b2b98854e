"""What a chat's tools and thoughts mean for its model: the variables of its template, and the grammar that holds it to
calls. Raises ``QuireError`` where the model knows nothing of it.
"""

import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from quire_proto.errors import QuireError, invalid
from quire_proto.json_schema import min_properties_is_ambiguous, unsupported
from quire_proto.structured import MAX_TEXT, Structured, StructuredKind
from quire_proto.text.model_text import ModelTokenizer
from quire_proto.text.tools.formats import ToolFormat
from quire_proto.text.tools.grammar import ANYTHING, ReasoningState, ToolSpec, schema_on_line, tool_call_grammar

from quire_router.api.schemas import ChatRequest, GenerationBody, TemplatedBody, TemplateOptions
from quire_router.api.tools import Tool, too_large
from quire_router.generation import Delta

TemplatedT = TypeVar("TemplatedT", bound=TemplatedBody)

_REFUSED = re.compile(
    r"The grammar cannot be used, line (\d{1,6}): (?:failed to compile JSON schema: )?(.*)", re.DOTALL
)
_THINKING = ("enable_thinking", "thinking")  # what templates call the switch
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


def structured_of(request: GenerationBody, text: ModelTokenizer, prompt: Sequence[int]) -> Structured | None:
    """The grammar that the output is held to: the one that the client asks for, one that makes the calls that it
    forces, or one of both, calls or JSON. Raises ``QuireError`` INVALID for what cannot be held to.
    """
    asked = request.structured
    if not (isinstance(request, ChatRequest) and request.offered):
        return asked
    tool_format = detect_tool_format(text)
    reply = None if asked is None else _reply(asked)
    if reply is None and not request.is_guided:
        return None
    _check_guided(request)
    try:
        grammar = tool_call_grammar(
            tool_format,
            [_callable(tool, request.forced) for tool in request.callable],
            forced=request.forced,
            parallel=request.parallel_tool_calls is not False,
            thinking=ReasoningState(text.has_reasoning, text.starts_in_reasoning(prompt)),
            special=text.marker_tokens,
            reply=reply,
        )
    except RecursionError:
        raise invalid("tools", "The schemas of the tools are nested too deeply.") from None
    if len(grammar) > MAX_TEXT:
        raise too_large(len(grammar))
    return Structured(StructuredKind.GRAMMAR, grammar)


def _reply(asked: Structured) -> Mapping[str, Any]:
    """The schema of an answer that is no call. Raises ``QuireError`` for a form that is no JSON."""
    if asked.kind is StructuredKind.JSON_OBJECT:
        return ANYTHING
    if asked.kind is not StructuredKind.JSON_SCHEMA:
        raise invalid("tools", f"tools and {asked.param} exclude each other; response_format goes with tools.")
    schema: Mapping[str, Any] = json.loads(asked.text)
    if "x-guidance" in schema:
        raise invalid(asked.param, "x-guidance is not supported in a schema.")
    if min_properties_is_ambiguous(schema):
        raise invalid(asked.param, "minProperties above 1 is only supported for properties that are required by name.")
    return schema


def _check_guided(request: ChatRequest) -> None:
    """A grammar ends with the model's own end, and holds for no beams."""
    param = "tool_choice" if request.forced else "tools"
    others = {"ignore_eos": request.ignore_eos, "min_tokens": request.min_tokens, "beam_width": request.width}
    for other, is_set in others.items():
        if is_set:
            raise invalid(param, f"{param} and {other} exclude each other.")


async def naming_schema_at_fault(deltas: AsyncGenerator[Delta], grammar: str) -> AsyncGenerator[Delta]:
    """The same pieces; where the engine refuses the ``grammar`` of ``structured_of``, the schema at fault is named.
    Closes ``deltas``.
    """
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except QuireError as error:
            raise _at_fault(error.message, grammar) if error.param == StructuredKind.GRAMMAR else error from None


def _at_fault(message: str, grammar: str) -> QuireError:
    """The engine's refusal of ``grammar`` as a refusal of the schema that stands in the line its ``message`` names."""
    refused = _REFUSED.fullmatch(message)
    found = None if refused is None else schema_on_line(grammar, int(refused[1]))
    if refused is None or found is None:
        return invalid("tools", message)
    tool, schema = found
    reason = unsupported(schema, refused[2]) or refused[2]
    if tool is None:
        return invalid("response_format", f"The JSON schema cannot be used: {reason}")
    return invalid("tools", f"The parameters of the tool {tool} cannot be used: {reason}")


def detect_tool_format(text: ModelTokenizer) -> ToolFormat:
    """How the model calls tools. Raises ``QuireError`` where it does not."""
    if text.tool_format is not None:
        return text.tool_format
    if "tools" in text.template_variables:
        raise invalid("tools", "This model writes tool calls in a format that is not supported here.")
    raise invalid("tools", "This model's chat template knows no tools.")


def drop_unsupported_by_template(request: TemplatedT, text: ModelTokenizer) -> tuple[TemplatedT, Sequence[str]]:
    """The request without tools where the model's template knows none, and the names of the parameters that change
    nothing with this template. Raises ``QuireError`` for tools that must be called, and for variables of the template
    that requests may not set.
    """
    ignored = [*_unknown_thinking(request, text)]
    if not request.offered or text.tool_format is not None:
        return request, ignored
    if request.forced:
        detect_tool_format(text)
    of_tools = [name for name in _OF_TOOLS if name in type(request).model_fields and getattr(request, name) is not None]
    return request.model_copy(update=dict.fromkeys(of_tools)), [*of_tools, *ignored]


def _unknown_thinking(request: TemplatedBody, text: ModelTokenizer) -> Iterator[str]:
    """Strengths and switches of thinking that the template does not ask for, where they say anything."""
    known, effort = text.template_variables, request.reasoning_effort
    stops = not text.has_reasoning or not known.isdisjoint(_THINKING)
    if effort is not None and "reasoning_effort" not in known and not (effort == "none" and stops):
        yield "reasoning_effort"
    for name, value in _switches(request.chat_template_kwargs).items():
        if name not in known and (value or text.has_reasoning):
            yield f"chat_template_kwargs.{name}"
    others = None if request.chat_template_kwargs is None else request.chat_template_kwargs.model_extra
    for name in known.intersection(others or ()):
        param = f"chat_template_kwargs.{name}"
        raise invalid(param, f"{param} is not taken from requests; only {' and '.join(_THINKING)} are.")


def _switches(given: TemplateOptions | None) -> dict[str, bool]:
    values = {name: getattr(given, name, None) for name in _THINKING}
    return {name: value for name, value in values.items() if value is not None}


def template_options(given: TemplateOptions | None, effort: str | None, text: ModelTokenizer) -> Mapping[str, Any]:
    """The variables that a request sets in the model's template, of those that it asks for. The effort ``none`` turns
    thinking off, where it can be.
    """
    options: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if effort == "none":
        options |= dict.fromkeys(_THINKING, False)
    options |= _switches(given)
    return {name: value for name, value in options.items() if name in text.template_variables}


def _callable(tool: Tool, forced: bool) -> ToolSpec:
    """A call that is not forced is held to its schema only where the tool is strict."""
    if "x-guidance" in tool.function.schema_of_arguments:
        raise invalid("tools", "x-guidance is not supported in the schema of a tool.")
    schema = tool.function.schema_of_arguments if forced or tool.function.strict else ANYTHING
    return ToolSpec(tool.function.name, schema)
