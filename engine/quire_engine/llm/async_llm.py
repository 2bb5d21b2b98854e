"""``AsyncLLM``: the engine in a thread of this process, for programs with an event loop.

Each ``generate`` waits for news of its ``Stream``. Meanwhile a task prepares the prompt on another thread and sends the
request to the core's thread. The core's thread hands each step's outputs to the event loop, which assembles the outputs
of each request.
"""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from uuid import uuid4

from quire_proto.errors import ErrorCode, QuireError, internal, invalid
from quire_proto.pooling import PoolingParams, Task

from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCoreOutputs, Shutdown
from quire_engine.core.executor import ExecutorError
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput, TokenColumns
from quire_engine.llm.arguments import Message, Prompt, read_conversations, read_prompts
from quire_engine.llm.llm import LLM, Processor
from quire_engine.llm.offline_engine import OPEN, OfflineEngine
from quire_engine.llm.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingProcessor,
    PoolingPrompt,
    PoolingRequestOutput,
    PreparedPooling,
    classification_output,
    embedding_output,
    read_params,
)
from quire_engine.llm.processor import OutputProcessor, PreparedRequest
from quire_engine.llm.types import RequestOutput, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PreparedT = TypeVar("PreparedT", PreparedRequest, PreparedPooling)
ResultT = TypeVar("ResultT", RequestOutput, PoolingRequestOutput)
MAX_COMPLETING = 4
"""Requests whose grammars are compiled, or whose adapters are read, at the same time."""


class AsyncLLM:
    """A model, loaded and checked like ``LLM``, with concurrent requests: each joins the batch of the next step. Use it
    from one event loop at a time. Creating one takes as long as loading the model.
    """

    __signature__ = LLM.__signature__

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
        self._core = self._engine.core
        self._preparing = ThreadPoolExecutor(1, "prompts")  # one thread: seeds are drawn in the order of the calls
        # A request that takes seconds here delays only other requests that need this too.
        self._completing = ThreadPoolExecutor(MAX_COMPLETING, "grammars-and-adapters")
        # Streams by the program's ids and, once the core has the request, by the engine's ids. So outputs of an
        # abandoned request never reach a later request with the same name.
        self._named: dict[str, Stream[Any, Any]] = {}
        self._streams: dict[str, Stream[Any, Any]] = {}
        self._loop: AbstractEventLoop | None = None
        self._ended: QuireError | None = None
        self._closing = Lock()
        self._thread = Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        OPEN.add(self)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Loads the model that an ``AsyncEngineArgs`` describes."""
        return cls(**asdict(engine_args))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues ``prompt``, a text or token ids. Yields the outputs so far whenever there is more, and finally the
        ``finished`` ones. The ``output_kind`` of ``sampling_params`` may select only new parts, or only the final
        outputs. With ``best_of`` or beams only the final ones are yielded. A slow consumer gets fewer, longer ones. The
        default ``sampling_params`` are those that the model recommends, as in ``LLM``. ``aclose``, cancellation and
        garbage collection of the generator abort the request.

        Raises ``QuireError``: INVALID for an invalid request or a ``request_id`` that is running, UNAVAILABLE after
        ``close``, and the request's own error if it fails.
        """
        (read,) = read_prompts([prompt])
        prepare = partial(self._engine.requests.from_prompt, lora=lora_request)
        return self._generate(
            partial(prepare, read, sampling_params or self._engine.default_params, priority), request_id
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation like ``LLM.chat``; otherwise like ``generate``."""
        (read,) = read_conversations(
            [messages], tools, chat_template_kwargs, add_generation_prompt=add_generation_prompt
        )
        prepare = partial(self._engine.requests.from_messages, lora=lora_request)
        return self._generate(
            partial(prepare, read, sampling_params or self._engine.default_params, priority), request_id
        )

    async def embed(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Returns the embedding of ``prompt``, a text or token ids, from an embedding model. Use ``asyncio.gather`` to
        run several at once. Cancellation aborts the request. Raises ``QuireError`` like ``generate``.
        """
        pooled = self._pool(prompt, read_params(pooling_params, Task.EMBED), request_id, lora_request)
        async with aclosing(pooled) as outputs:
            return embedding_output(await anext(outputs))

    async def classify(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> ClassificationRequestOutput:
        """Returns the scores of ``prompt``, which may be a pair of texts, from a classifier. Otherwise like
        ``embed``.
        """
        pooled = self._pool(prompt, read_params(pooling_params, Task.CLASSIFY), request_id, lora_request)
        async with aclosing(pooled) as outputs:
            return classification_output(await anext(outputs))

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """See ``LLM.get_tokenizer``. Reads files."""
        self._check_usable()
        return self._engine.load_transformers_tokenizer()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests with the finish reason ``abort``. Ignores requests that are not running."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._named.get(each)) is not None:
                stream.abort()
                if stream.key is not None:
                    self._core.send(AbortRequest(stream.key))

    def close(self) -> None:
        """Frees the model's memory after the current step. Running and later requests raise ``QuireError`` UNAVAILABLE.
        Thread-safe.
        """
        with self._closing:
            if self not in OPEN:
                return
            OPEN.discard(self)
            self._end(QuireError(ErrorCode.UNAVAILABLE, "This AsyncLLM was closed."))
            self._core.send(Shutdown())
            self._thread.join()
            self._preparing.shutdown(cancel_futures=True)
            self._completing.shutdown(cancel_futures=True)
            self._engine.close()

    def shutdown(self) -> None:
        """Like ``close``. This is vLLM's name."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _generate(
        self, prepare: Callable[[], PreparedRequest], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._stream(prepare, partial(OutputProcessor, tokenizer=self._engine.tokenizer), request_id)

    def _pool(
        self, prompt: PoolingPrompt, params: PoolingParams, request_id: str | None, lora: LoRARequest | None
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        requests = self._engine.requests
        read: Sequence[PoolingPrompt] = [prompt] if isinstance(prompt, tuple) else read_prompts([prompt])

        def prepare() -> PreparedPooling:
            (encoded,) = requests.encode_pooled(read)
            return requests.pooled(encoded, params, lora)

        return self._stream(prepare, PoolingProcessor, request_id)

    async def _stream(
        self,
        prepare: Callable[[], PreparedT],
        process: Callable[[PreparedT], Processor[PreparedT, ResultT]],
        request_id: str | None,
    ) -> AsyncGenerator[ResultT, None]:
        self._check_usable()
        loop, name = asyncio.get_running_loop(), request_id or str(uuid4())
        if self._loop is not loop:
            self._change_loop(loop)
        if name in self._named:
            raise invalid("request_id", f"A request {name} is running.")
        self._named[name] = stream = Stream[PreparedT, ResultT]()
        starting = loop.create_task(self._start(stream, prepare, process))
        try:
            self._check_usable()  # again: a ``close`` in between may have missed the stream
            while not stream.is_finished:
                yield replace(await stream.next_output(), request_id=name)
        finally:
            starting.cancel()
            if self._named.get(name) is stream:
                del self._named[name]
                if stream.key is not None:
                    del self._streams[stream.key]
                    if not stream.is_finished:
                        self._core.send(AbortRequest(stream.key))

    async def _start(
        self,
        stream: "Stream[PreparedT, ResultT]",
        prepare: Callable[[], PreparedT],
        process: Callable[[PreparedT], Processor[PreparedT, ResultT]],
    ) -> None:
        """Prepares the request and sends it to the core, unless it was aborted meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(self._preparing, prepare)
            stream.begin(process(prepared))
            if isinstance(prepared, PreparedRequest) and not (stream.is_aborted or prepared.is_complete):
                prepared = await loop.run_in_executor(self._completing, self._engine.requests.complete, prepared)
            if not stream.is_aborted:
                stream.key = prepared.request.request_id
                self._streams[stream.key] = stream
                self._core.send(AddRequest(prepared.request))
        except Exception as error:  # noqa: BLE001 - ``generate`` raises it
            stream.fail(self._ended or error)

    def _change_loop(self, loop: AbstractEventLoop) -> None:
        """Switches to requests of ``loop`` only. Aborts requests of a closed loop, which cannot end by themselves.
        Raises ``QuireError`` while requests of another open loop run.
        """
        if self._named and self._loop is not None and not self._loop.is_closed():
            raise invalid("prompt", "Requests of another event loop are running.")
        self._loop = loop
        for key in self._streams:
            self._core.send(AbortRequest(key))
        self._streams.clear()
        self._named.clear()

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _run(self) -> None:
        try:
            self._core.run()
        except BaseException as error:
            self._end(QuireError(ErrorCode.INTERNAL, str(error)) if isinstance(error, ExecutorError) else internal())
            raise

    def _publish(self, step: EngineCoreOutputs) -> None:
        """Hands a step's outputs to the event loop. Runs on the core's thread."""
        if (step.outputs or step.tokens.token_ids) and self._loop is not None:
            with suppress(RuntimeError):  # a closed loop has no requests any more
                self._loop.call_soon_threadsafe(self._on_outputs, step.outputs, step.tokens)

    def _on_outputs(self, outputs: Sequence[EngineCoreOutput], tokens: TokenColumns) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.add_output(output):
                self._core.send(AbortRequest(output.request_id, (output.index,)))
        for request_id, index, token_id in zip(tokens.request_ids, tokens.indexes, tokens.token_ids, strict=True):
            stream = self._streams.get(request_id)
            if stream is not None and stream.add_token(index, token_id):
                self._core.send(AbortRequest(request_id, (index,)))

    def _end(self, error: QuireError) -> None:
        """Lets all current and later requests raise ``error``. Thread-safe."""
        self._ended = self._ended or error
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_all, self._ended)

    def _fail_all(self, error: QuireError) -> None:
        for stream in self._named.values():
            stream.fail(error)


class Stream(Generic[PreparedT, ResultT]):
    """The outputs of one request, which accumulate until they are read. ``key`` is the engine's id of the request, once
    the core has it.
    """

    def __init__(self) -> None:
        self._outputs: Processor[PreparedT, ResultT] | None = None
        self._only_last = False
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self.key: str | None = None
        self.is_aborted = False
        self.is_finished = False  # and the consumer knows

    def begin(self, outputs: Processor[PreparedT, ResultT]) -> None:
        """Sets the processor of the outputs, after the prompt was prepared. Ends the request if it was aborted
        meanwhile.
        """
        prepared, params = outputs.prepared, outputs.prepared.request.sampling
        is_final = isinstance(prepared, PreparedRequest) and prepared.params.output_kind is RequestOutputKind.FINAL_ONLY
        self._outputs, self._only_last = outputs, is_final or params.beam_width > 0 or params.best_of > params.n
        if self.is_aborted:
            self.abort()

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Adds an output. Returns whether the engine has to abort the choice, because of a stop string."""
        stopped = self._processor.add_output(output)
        if self._processor.is_finished or not self._only_last:
            self._news.set()
        return stopped

    def add_token(self, index: int, token_id: int) -> bool:
        """Adds a token of choice ``index`` that came alone; otherwise like ``add_output``."""
        stopped = self._processor.add_token(index, token_id)
        if not self._only_last or (stopped and self._processor.is_finished):
            self._news.set()
        return stopped

    def abort(self) -> None:
        """Ends the unfinished outputs, now or as soon as the prompt is prepared."""
        self.is_aborted = True
        if self._outputs is not None:
            self._outputs.abort()
            self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with ``error``."""
        self._failure = error
        self._news.set()

    async def next_output(self) -> ResultT:
        """Waits until there is more than before, and returns it. Raises the request's error."""
        await self._news.wait()
        self._news.clear()
        if self._failure is not None and (self._outputs is None or not self._outputs.is_finished):
            raise self._failure
        if self._processor.error is not None:
            self.is_finished = True
            raise self._processor.error
        self.is_finished = self._processor.is_finished
        return self._processor.result()

    @property
    def _processor(self) -> Processor[PreparedT, ResultT]:
        assert self._outputs is not None, "the request has not begun"
        return self._outputs
