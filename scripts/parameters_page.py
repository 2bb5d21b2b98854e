"""Writes docs/parameters.md from the table by which requests are validated: ``parameters_page.py [--check]``."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from quire_router.api.schemas import anthropic, conversation, openai, pooling, response_tools, responses
from quire_router.api.schemas.base import StrictModel
from quire_router.api.schemas.parameters import Column, Parameter
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).parents[1] / "docs" / "parameters.md"

PLACES: Final[Mapping[str, type[StrictModel]]] = {
    "chat": openai.ChatRequest,
    "chat.tools": conversation.Tool,
    "chat.tools.function": conversation.Function,
    "completions": openai.CompletionRequest,
    "stream_options": openai.StreamOptions,
    "response_format": openai.ResponseFormat,
    "response_format.json_schema": openai.NamedSchema,
    "structured_outputs": openai.StructuredOutputs,
    "responses": responses.ResponsesRequest,
    "responses.text": responses.TextOptions,
    "responses.text.format": responses.TextFormat,
    "responses.reasoning": responses.ReasoningOptions,
    "responses.tools": response_tools.FunctionTool,
    "input_tokens": responses.InputTokensRequest,
    "messages": anthropic.MessagesRequest,
    "messages.tools": anthropic.ToolDefinition,
    "messages.tool_choice": anthropic.ToolUseChoice,
    "messages.output_config": anthropic.OutputConfig,
    "messages.output_config.format": anthropic.OutputFormat,
    "messages.thinking": anthropic.Thinking,
    "messages.metadata": anthropic.RequestMetadata,
    "count_tokens": anthropic.CountTokensRequest,
    "embeddings": pooling.EmbeddingRequest,
    "score": pooling.ScoreRequest,
    "rerank": pooling.RerankRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
"""The places of requests that other servers have parameters for, with the objects that stand there."""

_TITLES: Final = {
    "chat": "`/v1/chat/completions`",
    "completions": "`/v1/completions`",
    "responses": "`/v1/responses`",
    "input_tokens": "`/v1/responses/input_tokens`",
    "messages": "`/v1/messages`",
    "count_tokens": "`/v1/messages/count_tokens`",
    "embeddings": "`/v1/embeddings`",
    "score": "`/score`",
    "rerank": "`/rerank`",
    "tokenize": "`/tokenize`",
    "detokenize": "`/detokenize`",
    "chat.tools": "`tools` of a chat",
    "chat.tools.function": "`tools[].function` of a chat",
}
_HEAD: Final = """# Parameters of other servers

This page lists parameters of vLLM, SGLang, llama.cpp and hosted APIs that are not in the [API](api.md), by route.
The router validates requests by the same tables. Values in parentheses, and `null`, mean nothing, and are accepted.

| a parameter that is | gets |
|---|---|
| honoured | the effect of the field here. If a request has both names, they must agree |
| refused | a 400 that says what to use instead, because the parameter would change the answer |
| without effect | ignored, and [named in a header](api.md#what-is-ignored) |
| unknown (not listed) | ignored, and named in the same header; a 400 with `--unknown-parameters refuse` |

`scripts/parameters_page.py` writes this page.
"""


def column(place: str, name: str) -> Column:
    """Returns where a parameter stands in the table of a place."""
    kind = PLACES[place]
    if name in {field.alias or own for own, field in kind.model_fields.items()}:
        return Column.HONOURED
    known = kind.foreign.get(name)
    return Column.UNKNOWN if known is None else known.column


def page() -> str:
    """Returns the page as Markdown."""
    sections = ("\n".join(_section(place, kind)) for place, kind in PLACES.items() if kind.foreign)
    return "\n".join([_HEAD, *sections])


def _section(place: str, kind: type[StrictModel]) -> Iterator[str]:
    fields = {field.alias or own for own, field in kind.model_fields.items()}
    rows: dict[Column, dict[str, list[str]]] = {each: defaultdict(list) for each in Column}
    for name, known in sorted(kind.foreign.items()):
        if name not in fields:
            rows[known.column][known.same_as or known.instead or ""].append(_cell(name, known))
    yield f"## {_TITLES.get(place, f'`{place}`')}\n"
    if rows[Column.HONOURED]:
        yield "| field here | other names, honoured |\n|---|---|"
        yield from (f"| `{field}` | {', '.join(names)} |" for field, names in sorted(rows[Column.HONOURED].items()))
        yield ""
    if rows[Column.REFUSED]:
        yield "| refused | instead |\n|---|---|"
        yield from (f"| {', '.join(names)} | {instead} |" for instead, names in sorted(rows[Column.REFUSED].items()))
        yield ""
    if rows[Column.WITHOUT_EFFECT]:
        yield f"| without effect |\n|---|\n| {', '.join(rows[Column.WITHOUT_EFFECT][''])} |\n"


def _cell(name: str, known: Parameter) -> str:
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in known.neutral)
    return f"`{name}` ({neutral})" if neutral else f"`{name}`"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
