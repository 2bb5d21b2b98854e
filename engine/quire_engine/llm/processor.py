"""Input and output of the engine: ``InputProcessor`` makes checked requests from prompts, ``OutputProcessor`` makes a
``RequestOutput`` from the engine's outputs.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any

from quire_proto import sampling
from quire_proto.errors import QuireError, invalid
from quire_proto.pooling import PoolingParams
from quire_proto.sampling import FinishReason, TokenLogprobs, best_of, mean_logprob
from quire_proto.text.conversation import hidden_fields
from quire_proto.text.pooled_prompt import PooledPrompt
from quire_proto.text.tokenizer import ModelTokenizer, encode_bad_words

from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request, SequenceTimings, check_request
from quire_engine.core.scheduler import Scheduler
from quire_engine.errors import LoRAError
from quire_engine.llm.arguments import Conversation
from quire_engine.llm.output_text import TextStream, new_text_stream, tool_names
from quire_engine.llm.pooling_outputs import PoolingPrompt, PreparedPooling, encode
from quire_engine.llm.types import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    whole_number,
)
from quire_engine.structured_output.compiler import GrammarCompiler

log = logging.getLogger(__name__)

TokenText = Callable[[int], str | None]
_SECONDS = 1e-9  # of a nanosecond
_MAX_LOGGED = 16  # names in a line
_MAX_PRIORITY = 2**31 - 1  # as in the service
_MAX_LORA_ID = 2**63 - 1
_POOLED = sampling.SamplingParams(max_tokens=1)  # not read for pooled prompts


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the scheduler accepts, with its prompt (None if it was token ids) and its parameters. It is
    complete if it has its grammar and, if it is for ``lora``, its adapter. A chat has the names of its ``tools``.
    """

    request: Request
    prompt: str | None
    params: SamplingParams
    lora: LoRARequest | None = None
    tools: tuple[str, ...] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the request can be run."""
        lacks_grammar = self.request.sampling.structured is not None and self.request.grammar is None
        return not lacks_grammar and (self.lora is None or self.request.lora is not None)


class InputProcessor:
    """Creates the requests of one engine: tokenised, with a seed, and checked. Use it from one thread at a time,
    because seeds are drawn in the order of the calls. ``complete`` does the work that may take seconds, and is
    thread-safe.

    ``draw_seed`` returns the seed of a request without one. ``check_lora`` reads and checks an adapter's folder and
    returns the adapter.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        scheduler: Scheduler,
        draw_seed: Callable[[], int],
        grammars: GrammarCompiler,
        check_lora: Callable[[LoRARequest], LoRARequest],
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = scheduler.config
        self._memory = scheduler.kv_cache_manager
        self._draw_seed = draw_seed
        self._grammars = grammars
        self._check_lora = check_lora
        self._loras: dict[int, tuple[LoRARequest, LoRARequest]] = {}
        self._reading_lora = Lock()
        self._ids = count()
        self._bad_words: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def from_prompt(
        self, prompt: str | list[int], params: SamplingParams, priority: int, lora: LoRARequest | None
    ) -> PreparedRequest:
        """Returns a request that continues a text or token ids. Raises ``QuireError``."""
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, self._limits.max_model_len)
            return self._build(prompt, token_ids, params, priority, lora)
        if prompt and not (min(prompt) >= 0 and max(prompt) < self._limits.vocab_size):
            raise invalid("prompt", f"Token ids must be between 0 and {self._limits.vocab_size - 1}.")
        return self._build(None, prompt, params, priority, lora)

    def from_messages(
        self, chat: Conversation, params: SamplingParams, priority: int, lora: LoRARequest | None
    ) -> PreparedRequest:
        """Returns a request that answers a conversation. Raises ``QuireError``."""
        self._log_unseen(chat)
        render, encode = self._tokenizer.render_chat_text, self._tokenizer.encode_chat
        template: dict[str, Any] = {
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
            "options": chat.template_kwargs,
        }
        token_ids = encode(chat.messages, self._limits.max_model_len, **template)
        prepared = self._build(render(chat.messages, **template), token_ids, params, priority, lora)
        return replace(prepared, tools=tool_names(chat.tools))

    def _log_unseen(self, chat: Conversation) -> None:
        hidden = partial(self._tokenizer.hidden, with_tools=bool(chat.tools))
        unseen = [*chat.lost, *hidden_fields(chat.messages, hidden)]
        if unseen:
            more = f" and {len(unseen) - _MAX_LOGGED} more" if len(unseen) > _MAX_LOGGED else ""
            log.warning("the model does not see %s%s: its template cannot show that", unseen[:_MAX_LOGGED], more)

    def _build(
        self,
        prompt: str | None,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        lora: LoRARequest | None,
    ) -> PreparedRequest:
        if not isinstance(params, SamplingParams):
            raise invalid("sampling_params", "sampling_params must be SamplingParams.")
        params = replace(params)  # checked again, because it may have been assigned to; a copy for this request alone
        if abs(priority := whole_number("priority", priority)) > _MAX_PRIORITY:
            raise invalid("priority", f"priority is {priority} and must be within {_MAX_PRIORITY} of 0.")
        sampling_params = self._sampling_params(len(token_ids), params)
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=array("i", token_ids),
            sampling=sampling_params,
            priority=priority,
            lora=None if lora is None else self._known_lora(lora),
        )
        without_grammar = replace(request, sampling=replace(sampling_params, structured=None))  # not compiled yet
        check_request(without_grammar, self._limits, self._memory)
        return PreparedRequest(request, prompt, params, lora)

    def encode_pooled(self, prompts: Sequence[PoolingPrompt]) -> list[PooledPrompt]:
        """Returns the tokens of prompts to pool. Raises ``QuireError``."""
        return encode(self._tokenizer, prompts, self._limits.max_model_len)

    def pooled(self, encoded: PooledPrompt, params: PoolingParams, lora: LoRARequest | None) -> PreparedPooling:
        """Returns a request that pools a prompt. Raises ``QuireError``."""
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=array("i", encoded.token_ids),
            sampling=_POOLED,
            pooling=replace(params, second_text_start=encoded.second_text_start),
            lora=None if lora is None else self._read_lora(lora),
        )
        check_request(request, self._limits, self._memory)
        return PreparedPooling(request)

    def complete(self, prepared: PreparedRequest) -> PreparedRequest:
        """Returns the request with its grammar compiled and its adapter read, which may take seconds if they are new.
        Raises ``QuireError``.
        """
        request, structured = prepared.request, prepared.request.sampling.structured
        if structured is not None:
            request = replace(request, grammar=self._grammars.submit(structured).result())
        if prepared.lora is not None and request.lora is None:
            request = replace(request, lora=self._read_lora(prepared.lora))
        return replace(prepared, request=request)

    def _read_lora(self, lora: LoRARequest) -> LoRARequest:
        """Returns the adapter, which is read the first time. Raises ``QuireError`` INVALID."""
        with self._reading_lora:
            if lora.lora_int_id not in self._loras:
                try:
                    self._loras[lora.lora_int_id] = lora, self._check_lora(lora)
                except LoRAError as error:
                    raise invalid("lora_request", str(error)) from None
        known = self._known_lora(lora)
        assert known is not None, "it was read"
        return known

    def _known_lora(self, lora: LoRARequest) -> LoRARequest | None:
        """Returns the adapter if it was read before, else None. Raises ``QuireError`` INVALID, also if its number
        belongs to another adapter.
        """
        if not isinstance(lora, LoRARequest) or not isinstance(lora.lora_name, str):
            raise invalid("lora_request", "lora_request must be a LoRARequest whose name is a text.")
        if not 0 < whole_number("lora_request", lora.lora_int_id) <= _MAX_LORA_ID:
            raise invalid("lora_request", f"The number of lora_request must be above 0 and at most {_MAX_LORA_ID}.")
        if lora.lora_int_id not in self._loras:
            return None
        given, checked = self._loras[lora.lora_int_id]
        if given != lora:
            message = f"The number {lora.lora_int_id} is that of the adapter {given.lora_name} in {given.lora_path}."
            raise invalid("lora_request", message)
        return checked

    def _sampling_params(self, num_prompt: int, params: SamplingParams) -> sampling.SamplingParams:
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < self._limits.vocab_size:
                raise invalid("stop_token_ids", f"Token ids must be between 0 and {self._limits.vocab_size - 1}.")
        return params.resolve(
            seed=self._draw_seed(),
            max_output=max(1, self._limits.max_model_len - num_prompt),
            bad_words=self._bad_word_tokens(tuple(params.bad_words or ())),
        )

    def _bad_word_tokens(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of bad words. Caches the last call: calls with many prompts mostly have the same words for
        all.
        """
        token_ids = self._bad_words.get(words)
        if token_ids is None:
            token_ids = encode_bad_words(words, self._tokenizer)
            self._bad_words = {words: token_ids}
        return token_ids


class OutputProcessor:
    """Builds the ``RequestOutput`` of one request from its outputs as they arrive."""

    def __init__(self, prepared: PreparedRequest, tokenizer: ModelTokenizer) -> None:
        self.prepared = prepared
        self._tokenizer = tokenizer
        request, params = prepared.request, prepared.params
        self._choices = [
            CompletionBuilder(
                new_text_stream(tokenizer, request, params, prepared.tools) if params.detokenize else None,
                request.sampling.stop_token_ids,
            )
            for _ in range(request.sampling.num_returned)
        ]
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_prompt_logprobs_told = 0
        self._num_cached_tokens = 0
        self._timings: dict[int, SequenceTimings] = {}
        self.error: QuireError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Adds an output of a step. Returns whether it completed a stop string, so that the engine has to abort the
        choice.
        """
        self._num_cached_tokens = max(self._num_cached_tokens, output.cached_tokens)
        self._prompt_logprobs += output.prompt_logprobs
        if output.timings is not None:
            self._timings[output.index] = output.timings
        if output.error is not None:
            self.error = output.error
            for ended in self._choices:
                ended.end(FinishReason.ERROR)
            return False
        choice = self._choices[output.index]
        was_running = choice.finish_reason is None
        choice.add_output(output)
        return was_running and choice.finish_reason is not None and output.finish_reason is None

    def add_token(self, index: int, token_id: int) -> bool:
        """Adds a token of choice ``index`` that came alone; otherwise like ``add_output``."""
        return self._choices[index].add_token(token_id)

    def result(self) -> RequestOutput:
        """Returns the request with its requested outputs so far; with ``RequestOutputKind.DELTA``, the new parts since
        the last call.
        """
        request = self.prepared.request
        token_text = None if request.sampling.logprobs is None else self._token_text
        choices = list(enumerate(self._best_choices()))
        outputs = [
            choice.completion(index, token_text, delta=self._is_delta)
            for index, choice in choices
            if choice.has_news or not self._is_delta
        ]
        return RequestOutput(
            prompt=self.prepared.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else self._take_prompt_logprobs(),
            num_cached_tokens=self._num_cached_tokens,
            error=self.error,
            request_id=request.request_id,
            finished=self.is_finished,
            metrics=_metrics(self._timings.values()) if self._timings else None,
        )

    def _take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        tokens = self.prepared.request.prompt_token_ids[1 : len(self._prompt_logprobs) + 1]
        known = [None, *_by_position(tokens, self._prompt_logprobs, self._token_text)]
        if not self._is_delta:
            return known
        new = known[self._num_prompt_logprobs_told :]
        self._num_prompt_logprobs_told = len(known)
        return new or None

    def abort(self) -> None:
        """Ends the unfinished outputs."""
        for choice in self._choices:
            choice.end(FinishReason.ABORT)

    def _token_text(self, token_id: int) -> str | None:
        if not self.prepared.params.detokenize:
            return None
        return (self._tokenizer.token_bytes(token_id) or b"").decode(errors="replace")

    def _best_choices(self) -> "list[CompletionBuilder]":
        params = self.prepared.request.sampling
        if params.best_of <= params.n:
            return self._choices
        means = [mean_logprob(choice.logprobs) for choice in self._choices]
        return [self._choices[index] for index in best_of(means, params.n)]


class CompletionBuilder:
    """Builds one output from its tokens as they arrive. Without a text stream it gets no text. ``finish_reason`` is set
    when the engine or a stop string has ended it. Without stop strings, tokens are detokenised only when the text is
    read.
    """

    def __init__(self, text: TextStream | None, stop_token_ids: Sequence[int] = ()) -> None:
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._stop_token_id: int | None = None
        self._pieces: list[str] = []
        self._num_decoded = 0
        self._num_told = 0  # tokens in earlier deltas
        self._end_told = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.score: float | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is more than in the last delta."""
        ended = self.finish_reason is not None and not self._end_told
        return ended or len(self.token_ids) > self._num_told or any(self._pieces)

    def add_output(self, output: EngineCoreOutput) -> None:
        """Adds new tokens. Tokens after a stop string are not part of the output."""
        if self.finish_reason is not None:
            return
        kept, finish_reason = len(output.token_ids), output.finish_reason
        if self._text is not None and self._text.may_stop:
            self._pieces.append(self._text.push(output.token_ids))
            kept = self._text.num_tokens - len(self.token_ids)
            if self._text.stopped:
                finish_reason = FinishReason.STOP
            elif finish_reason is not None:
                self._pieces.append(self._text.finish())
                finish_reason = FinishReason.STOP if self._text.stopped else finish_reason
        self.token_ids += output.token_ids[:kept]
        self.logprobs += output.logprobs[:kept]
        self.score, self.finish_reason = output.score, finish_reason
        if output.stop_token is not None and output.stop_token.token_id in self._stop_token_ids:
            self._stop_token_id = output.stop_token.token_id

    def add_token(self, token_id: int) -> bool:
        """Adds one token. Returns whether it completed a stop string."""
        if self.finish_reason is not None:
            return False
        if self._text is not None and self._text.may_stop:
            self.add_output(EngineCoreOutput("", [token_id]))
            return self.finish_reason is not None
        self.token_ids.append(token_id)
        return False

    def _decode(self, text: TextStream) -> None:
        """Detokenises the tokens that have no text yet."""
        self._pieces.append(text.push(self.token_ids[self._num_decoded :]))
        self._num_decoded = len(self.token_ids)
        if self.finish_reason is not None:
            self._pieces.append(text.finish())
            self._text = None

    @property
    def _stop_reason(self) -> str | int | None:
        """The stop string that ended the output, or the id of the request's stop token that did."""
        stop_string = None if self._text is None else self._text.stop_string
        return self._stop_token_id if stop_string is None else stop_string

    def end(self, reason: FinishReason) -> None:
        """Ends the output, unless it has ended."""
        if self.finish_reason is None:
            self.add_output(EngineCoreOutput("", finish_reason=reason))

    def completion(self, index: int, token_text: TokenText | None, *, delta: bool) -> CompletionOutput:
        """Returns the output so far as choice ``index``, or only its new part. Has log-probabilities if ``token_text``
        is given.
        """
        if self._text is not None and not self._text.may_stop:
            self._decode(self._text)
        start = self._num_told if delta else 0
        token_ids, logprobs, text = self.token_ids[start:], self.logprobs[start:], "".join(self._pieces)
        self._pieces = [] if delta else [text]
        self._num_told, self._end_told = len(self.token_ids), self.finish_reason is not None
        known = self.logprobs
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if token_text is None else _by_position(token_ids, logprobs, token_text),
            cumulative_logprob=sum(each.logprob for each in known) if known or token_text else None,
            score=self.score,
        )


def _metrics(timings: Iterable[SequenceTimings]) -> RequestMetrics:
    """Returns the metrics of a request from the timings of its outputs, at least one."""
    each = list(timings)
    worst = max(each, key=lambda timing: timing.away_seconds)
    return RequestMetrics(
        arrival_time=min(timing.arrived for timing in each) * _SECONDS,
        first_scheduled_time=_first(timing.admitted for timing in each),
        first_token_time=_first(timing.first_token for timing in each),
        finished_time=max(timing.finished for timing in each) * _SECONDS if all(t.finished for t in each) else None,
        num_preemptions=worst.num_preemptions,
        away_seconds=worst.away_seconds,
    )


def _first(times: Iterable[int]) -> float | None:
    """Returns the earliest of these times, in seconds. 0 means that a time is not set."""
    return min((time * _SECONDS for time in times if time), default=None)


def _by_position(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_text: TokenText
) -> list[PositionLogprobs]:
    return [_at_position(*pair, token_text) for pair in zip(token_ids, logprobs, strict=True)]


def _at_position(token_id: int, logprobs: TokenLogprobs, token_text: TokenText) -> PositionLogprobs:
    ranks = {top_id: rank for rank, (top_id, _) in enumerate(logprobs.top, 1)}
    logprob_of = {token_id: logprobs.logprob} | dict(logprobs.top)
    return {each: Logprob(value, ranks.get(each), token_text(each)) for each, value in logprob_of.items()}
