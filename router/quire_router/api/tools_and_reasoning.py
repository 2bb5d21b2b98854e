"""What a chat's tools and reasoning mean for its model: in its template, where that knows them, and as the grammar that
its output follows (``structured_of``).
"""

import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from quire_proto.errors import QuireError, invalid
from quire_proto.structured_output import MAX_TEXT, Structured, StructuredKind
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_formats import ToolFormat
from quire_proto.text.tool_grammar import (
    ANYTHING,
    GrammarTooLargeError,
    ReasoningState,
    ToolSpec,
    UnsupportedSchemaError,
    answer_grammar,
    schema_on_line,
    tool_call_grammar,
)

from quire_router.api.schemas.conversation import Tool, grammar_too_large
from quire_router.api.schemas.openai import (
    ChatRequest,
    GenerationBody,
    TemplatedBody,
    TemplateOptions,
)
from quire_router.core.generation import Delta

TemplatedT = TypeVar("TemplatedT", bound=TemplatedBody)

_REFUSED = re.compile(
    r"The grammar cannot be used, line (\d{1,6}): (?:failed to compile JSON schema: )?(.*)", re.DOTALL
)
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # names of the switch in templates
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def structured_of(request: GenerationBody, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> Structured | None:
    """Returns what constrains the output; None for free text. It is the client's own constraint, a grammar of tool
    calls, or a grammar of calls or JSON, and includes reasoning if the model reasons. Raises ``QuireError`` INVALID for
    what cannot be enforced.
    """
    requested = request.structured
    if not isinstance(request, ChatRequest):
        return requested
    thinking = _reasoning_state(tokenizer, prompt)
    if not request.offered_tools:
        return requested if requested is None else _after_reasoning(request, requested, thinking, tokenizer)
    tool_format = require_tool_format(tokenizer)
    reply = None if requested is None else _reply(requested)
    if reply is None and not request.is_guided:
        return None
    _check_guided(request)
    try:
        grammar = tool_call_grammar(
            tool_format,
            [_tool_spec(tool, request.call_required) for tool in request.callable_tools],
            forced=request.call_required,
            parallel=request.parallel_tool_calls is not False,
            thinking=thinking,
            tokens=tokenizer.marker_tokens,
            reply=reply,
        )
    except RecursionError:
        raise invalid("tools", "The schemas of the tools are nested too deeply.") from None
    except UnsupportedSchemaError as error:
        raise _unusable_parameters(error.tool, str(error)) from None
    except GrammarTooLargeError:
        raise grammar_too_large() from None
    return Structured(StructuredKind.GRAMMAR, grammar)


def _reasoning_state(tokenizer: ModelTokenizer, prompt: Sequence[int]) -> ReasoningState:
    if not tokenizer.reasons_after(prompt):
        return ReasoningState()
    return ReasoningState(tokenizer.reasoning, tokenizer.starts_in_reasoning(prompt))


def _after_reasoning(
    request: ChatRequest, requested: Structured, thinking: ReasoningState, tokenizer: ModelTokenizer
) -> Structured:
    """Returns the grammar of reasoning and then what the client requests: that alone where it is to stay in the
    content. Raises ``QuireError`` as ``_reply`` does.
    """
    if request.separate_reasoning is False or thinking.marks is None:
        return requested
    if requested.kind is StructuredKind.JSON_SCHEMA:
        _reply(requested)
    try:
        grammar = answer_grammar(requested, thinking, tokens=tokenizer.marker_tokens)
    except (ValueError, RecursionError):
        raise invalid(requested.param, "The schema is not JSON, or is nested too deeply.") from None
    if grammar is None:
        return requested
    if len(grammar) > MAX_TEXT:
        raise invalid(requested.param, f"{requested.param} and its grammar have more than {MAX_TEXT} characters.")
    return Structured(StructuredKind.GRAMMAR, grammar)


def _reply(requested: Structured) -> Mapping[str, Any]:
    """Returns the schema of a reply that is no tool call. Raises ``QuireError`` for a constraint that is not JSON."""
    if requested.kind is StructuredKind.JSON_OBJECT:
        return ANYTHING
    if requested.kind is not StructuredKind.JSON_SCHEMA:
        raise invalid("tools", f"tools and {requested.param} exclude each other; response_format goes with tools.")
    schema: Mapping[str, Any] = json.loads(requested.text)
    if "x-guidance" in schema:
        raise invalid(requested.param, "x-guidance is not supported in a schema.")
    return schema


def _check_guided(request: ChatRequest) -> None:
    """Raises ``QuireError`` for what a grammar excludes: it ends with the model's own end, and beams have none."""
    param = "tool_choice" if request.call_required else "tools"
    others = {"ignore_eos": request.ignore_eos, "min_tokens": request.min_tokens, "beam_width": request.search_width}
    for other, is_set in others.items():
        if is_set:
            raise invalid(param, f"{param} and {other} exclude each other.")


async def name_schema_at_fault(deltas: AsyncGenerator[Delta], grammar: str, param: str) -> AsyncGenerator[Delta]:
    """Yields the same deltas; where the engine refuses the ``grammar`` of ``structured_of``, the error names the schema
    at fault, and otherwise ``param``. Closes ``deltas``.
    """
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except QuireError as error:
            raise (
                _schema_error(error.message, grammar, param) if error.param == StructuredKind.GRAMMAR else error
            ) from None


def _schema_error(message: str, grammar: str, param: str) -> QuireError:
    """Returns the engine's error about ``grammar`` as one about the schema in the line that ``message`` names."""
    refused = _REFUSED.fullmatch(message)
    found = None if refused is None else schema_on_line(grammar, int(refused[1]))
    if refused is None or found is None:
        return invalid(param, message)
    tool, _ = found
    if tool is None:
        return invalid("response_format", f"The JSON schema cannot be used: {refused[2]}")
    return _unusable_parameters(tool, refused[2])


def _unusable_parameters(tool: str, reason: str) -> QuireError:
    return invalid("tools", f"The parameters of the tool {tool} cannot be used: {reason}")


def require_tool_format(tokenizer: ModelTokenizer) -> ToolFormat:
    """Returns how the model writes tool calls. Raises ``QuireError`` where it has none, or an unknown format."""
    if tokenizer.tool_format is not None:
        return tokenizer.tool_format
    if "tools" in tokenizer.template_variables(with_tools=True):
        raise invalid("tools", "This model writes tool calls in a format that is not supported here.")
    raise invalid(
        "tools",
        "This model's chat template knows no tools: serve a model whose template does, or put a template with tools "
        "into the model's folder as chat_template.jinja.",
    )


def drop_unsupported_by_template(request: TemplatedT, tokenizer: ModelTokenizer) -> tuple[TemplatedT, Sequence[str]]:
    """Returns the request without tools where the model's template has none, and the names of the parameters that
    change nothing with this template. Raises ``QuireError`` for tools that must be called, and for variables of the
    template that requests may not set.
    """
    ignored = [*_ignored_thinking(request, tokenizer)]
    if not request.offered_tools or tokenizer.tool_format is not None:
        return request, ignored
    if request.call_required:
        require_tool_format(tokenizer)
    tool_fields = [
        name for name in _TOOL_FIELDS if name in type(request).model_fields and getattr(request, name) is not None
    ]
    return request.model_copy(update=dict.fromkeys(tool_fields)), [*tool_fields, *ignored]


def _ignored_thinking(request: TemplatedBody, tokenizer: ModelTokenizer) -> Iterator[str]:
    """Yields reasoning efforts and switches that the template does not read, where they would change anything."""
    known, effort = tokenizer.template_variables(with_tools=bool(request.offered_tools)), request.reasoning_effort
    stops = tokenizer.reasoning is None or not known.isdisjoint(_THINKING_SWITCHES)
    if effort is not None and "reasoning_effort" not in known and not (effort == "none" and stops):
        yield "reasoning_effort"
    switches = _thinking_switches(request.chat_template_kwargs)
    followed = {value for name, value in switches.items() if name in known}
    for name, value in switches.items():
        if name not in known and value not in followed and (value or tokenizer.reasoning is not None):
            yield f"chat_template_kwargs.{name}"
    others = None if request.chat_template_kwargs is None else request.chat_template_kwargs.model_extra
    for name in known.intersection(others or ()):
        param = f"chat_template_kwargs.{name}"
        raise invalid(param, f"{param} is not taken from requests; only {' and '.join(_THINKING_SWITCHES)} are.")


def _thinking_switches(given: TemplateOptions | None) -> dict[str, bool]:
    values = {name: getattr(given, name, None) for name in _THINKING_SWITCHES}
    return {name: value for name, value in values.items() if value is not None}


def template_options(
    given: TemplateOptions | None, effort: str | None, tokenizer: ModelTokenizer, *, with_tools: bool
) -> Mapping[str, Any]:
    """Returns the variables that a request sets in the model's template, of those that the template reads. The effort
    ``none`` turns thinking off, where it can be.
    """
    options: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if effort == "none":
        options |= dict.fromkeys(_THINKING_SWITCHES, False)
    options |= _thinking_switches(given)
    known = tokenizer.template_variables(with_tools=with_tools)
    return {name: value for name, value in options.items() if name in known}


def _tool_spec(tool: Tool, call_required: bool) -> ToolSpec:
    """A call that is not required is held to its schema only where the tool is strict."""
    if "x-guidance" in tool.function.schema_of_arguments:
        raise invalid("tools", "x-guidance is not supported in the schema of a tool.")
    schema = tool.function.schema_of_arguments if call_required or tool.function.strict else ANYTHING
    return ToolSpec(tool.function.name, schema)
