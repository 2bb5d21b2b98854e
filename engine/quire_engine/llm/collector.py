"""Gathers what the engine makes of one request, until it is a ``RequestOutput``."""

from collections.abc import Callable, Sequence

from quire_proto.best_of import best_of
from quire_proto.logprobs import TokenLogprobs, mean_logprob
from quire_proto.sampling import FinishReason
from quire_proto.text.model_text import ModelTokenizer
from quire_proto.text.output import OutputTextStream

from quire_engine.llm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire_engine.llm.submission import PreparedRequest
from quire_engine.scheduling.output import EngineCoreOutput

TokenText = Callable[[int], str]


class CompletionBuilder:
    """One output as far as it has come. ``finish_reason`` is set once it has ended, by the engine or by a stop
    string.
    """

    def __init__(self, text: OutputTextStream) -> None:
        self._text = text
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.score: float | None = None

    def add_output(self, output: EngineCoreOutput) -> None:
        """Adds new tokens; those after a stop string are not part of the output."""
        if self.finish_reason is not None:
            return
        self._pieces.append(self._text.push(output.token_ids))
        kept = self._text.stop_token_count - len(self.token_ids)
        self.token_ids += output.token_ids[:kept]
        self.logprobs += output.logprobs[:kept]
        self.score = output.score
        if not self._text.stopped and output.finish_reason is not None:
            self._pieces.append(self._text.finish())
        self.finish_reason = FinishReason.STOP if self._text.stopped else output.finish_reason

    def fail(self) -> None:
        """Ends an output whose request has failed."""
        if self.finish_reason is None:
            self.add_output(EngineCoreOutput("", finish_reason=FinishReason.ERROR))

    def completion(self, index: int, token_text: TokenText | None) -> CompletionOutput:
        """The output, ended, as choice ``index``; with log-probabilities if ``token_text`` is given."""
        assert self.finish_reason is not None
        logprobs = self.logprobs
        return CompletionOutput(
            index=index,
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._text.stop_string,
            logprobs=None if token_text is None else _by_position(self.token_ids, logprobs, token_text),
            cumulative_logprob=sum(each.logprob for each in logprobs) if logprobs or token_text else None,
            score=self.score,
        )


class OutputProcessor:
    """One request as far as it has come."""

    def __init__(self, submission: PreparedRequest, text: ModelTokenizer) -> None:
        self.prepared = submission
        self._text = text
        drawn, params, prompt = submission.request.sampling, submission.params, submission.request.prompt_token_ids
        self._choices = [
            CompletionBuilder(
                text.new_output_stream(
                    prompt,
                    params.stops,
                    include_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                )
            )
            for _ in range(drawn.num_returned)
        ]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._result = RequestOutput(submission.prompt, [])

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Adds what a step made. True when a stop string has ended an output that the engine goes on with."""
        self._result.num_cached_tokens = max(self._result.num_cached_tokens, output.cached_tokens)
        self._prompt_logprobs += output.prompt_logprobs
        if output.error is not None:
            self._fail(output)
            return False
        choice = self._choices[output.index]
        going_on = choice.finish_reason is None
        choice.add_output(output)
        return going_on and choice.finish_reason is not None and output.finish_reason is None

    def result(self) -> RequestOutput:
        """The request, ended: the outputs that it asked for."""
        request, result = self.prepared.request, self._result
        result.prompt_token_ids = list(request.prompt_token_ids)
        wanted = None if request.sampling.logprobs is None else self._token_text
        result.outputs = [choice.completion(index, wanted) for index, choice in enumerate(self._chosen())]
        if request.sampling.prompt_logprobs is not None:
            tokens = result.prompt_token_ids[1 : len(self._prompt_logprobs) + 1]
            result.prompt_logprobs = [None, *_by_position(tokens, self._prompt_logprobs, self._token_text)]
        return result

    def _token_text(self, token_id: int) -> str:
        return (self._text.token_bytes(token_id) or b"").decode(errors="replace")

    def _fail(self, output: EngineCoreOutput) -> None:
        self._result.error = output.error
        for choice in self._choices:
            choice.fail()

    def _chosen(self) -> list[CompletionBuilder]:
        drawn = self.prepared.request.sampling
        if drawn.best_of <= drawn.n:
            return self._choices
        means = [mean_logprob(choice.logprobs) for choice in self._choices]
        return [self._choices[index] for index in best_of(means, drawn.n)]


def _by_position(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_text: TokenText
) -> list[PositionLogprobs]:
    return [_at_position(*pair, token_text) for pair in zip(token_ids, logprobs, strict=True)]


def _at_position(token_id: int, logprobs: TokenLogprobs, token_text: TokenText) -> PositionLogprobs:
    ranks = {top_id: rank for rank, (top_id, _) in enumerate(logprobs.top, 1)}
    told = {token_id: logprobs.logprob} | dict(logprobs.top)
    return {each: Logprob(value, ranks.get(each), token_text(each)) for each, value in told.items()}
