"""One choice of an answer between its first and its last piece: its tokens and its text."""

from quire_proto.sampling import FinishReason
from quire_proto.text.model_text import ModelTokenizer
from quire_proto.text.output import OutputTextStream

from quire_router.fleet.output import Output
from quire_router.generation import Delta, GenerationRequest


class Choice:
    """``token_ids`` are all that belong to it, and ``finish_reason`` is None while it goes on. ``last_token`` is when
    the last ones came.
    """

    __slots__ = ("_text", "finish_reason", "index", "last_token", "token_ids")

    def __init__(self, index: int, text: OutputTextStream) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.last_token: float | None = None
        self._text = text

    def process(self, output: Output) -> Delta:
        """The piece that an engine's output makes. A stop string ends the choice, whatever the engine says: tokens
        after the one that completed it do not belong to it, nor do their log-probabilities.
        """
        token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
        text = self._text.push(token_ids)
        if reason is not None and not self._text.stopped:
            text += self._text.finish()
        if self._text.stopped:
            reason = FinishReason.STOP
            kept = self._text.stop_token_count - len(self.token_ids)
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        self.finish_reason = reason
        self.token_ids += token_ids
        return Delta(text, token_ids, reason, None, self.index, logprobs, [], output.score)

    def finish(self, reason: FinishReason) -> Delta:
        """Returns the last delta of a choice that ends without an output of the engine that ends it."""
        return self.process(Output([], len(self.token_ids), reason))


def create_choices(generation: GenerationRequest, text: ModelTokenizer, count: int) -> list[Choice]:
    """So many choices of a request, with nothing in them yet."""
    return [Choice(index, _open_text(generation, text)) for index in range(count)]


def _open_text(generation: GenerationRequest, text: ModelTokenizer) -> OutputTextStream:
    return text.new_output_stream(
        generation.prompt_token_ids,
        generation.stop,
        include_stop=generation.include_stop,
        skip_special_tokens=generation.skip_special_tokens,
        keep_markers=generation.operation == "chat",
    )
