"""``AsyncLLM``: the engine in a thread of this process, for programs with an event loop.

Each ``generate`` gives the core's thread a request and waits for news of its ``Stream``; the core's thread hands what a
step made to the event loop, where a request's outputs are put together.
"""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

from quire_proto.errors import ErrorCode, QuireError, internal, invalid

from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCoreOutputs, Shutdown
from quire_engine.core.executor import ExecutorError
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.llm.llm import LLM
from quire_engine.llm.offline_engine import OPEN, OfflineEngine
from quire_engine.llm.processor import (
    Message,
    OutputProcessor,
    PreparedRequest,
    Prompt,
    read_conversations,
    read_prompts,
)
from quire_engine.llm.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


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
        # By the engine's ids, and these by the program's: what a step makes for a request that was left is never taken
        # for that of the next one with its name.
        self._streams: dict[str, Stream] = {}
        self._keys: dict[str, str] = {}
        self._loop: AbstractEventLoop | None = None
        self._ended: QuireError | None = None
        self._closing = Lock()
        self._thread = Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        OPEN.add(self)

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
        and at last the ``finished`` ones. With ``best_of`` or beams only the last is yielded. A consumer that is slow
        gets fewer, longer ones. ``aclose``, cancellation and the end of the generator's life abort the request.

        Raises ``QuireError``: INVALID for what is wrong with the request, or a ``request_id`` that is running; the
        error of a request that fails; and UNAVAILABLE once closed.
        """
        (read,) = read_prompts([prompt])
        prepare = partial(self._engine.requests.from_prompt, lora=lora_request)
        return self._stream(read, prepare, sampling_params, request_id, priority)

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
        return self._stream(read, prepare, sampling_params, request_id, priority)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """See ``LLM.get_tokenizer``. Reads files."""
        self._check_usable()
        return self._engine.load_transformers_tokenizer()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests with the finish reason ``abort``. Those that do not run are left out."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if (key := self._keys.get(each)) is not None:
                self._streams[key].abort()
                self._core.send(AbortRequest(key))

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
            self._engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(
        self,
        prompt: T,
        prepare: Callable[[T, SamplingParams, int], PreparedRequest],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_usable()
        loop, name = asyncio.get_running_loop(), request_id or str(uuid4())
        prepared = await loop.run_in_executor(self._preparing, prepare, prompt, params or SamplingParams(), priority)
        self._check_usable()
        if self._loop is not loop:
            self._change_loop(loop)
        if name in self._keys:
            raise invalid("request_id", f"A request {name} is running.")
        self._keys[name] = key = prepared.request.request_id
        self._streams[key] = stream = Stream(OutputProcessor(prepared, self._engine.tokenizer))
        try:
            self._core.send(AddRequest(prepared.request))
            while not stream.is_finished:
                yield replace(await stream.next_output(), request_id=name)
        finally:
            if self._streams.pop(key, None) is not None:
                del self._keys[name]
                if not stream.is_finished:
                    self._core.send(AbortRequest(key))

    def _change_loop(self, loop: AbstractEventLoop) -> None:
        """Has the requests of ``loop`` alone run from now on. Those of one that was closed can have no end of their
        own, and are aborted. Raises ``QuireError`` while others run.
        """
        if self._streams and self._loop is not None and not self._loop.is_closed():
            raise invalid("prompt", "Requests of another event loop are running.")
        self._loop = loop
        for key in self._streams:
            self._core.send(AbortRequest(key))
        self._streams.clear()
        self._keys.clear()

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
        for stream in self._streams.values():
            stream.fail(error)


class Stream:
    """The outputs of one request, which grow while nobody looks."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        params = processor.prepared.request.sampling
        self._only_last = params.beam_width > 0 or params.best_of > params.n
        self._news = asyncio.Event()
        self._failure: QuireError | None = None
        self.is_finished = False  # and was told so

    def add_output(self, output: EngineCoreOutput) -> bool:
        """Returns whether the engine has to abort the choice, because of a stop string."""
        stopped = self._processor.add_output(output)
        if self._processor.is_finished or not self._only_last:
            self._news.set()
        return stopped

    def abort(self) -> None:
        """Ends the outputs that have not ended."""
        self._processor.abort()
        self._news.set()

    def fail(self, error: QuireError) -> None:
        """The request does not go on."""
        self._failure = error
        self._news.set()

    async def next_output(self) -> RequestOutput:
        """Waits until there is more than before. Raises ``QuireError``."""
        await self._news.wait()
        self._news.clear()
        if self._failure is not None and not self._processor.is_finished:
            raise self._failure
        if self._processor.error is not None:
            self.is_finished = True
            raise self._processor.error
        self.is_finished = self._processor.is_finished
        return self._processor.result()
