"""``Choice``: one choice of an answer while it is made. What an engine sends of it becomes deltas, with their text."""

from quire_proto.sampling import FinishReason
from quire_proto.structured_output import StructuredKind
from quire_proto.text.answer_stream import AnswerStream, RawAnswerStream, new_answer_parser
from quire_proto.text.detokenizer import OutputTextStream, StopMatcher
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core.generation import Delta, GenerationRequest
from quire_router.core.response_options import ReasoningPlacement, ResponseOptions
from quire_router.engines.attempt import Output

AnswerReader = OutputTextStream | AnswerStream | RawAnswerStream


class Choice:
    """One choice of an answer, between its first and its last delta: its ``token_ids`` and their ``text``.
    ``finish_reason`` is None until it ends; ``last_token`` is the time of its last tokens, None before the first. Where
    stop strings count in some of the text alone, ``answer`` reads that instead.
    """

    __slots__ = ("answer", "finish_reason", "index", "last_token", "text", "token_ids")

    def __init__(self, index: int, text: OutputTextStream, answer: AnswerReader | None = None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.last_token: float | None = None
        self.text = text
        self.answer: AnswerReader = answer or text

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
        text, parts = self.answer.read(token_ids, reason)
        stop_token, stop_string = output.stop_token, None
        if self.answer.stopped:
            reason, stop_token, stop_string = FinishReason.STOP, None, self.answer.stop_string
            kept = self.answer.stop_token_count - len(self.token_ids)
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
            stop_string=stop_string,
            pooled=output.pooled,
            parts=parts,
        )

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
    is_plain = options is None or _is_content(request, tokenizer, options)
    text = tokenizer.new_output_stream(
        request.prompt_token_ids,
        request.stop if is_plain else (),
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        keep_markers=request.operation == "chat",
        min_tokens=request.params.min_tokens,
    )
    return Choice(index, text, None if options is None or is_plain else _split(request, tokenizer, options, text))


def _is_content(request: GenerationRequest, tokenizer: ModelTokenizer, options: ResponseOptions) -> bool:
    """Whether all of an answer is content, for want of reasoning and tools, or since a grammar of the client says what
    it is.
    """
    structured = request.params.structured
    has_calls = bool(options.tools) and tokenizer.tool_format is not None
    has_grammar = structured is not None and structured.kind is StructuredKind.GRAMMAR
    return not has_calls and (tokenizer.reasoning is None or (has_grammar and not options.tools))


def _split(
    request: GenerationRequest, tokenizer: ModelTokenizer, options: ResponseOptions, text: OutputTextStream
) -> AnswerStream | RawAnswerStream:
    """Returns the stream of the parts of ``text``, or of the text where its reasoning is shown inline."""
    parser = new_answer_parser(
        tokenizer,
        request.prompt_token_ids,
        splits_reasoning=True,
        tools=options.tools,
        types=options.tool_types,
        exact=request.params.structured is not None,
    )
    matcher = StopMatcher(request.stop, include=request.include_stop)
    if options.reasoning is not ReasoningPlacement.INLINE or tokenizer.reasoning is None:
        return AnswerStream(text, parser, matcher)
    marked = tokenizer.new_output_stream(
        request.prompt_token_ids, (), skip_special_tokens=request.skip_special_tokens, keep_markers=True
    )
    return RawAnswerStream(marked, AnswerStream(text, parser, matcher), matcher, include_stop=request.include_stop)
