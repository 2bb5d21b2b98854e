"""``AsyncLLM``: the engine in a thread of this process, for programs with an event loop.

Each ``generate`` waits for news of its ``Stream``, while a task has the prompt prepared on another thread and gives the
request to the core's thread. That hands what a step made to the event loop, where a request's outputs are put together.
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
from quire_engine.core.outputs import EngineCoreOutput
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
"""Requests whose grammars are compiled, or whose adapters are read, at once."""


class AsyncLLM:
    """A model, loaded and checked as by ``LLM``, whose requests run beside each other: each joins the batch of the next
    step. Used from one event loop at a time; making one takes as long as loading the model.
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
        # What may take seconds for one request is in no other one's way, but for those that wait for such too.
        self._completing = ThreadPoolExecutor(MAX_COMPLETING, "grammars-and-adapters")
        # By the program's ids, and those that the core has by the engine's: what a step makes for a request that was
        # left is never taken for that of the next one with its name.
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
        """The model that an ``AsyncEngineArgs`` describes."""
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
        """Continues ``prompt``, a text or token ids: yields all that is known of the outputs whenever there is more,
        and at last the ``finished`` ones; or what is new, or only the last, as the ``output_kind`` of
        ``sampling_params`` says. With ``best_of`` or beams only the last is yielded. A consumer that is slow gets
        fewer, longer ones. Without ``sampling_params`` they are those that the model recommends, as with ``LLM``.
        ``aclose``, cancellation and the end of the generator's life abort the request.

        Raises ``QuireError``: INVALID for what is wrong with the request, or a ``request_id`` that is running; the
        error of a request that fails; and UNAVAILABLE once closed.
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
        """Answers a conversation as ``LLM.chat``; otherwise as ``generate``."""
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
        """Returns the embedding of ``prompt``, a text or token ids, of a model that makes them; several run beside each
        other as coroutines of ``asyncio.gather``. Cancellation aborts the request. Raises ``QuireError`` as
        ``generate`` does.
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
        """As ``embed``, of a model that classifies: the scores of ``prompt``, which may be a pair of texts."""
        pooled = self._pool(prompt, read_params(pooling_params, Task.CLASSIFY), request_id, lora_request)
        async with aclosing(pooled) as outputs:
            return classification_output(await anext(outputs))

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """See ``LLM.get_tokenizer``. Reads files."""
        self._check_usable()
        return self._engine.load_transformers_tokenizer()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests with the finish reason ``abort``. Those that do not run are left out."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._named.get(each)) is not None:
                stream.abort()
                if stream.key is not None:
                    self._core.send(AbortRequest(stream.key))

    def close(self) -> None:
        """Frees the model's memory when the step that runs has ended. Running requests raise ``QuireError``
        UNAVAILABLE, as do later ones. May be called from any thread.
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
        """As ``close``, which is the name of it in ``LLM``; this one is vLLM's."""
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
            self._check_usable()  # again: who has closed this meanwhile may not have seen the stream
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
        """Has the request prepared, and gives it to the core unless it was aborted meanwhile."""
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
        """Has the requests of ``loop`` alone run from now on. Those of one that was closed can have no end of their
        own, and are aborted. Raises ``QuireError`` while others run.
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
        """Runs on the core's thread."""
        if step.outputs and self._loop is not None:
            with suppress(RuntimeError):  # a loop that was closed has no requests any more
                self._loop.call_soon_threadsafe(self._on_outputs, step.outputs)

    def _on_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.add_output(output):
                self._core.send(AbortRequest(output.request_id, (output.index,)))

    def _end(self, error: QuireError) -> None:
        """Has all requests raise ``error``, and those that come. Runs on any thread."""
        self._ended = self._ended or error
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_all, self._ended)

    def _fail_all(self, error: QuireError) -> None:
        for stream in self._named.values():
            stream.fail(error)


class Stream(Generic[PreparedT, ResultT]):
    """The outputs of one request, which grow while nobody looks, once it has begun. ``key`` is the engine's id of it,
    from when the core has it.
    """

    def __init__(self) -> None:
        self._outputs: Processor[PreparedT, ResultT] | None = None
        self._only_last = False
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self.key: str | None = None
        self.is_aborted = False
        self.is_finished = False  # and was told so

    def begin(self, outputs: Processor[PreparedT, ResultT]) -> None:
        """The prompt is prepared. What was aborted meanwhile ends."""
        prepared, params = outputs.prepared, outputs.prepared.request.sampling
        is_final = isinstance(prepared, PreparedRequest) and prepared.params.output_kind is RequestOutputKind.FINAL_ONLY
        self._outputs, self._only_last = outputs, is_final or params.beam_width > 0 or params.best_of > params.n
        if self.is_aborted:
            self.abort()

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Returns whether the engine has to abort the choice, because of a stop string."""
        stopped = self._processor.add_output(output)
        if self._processor.is_finished or not self._only_last:
            self._news.set()
        return stopped

    def abort(self) -> None:
        """Ends the outputs that have not ended, or will do so as soon as the prompt is prepared."""
        self.is_aborted = True
        if self._outputs is not None:
            self._outputs.abort()
            self._news.set()

    def fail(self, error: Exception) -> None:
        """The request does not go on."""
        self._failure = error
        self._news.set()

    async def next_output(self) -> ResultT:
        """Waits until there is more than before. Raises what the request fails with."""
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
