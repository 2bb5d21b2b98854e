"""``Choice``: one choice of an answer while it is made. What an engine sends of it becomes deltas, with their text."""

from quire_proto.sampling import FinishReason
from quire_proto.text.detokenizer import OutputTextStream
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core.generation import Delta, GenerationRequest
from quire_router.engines.attempt import Output


class Choice:
    """One choice of an answer, between its first and its last delta: its ``token_ids`` and their ``text``.
    ``finish_reason`` is None until it ends; ``last_token`` is the time of its last tokens, None before the first.
    """

    __slots__ = ("finish_reason", "index", "last_token", "text", "token_ids")

    def __init__(self, index: int, text: OutputTextStream) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.last_token: float | None = None
        self.text = text

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
        stop_token, text, stop_string = output.stop_token, self.text.push(token_ids), None
        if reason is not None and not self.text.stopped:
            text += self.text.finish()
        if self.text.stopped:
            reason, stop_token, stop_string = FinishReason.STOP, None, self.text.stop_string
            kept = self.text.stop_token_count - len(self.token_ids)
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
        )

    def finish(self, reason: FinishReason) -> Delta:
        """Returns the last delta of a choice that ends without an output of the engine that ends it."""
        return self.process(Output([], len(self.token_ids), reason))


def create_choices(request: GenerationRequest, tokenizer: ModelTokenizer, count: int) -> list[Choice]:
    """Returns ``count`` empty choices of a request."""
    return [Choice(index, _open_text(request, tokenizer)) for index in range(count)]


def _open_text(request: GenerationRequest, tokenizer: ModelTokenizer) -> OutputTextStream:
    return tokenizer.new_output_stream(
        request.prompt_token_ids,
        request.stop,
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        keep_markers=request.operation == "chat",
    )
