"""The text stream of one output. A completion is searched for stop strings as a whole; in a chat's answer only the
content is searched, not reasoning and tool calls.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from quire_proto.structured_output import StructuredKind
from quire_proto.text.answer_stream import AnswerStream, RawAnswerStream, has_only_content, new_answer_parser
from quire_proto.text.detokenizer import OutputTextStream, StopMatcher
from quire_proto.text.tokenizer import ModelTokenizer

from quire_engine.core.request import Request
from quire_engine.llm.types import SamplingParams

TextStream = OutputTextStream | RawAnswerStream


def tool_names(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the names of tools in the form of the OpenAI API. Skips tools without a name."""
    functions = (tool.get("function", tool) for tool in tools if isinstance(tool, Mapping))
    names = (function.get("name") for function in functions if isinstance(function, Mapping))
    return tuple(name for name in names if isinstance(name, str))


def new_text_stream(
    tokenizer: ModelTokenizer, request: Request, params: SamplingParams, tools: tuple[str, ...] | None
) -> TextStream:
    """Returns a stream for the text of one output as the model wrote it. ``tools`` is a tuple of names, possibly empty,
    for a chat, and None for a completion.
    """
    prompt, sampling, stops = request.prompt_token_ids, request.sampling, tuple(params.stops)
    include, skip = params.include_stop_str_in_output, params.skip_special_tokens
    has_grammar = sampling.structured is not None and sampling.structured.kind is StructuredKind.GRAMMAR
    if not stops or tools is None or has_only_content(tokenizer, tools, follows_grammar=has_grammar):
        return tokenizer.new_output_stream(
            prompt, stops, include_stop=include, skip_special_tokens=skip, min_tokens=sampling.min_tokens
        )
    parser = new_answer_parser(tokenizer, prompt, splits_reasoning=True, tools=tools)
    matcher = StopMatcher(stops, include=include)
    marked = tokenizer.new_output_stream(prompt, (), keep_markers=True, min_tokens=sampling.min_tokens)
    text = tokenizer.new_output_stream(prompt, (), skip_special_tokens=skip)
    return RawAnswerStream(text, AnswerStream(marked, parser, matcher), matcher, include_stop=include)
