"""``LLM``, the offline API: loads one model into this process and runs its engine in the caller's thread.

``LLM.generate`` prepares all requests and passes them to an ``OfflineRun``. That adds them to the scheduler, steps the
engine until all have finished, and collects their outputs. ``defer_sigint`` delays Ctrl-C to the end of a step, and
``Progress`` shows a bar.
"""

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import PoolingParams, Task
from tqdm import tqdm  # type: ignore[import-untyped]

from quire_engine.config import EngineArgs
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.llm.arguments import (
    Message,
    Prompt,
    broadcast,
    read_conversations,
    read_prompts,
    with_prompt_index,
)
from quire_engine.llm.offline_engine import LLM_SETTINGS, OPEN, OfflineEngine
from quire_engine.llm.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingProcessor,
    PoolingPrompt,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
    pair_output,
    read_pairs,
    read_params,
    scored_output,
)
from quire_engine.llm.processor import OutputProcessor, PreparedRequest
from quire_engine.llm.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_LOOKAHEAD = 4  # waiting requests per running one: enough to choose from under any policy
T = TypeVar("T")


class Prepared(Protocol):
    """A request that the scheduler accepts."""

    @property
    def request(self) -> Request: ...  # noqa: D102


class Result(Protocol):
    """The result of a request. It has an ``error`` if the request failed."""

    @property
    def error(self) -> QuireError | None: ...  # noqa: D102


PreparedT = TypeVar("PreparedT", bound=Prepared)
PreparedT_co = TypeVar("PreparedT_co", bound=Prepared, covariant=True)
ResultT = TypeVar("ResultT", bound=Result)
ResultT_co = TypeVar("ResultT_co", bound=Result, covariant=True)


class Processor(Protocol[PreparedT_co, ResultT_co]):
    """Builds the result of a request from its outputs as they arrive; see ``OutputProcessor``."""

    @property
    def prepared(self) -> PreparedT_co: ...  # noqa: D102

    @property
    def is_finished(self) -> bool: ...  # noqa: D102

    @property
    def error(self) -> QuireError | None: ...  # noqa: D102

    def add_output(self, output: EngineCoreOutput) -> bool: ...  # noqa: D102

    def add_token(self, index: int, token_id: int) -> bool: ...  # noqa: D102

    def abort(self) -> None: ...  # noqa: D102

    def result(self) -> ResultT_co: ...  # noqa: D102


Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None
LoRA = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """The model in the folder ``model``, with the engine's ``settings``: the fields of ``EngineArgs`` except those of
    ``ServedModel``, with the same defaults and ranges. ``quire-engine --help`` explains each.

    ``model`` may also be ``ORG/NAME`` or ``ORG/NAME@REVISION`` of the Hugging Face Hub, from its local cache. With
    ``allow_download``, missing files are downloaded. ``tokenizer`` is the folder or name of another model whose
    tokenizer is used. The settings are ``**settings: Any``, as in vLLM, and are checked when the ``LLM`` is created.
    Type checkers cannot read a ``TypedDict`` derived from ``EngineArgs``, and a hand-written one would repeat the name
    and type of every flag. ``help(LLM)``, IPython and notebooks show them all, with types and defaults, from
    ``__signature__``.

    ``seed`` seeds the random seeds of prompts without one: the same calls in the same order then give the same outputs.
    Raises ``QuireError`` INVALID for wrong settings, and ``ModelError`` or ``TokenizerLoadError``, with one sentence,
    for a folder that cannot be used. Thread-safe; calls wait for each other.
    """

    __signature__ = Signature(
        [
            Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Path),
            Parameter("tokenizer", Parameter.KEYWORD_ONLY, default=None, annotation=str | Path | None),
            Parameter("seed", Parameter.KEYWORD_ONLY, default=None, annotation=int | None),
            Parameter("allow_download", Parameter.KEYWORD_ONLY, default=False, annotation=bool),
            *map(EngineArgs.__signature__.parameters.__getitem__, LLM_SETTINGS),
        ]
    )

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        seed: int | None = None,
        allow_download: bool = False,
        **settings: Any,
    ) -> None:
        self._engine = OfflineEngine.load(
            model, settings, self._publish, tokenizer=tokenizer, seed=seed, allow_download=allow_download
        )
        self._core, self._requests = self._engine.core, self._engine.requests
        self._lock = Lock()
        self._current_run: OfflineRun[Any, Any] | None = None
        self._usable = True
        OPEN.add(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continues each of ``prompts``, and returns the outputs in their order. Pass a text, a list of token ids, or a
        list of these. ``sampling_params``, ``lora_request`` and ``priority`` are either one for all prompts or one for
        each. The default of ``sampling_params`` is ``get_default_sampling_params``.

        All prompts are checked before any is run; ``QuireError`` names the first invalid one. A request that fails
        while it runs does not end the others: its ``RequestOutput`` has the ``error``. Ctrl-C ends all of them between
        two steps, and the ``LLM`` can be used again. A second Ctrl-C does not wait for the end of the step; then the
        ``LLM`` cannot be used again.
        """
        prepare = self._requests.from_prompt
        return self._generate(
            read_prompts(prompts), prepare, sampling_params, priority, lora_request, use_tqdm=use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
        priority: Priority = None,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or each of a list, with the model's chat template; otherwise like ``generate``. A
        message has a ``role`` and a ``content``, which is a text or a list of text parts. It may have ``tool_calls``, a
        ``tool_call_id`` and ``reasoning_content`` as in the OpenAI API. The template gets ``tools``, in the form of
        that API, and the variables of ``chat_template_kwargs``. The model's output is not parsed. Without
        ``add_generation_prompt`` the prompt ends after the last message.
        """
        conversations = read_conversations(
            messages, tools, chat_template_kwargs, add_generation_prompt=add_generation_prompt
        )
        prepare = self._requests.from_messages
        return self._generate(conversations, prepare, sampling_params, priority, lora_request, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``max_tokens`` that
        the model's ``generation_config.json`` recommends, and defaults for the rest. It is a copy that you may change.
        """
        return replace(self._engine.default_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each of ``prompts``, in their order; otherwise like ``generate``. Raises
        ``QuireError`` INVALID if the model makes no embeddings.
        """
        params = read_params(pooling_params, Task.EMBED)
        return [*map(embedding_output, self._pool(read_prompts(prompts), params, lora_request, use_tqdm=use_tqdm))]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the scores of each prompt, from a classifier; otherwise like ``embed``."""
        params = read_params(pooling_params, Task.CLASSIFY)
        return [*map(classification_output, self._pool(read_prompts(prompts), params, lora_request, use_tqdm=use_tqdm))]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
    ) -> list[ScoringRequestOutput]:
        """Returns the score of one text with each of several, or of each text with the one at the same position. Uses a
        model that classifies pairs, or the cosine of embeddings. Otherwise like ``embed``.
        """
        pairs = read_pairs(text_1, text_2)
        if Task.EMBED not in self._core.scheduler.config.supported_tasks:
            params = read_params(pooling_params, Task.CLASSIFY)
            return [*map(scored_output, self._pool(pairs, params, lora_request, use_tqdm=use_tqdm))]
        texts = [*dict.fromkeys(text for pair in pairs for text in pair)]
        params = replace(read_params(pooling_params, Task.EMBED), use_activation=True)
        outputs = dict(zip(texts, self._pool(texts, params, lora_request, use_tqdm=use_tqdm), strict=True))
        return [pair_output(outputs[one], outputs[other]) for one, other in pairs]

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer in use, the model's own or the given one, as transformers loads it."""
        self._check_usable()
        return self._engine.load_transformers_tokenizer()

    def close(self) -> None:
        """Frees the model's memory. Later calls raise ``QuireError`` UNAVAILABLE."""
        with self._lock:
            if self in OPEN:
                OPEN.discard(self)
                self._usable = False
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[T],
        prepare: Callable[[T, SamplingParams, int, LoRARequest | None], PreparedRequest],
        params: Params,
        priority: Priority,
        lora_request: LoRA,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self._check_usable()
        each_params = broadcast("sampling_params", params, self._engine.default_params, len(prompts))
        each_priority = broadcast("priority", priority, 0, len(prompts))
        each_lora = broadcast("lora_request", lora_request, None, len(prompts))
        prepared = []
        for index, arguments in enumerate(zip(prompts, each_params, each_priority, each_lora, strict=True)):
            try:
                prepared.append(self._requests.complete(prepare(*arguments)))
            except QuireError as error:
                raise with_prompt_index(index, len(prompts), error) from None
        return self._run(prepared, partial(OutputProcessor, tokenizer=self._engine.tokenizer), use_tqdm)

    def _pool(
        self,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams,
        lora_request: LoRA,
        *,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput]:
        self._check_usable()
        prepared = []
        each_lora = broadcast("lora_request", lora_request, None, len(prompts))
        for index, (prompt, lora) in enumerate(zip(self._requests.encode_pooled(prompts), each_lora, strict=True)):
            try:
                prepared.append(self._requests.pooled(prompt, params, lora))
            except QuireError as error:
                raise with_prompt_index(index, len(prompts), error) from None
        return self._run(prepared, PoolingProcessor, use_tqdm)

    def _run(
        self,
        requests: Sequence[PreparedT],
        process: Callable[[PreparedT], Processor[PreparedT, ResultT]],
        use_tqdm: bool,
    ) -> list[ResultT]:
        with self._lock, Progress(len(requests), shown=use_tqdm) as progress, defer_sigint() as release:
            self._check_usable()  # again: a call that held the lock may have closed or broken the engine
            self._current_run = run = OfflineRun(requests, self._core, process, progress)
            try:
                results = run.run(release)
            finally:
                self._current_run = None
                self._usable = not run.broken
        _log_failures(results)
        return results

    def _check_usable(self) -> None:
        if not self._usable:
            raise QuireError(ErrorCode.UNAVAILABLE, "This LLM was closed, or has failed in the middle of a step.")

    def _publish(self, step: EngineCoreOutputs) -> None:
        if self._current_run is not None:
            self._current_run.on_step(step)


def _log_failures(results: Sequence[Result]) -> None:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        log.warning("%d of %d prompts failed, the first one with: %s", len(failed), len(results), failed[0])


class OfflineRun(Generic[PreparedT, ResultT]):
    """Runs ``requests`` on ``core``, which must publish its steps to ``on_step``. The scheduler has a limited number of
    requests at a time, so that memory does not grow with their total number. ``process`` creates the processor that
    builds a request's result. ``broken`` is set if a step did not complete: then the core cannot be used any more.
    """

    def __init__(
        self,
        requests: Sequence[PreparedT],
        core: EngineCore,
        process: Callable[[PreparedT], Processor[PreparedT, ResultT]],
        progress: "Progress",
    ) -> None:
        self.broken = False
        self._core = core
        self._scheduler = core.scheduler
        self._process = process
        self._progress = progress
        self._pending = deque(self._in_order(requests))
        self._live: dict[str, tuple[int, Processor[PreparedT, ResultT]]] = {}
        self._to_abort: list[tuple[str, int]] = []
        self._results: dict[int, ResultT] = {}
        self._finished_prompt_tokens = 0
        limits = self._scheduler.config
        self._window = min(limits.max_waiting, _LOOKAHEAD * limits.max_num_seqs)

    def run(self, between_steps: Callable[[], None]) -> list[ResultT]:
        """Returns the results in the order of the requests. Calls ``between_steps`` before each step; if that raises,
        running requests are aborted. The core is idle afterwards, unless it is broken.
        """
        try:
            while self._pending or self._live:
                between_steps()
                self._feed()
                self._step()
        finally:
            if not self.broken:
                self._abort_all()
        return [self._results[index] for index in sorted(self._results)]

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Adds the outputs of a step. Choices that a stop string has ended are aborted after the step."""
        tokens, live = step.tokens, self._live
        num_finished, num_tokens = len(self._results), len(tokens.token_ids)
        prompt_tokens = self._finished_prompt_tokens
        for request_id, index, token_id in zip(tokens.request_ids, tokens.indexes, tokens.token_ids, strict=True):
            running = live.get(request_id)
            if running is not None and running[1].add_token(index, token_id):
                self._stop(request_id, index)
        for output in step.outputs:
            if output.request_id not in live:
                continue  # finished by a stop string in an earlier step
            num_tokens += len(output.token_ids)
            if live[output.request_id][1].add_output(output):
                self._stop(output.request_id, output.index)
            elif output.finish_reason is not None:
                self._finish(output.request_id)
        self._progress.add(
            prompts=len(self._results) - num_finished,
            prompt_tokens=self._finished_prompt_tokens - prompt_tokens,
            output_tokens=num_tokens,
        )

    def _stop(self, request_id: str, index: int) -> None:
        """Ends a choice that a stop string has ended."""
        self._to_abort.append((request_id, index))
        self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        """Takes the result of a request if all its choices have ended."""
        index, processor = self._live[request_id]
        if processor.is_finished:
            self._results[index] = processor.result()
            del self._live[request_id]
            self._finished_prompt_tokens += len(processor.prepared.request.prompt_token_ids)

    def _feed(self) -> None:
        while self._pending and len(self._scheduler.waiting) < self._window:
            index, prepared = self._pending.popleft()
            self._scheduler.add_request(prepared.request)
            self._live[prepared.request.request_id] = index, self._process(prepared)

    def _step(self) -> None:
        self.broken = True
        self._core.step()
        self.broken = False
        for request_id, index in self._to_abort:
            self._scheduler.abort_request(request_id, (index,))
        self._to_abort.clear()

    def _abort_all(self) -> None:
        for request_id in self._live:
            self._scheduler.abort_request(request_id)
        self._live.clear()
        while self._scheduler.has_work:
            self._step()

    def _in_order(self, requests: Sequence[PreparedT]) -> list[tuple[int, PreparedT]]:
        """Returns the requests with their indexes, sorted by priority under that policy, because not all are in the
        scheduler at once.
        """
        numbered = list(enumerate(requests))
        if self._scheduler.config.scheduling_policy == "priority":
            numbered.sort(key=lambda each: each[1].request.priority)
        return numbered


@contextmanager
def defer_sigint() -> Iterator[Callable[[], None]]:
    """Defers SIGINT, so that it interrupts no step, until the yielded function is called or the context ends without an
    exception. Then the previous handler is called. A second SIGINT is not deferred, because a step could hang. Does
    nothing outside of the main thread, which alone gets signals.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    deferred: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        deferred.append(frame)
        if len(deferred) > 1:
            previous(number, frame)

    def release() -> None:
        if deferred:
            previous(signal.SIGINT, deferred.pop())

    signal.signal(signal.SIGINT, defer)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, previous)
    release()


class Progress:
    """A progress bar on standard error: prompts done, and tokens per second. Hidden unless ``shown``."""

    def __init__(self, prompts: int, *, shown: bool) -> None:
        self._bar = tqdm(
            total=prompts, desc="Prompts", unit="prompt", miniters=0, dynamic_ncols=True, disable=not shown
        )
        self._started = perf_counter()
        self._prompt_tokens = self._output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, *, prompts: int, prompt_tokens: int, output_tokens: int) -> None:
        """Adds the prompts that one step has finished, their tokens, and the output tokens of the step."""
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        seconds = max(perf_counter() - self._started, 1e-9)
        rates = f"prompt {self._prompt_tokens / seconds:.0f} tok/s, output {self._output_tokens / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(prompts)
