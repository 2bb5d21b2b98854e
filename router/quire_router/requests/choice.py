"""``Choice``: one choice of an answer while it is made. What an engine sends of it becomes deltas, with their text."""

from collections.abc import Sequence

from quire_proto.sampling import FinishReason
from quire_proto.structured_output import StructuredKind
from quire_proto.text.answer_stream import AnswerStream, RawAnswerStream, has_only_content, new_answer_parser
from quire_proto.text.detokenizer import OutputTextStream, StopMatcher
from quire_proto.text.stream_scanner import OutputPart
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core.generation import Delta, GenerationRequest
from quire_router.core.response_options import ReasoningPlacement, ResponseOptions
from quire_router.engines.attempt import Output


class Choice:
    """One choice of an answer, between its first and its last delta: its ``token_ids``, and the stream of their
    ``text``, or of its parts where stop strings count in some of them alone. ``finish_reason`` is None until it ends,
    and ``stop_string`` is the one that ended it. ``last_token`` is the time of its last tokens, None before the first.
    """

    __slots__ = ("_parts", "finish_reason", "index", "last_token", "stop_string", "text", "token_ids")

    def __init__(self, index: int, text: OutputTextStream | RawAnswerStream, parts: AnswerStream | None = None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.last_token: float | None = None
        self.text = text
        self._parts = parts

    @property
    def has_output(self) -> bool:
        """Whether it has tokens, or has ended."""
        return bool(self.token_ids) or self.finish_reason is not None

    def is_complete(self, max_tokens: int) -> bool:
        """Whether it has all the tokens that were asked for, so that no engine is needed to end it."""
        return self.finish_reason is None and len(self.token_ids) >= max_tokens

    def process(self, output: Output) -> Delta:
        """Returns the delta of an engine's output. A stop string ends the choice, whatever the engine reports: tokens
        after the one that completed it do not belong to it, nor do their log-probabilities.
        """
        token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
        stop_token, stream = output.stop_token, self._parts or self.text
        text, parts = self._read(token_ids, reason)
        if stream.stopped:
            reason, stop_token, self.stop_string = FinishReason.STOP, None, stream.stop_string
            kept = stream.num_tokens - len(self.token_ids)
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        self.finish_reason = reason
        self.token_ids += token_ids
        return Delta(
            text,
            token_ids,
            reason,
            None,
            self.index,
            logprobs,
            [],
            output.score,
            stop_token=stop_token,
            stop_string=self.stop_string,
            pooled=output.pooled,
            parts=parts,
        )

    def _read(self, token_ids: Sequence[int], reason: FinishReason | None) -> tuple[str, list[OutputPart] | None]:
        """Returns the text or the parts that are certain now, all of them if the choice ends for a ``reason``."""
        if self._parts is None:
            text = self.text.push(token_ids)
            return (text if reason is None or self.text.stopped else text + self.text.finish()), None
        parts = self._parts.push(token_ids)
        if reason is not None and not self._parts.stopped:
            parts += self._parts.finish(cut=reason is not FinishReason.STOP)
        return "", parts

    def finish(self, reason: FinishReason) -> Delta:
        """Returns the last delta of a choice that ends without an output of the engine that ends it."""
        return self.process(Output([], len(self.token_ids), reason))


def create_choices(request: GenerationRequest, tokenizer: ModelTokenizer, count: int) -> list[Choice]:
    """Returns ``count`` empty choices of a request."""
    options = ResponseOptions.from_record(request) if request.stop and request.operation == "chat" else None
    return [_create_choice(request, tokenizer, options, index) for index in range(count)]


def _create_choice(
    request: GenerationRequest, tokenizer: ModelTokenizer, options: ResponseOptions | None, index: int
) -> Choice:
    structured = request.params.structured
    is_plain = options is None or has_only_content(
        tokenizer,
        options.tools,
        follows_grammar=structured is not None
        and structured.kind is StructuredKind.GRAMMAR
        and not (options.tools or options.structured_param),  # those have the router's grammar, with reasoning in it
    )
    text = tokenizer.new_output_stream(
        request.prompt_token_ids,
        request.stop if is_plain else (),
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        keep_markers=request.operation == "chat",
        min_tokens=request.params.min_tokens,
    )
    if options is None or is_plain:
        return Choice(index, text)
    parser = new_answer_parser(
        tokenizer,
        request.prompt_token_ids,
        splits_reasoning=True,
        tools=options.tools,
        types=options.tool_types,
        guided=structured is not None,
    )
    matcher = StopMatcher(request.stop, include=request.include_stop)
    parts = AnswerStream(text, parser, matcher)
    if options.reasoning is not ReasoningPlacement.INLINE or tokenizer.reasoning is None:
        return Choice(index, text, parts)
    marked = tokenizer.new_output_stream(
        request.prompt_token_ids, (), skip_special_tokens=request.skip_special_tokens, keep_markers=True
    )
    return Choice(index, RawAnswerStream(marked, parts, matcher, include_stop=request.include_stop))
