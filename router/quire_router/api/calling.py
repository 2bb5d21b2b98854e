"""What a chat's tools and thoughts mean for its model: the variables of its template, and the grammar that holds it to
calls. Raises ``QuireError`` where the model knows nothing of it.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from quire_proto.errors import QuireError, invalid
from quire_proto.structured import MAX_TEXT, Structured, StructuredKind
from quire_proto.text.model_text import ModelText
from quire_proto.text.tools.formats import ToolFormat
from quire_proto.text.tools.grammar import ANYTHING, Callable, Thinking, call_grammar

from quire_router.api.schemas import ChatRequest, GenerationRequest, TemplateOptions
from quire_router.api.tools import Tool, too_large
from quire_router.generation import Delta

_THINKING = ("enable_thinking", "thinking")  # what templates call the switch


def structured_of(request: GenerationRequest, text: ModelText, prompt: Sequence[int]) -> Structured | None:
    """The grammar that the output is held to: the one that the client asks for, or one that makes the calls that it
    forces. Raises ``QuireError`` INVALID for both, and for what cannot be held to.
    """
    asked = request.structured
    if not (isinstance(request, ChatRequest) and request.offered):
        return asked
    tool_format = format_of(text)
    if asked is not None:
        raise invalid("tools", f"tools and {asked.param} exclude each other.")
    if not request.is_guided:
        return None
    _check_guided(request)
    thinking = Thinking(text.marks_reasoning, text.begins_with_reasoning(prompt))
    grammar = call_grammar(
        tool_format,
        [_callable(tool, request.forced) for tool in request.callable],
        forced=request.forced,
        parallel=request.parallel_tool_calls is not False,
        thinking=thinking,
        special=text.added_marks,
    )
    if len(grammar) > MAX_TEXT:
        raise too_large(len(grammar))
    return Structured(StructuredKind.GRAMMAR, grammar)


def _check_guided(request: ChatRequest) -> None:
    """A grammar ends with the model's own end, and holds for no beams."""
    param = "tool_choice" if request.forced else "tools"
    others = {"ignore_eos": request.ignore_eos, "min_tokens": request.min_tokens, "beam_width": request.width}
    for other, is_set in others.items():
        if is_set:
            raise invalid(param, f"{param} and {other} exclude each other.")


async def naming_tools(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """The same pieces; where the engine refuses the grammar, it is the tools that are at fault. Closes ``deltas``."""
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except QuireError as error:
            raise invalid("tools", error.message) if error.param == StructuredKind.GRAMMAR else error from None


def format_of(text: ModelText) -> ToolFormat:
    """How the model calls tools. Raises ``QuireError`` where it does not."""
    if text.tool_format is not None:
        return text.tool_format
    if "tools" in text.template_variables:
        raise invalid("tools", "This model writes tool calls in a format that is not supported here.")
    raise invalid("tools", "This model's chat template knows no tools.")


def template_options(given: TemplateOptions | None, effort: str | None, text: ModelText) -> Mapping[str, Any]:
    """The variables that a request sets in the model's template. Raises ``QuireError`` for those that it does not ask
    for, unless they change nothing.
    """
    options: dict[str, Any] = {}
    for name, value in ({} if given is None else given.model_dump(exclude_none=True)).items():
        if name in text.template_variables:
            options[name] = value
        elif value or text.marks_reasoning:
            raise _unknown(f"chat_template_kwargs.{name}")
    return {**_effort(effort, text), **options}


def _effort(effort: str | None, text: ModelText) -> dict[str, Any]:
    """``none`` turns thinking off, where it can be."""
    if effort == "none":
        return dict.fromkeys(text.template_variables.intersection(_THINKING), False)
    if effort is not None and "reasoning_effort" not in text.template_variables:
        raise _unknown("reasoning_effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _unknown(param: str) -> QuireError:
    return invalid(param, f"This model's chat template does not know {param}.")


def _callable(tool: Tool, forced: bool) -> Callable:
    """A call that is not forced is held to its schema only where the tool is strict."""
    if "x-guidance" in tool.function.schema_of_arguments:
        raise invalid("tools", "x-guidance is not supported in the schema of a tool.")
    schema = tool.function.schema_of_arguments if forced or tool.function.strict else ANYTHING
    return Callable(tool.function.name, schema)
