"""``LLM``: one model in this process. Loads it, checks what it is asked, and runs it in the caller's thread."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom
from threading import Lock
from types import TracebackType
from typing import Self, TypeVar, Unpack

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.text.model_text import ModelTokenizer

from quire_engine.assembly import load_executor, make_grammar_compiler, make_scheduler
from quire_engine.core import EngineCore, EngineCoreOutputs
from quire_engine.llm.batch import OfflineRun
from quire_engine.llm.interrupt import defer_sigint
from quire_engine.llm.outputs import RequestOutput
from quire_engine.llm.params import SamplingParams
from quire_engine.llm.progress import Progress
from quire_engine.llm.prompts import Message, Prompt, broadcast, read_conversations, read_prompts, with_prompt_index
from quire_engine.llm.settings import LLMArgs, engine_config
from quire_engine.llm.submission import InputProcessor, PreparedRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None


class LLM:
    """The model in the folder ``model``, with the engine's ``settings``.

    ``seed`` makes the seeds of prompts that have none: the same calls in the same order then give the same outputs.
    Raises ``QuireError`` INVALID for wrong settings, and ``ModelError`` or ``TokenizerLoadError``, with one sentence,
    for a folder that cannot be used. May be called from any thread; calls wait for each other.
    """

    def __init__(self, model: str | Path, *, seed: int | None = None, **settings: Unpack[LLMArgs]) -> None:
        config = engine_config(model, settings)
        self._text = ModelTokenizer.load(config.model)
        self._executor = load_executor(config)
        scheduler = make_scheduler(config, self._executor)
        self._core = EngineCore(scheduler, self._executor, self._publish)
        random = SystemRandom() if seed is None else Random(seed)  # noqa: S311 - it draws tokens, not keys
        self._grammars = make_grammar_compiler(config, self._executor)
        self._requests = InputProcessor(self._text, scheduler, lambda: random.getrandbits(64), self._grammars)
        self._lock = Lock()
        self._current_run: OfflineRun | None = None
        self._usable = True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continues each of ``prompts``, in their order: a text, a list of token ids, or a list of those. ``params``
        and ``priority`` are one for all prompts, or one for each.

        All prompts are checked before any is run; ``QuireError`` names the first that is wrong. A request that fails
        while it runs does not end the others: its ``RequestOutput`` has the ``error``. Ctrl-C ends all of them between
        two steps, and the ``LLM`` can be used again; a second Ctrl-C does not wait for the step to end, and it cannot.
        """
        return self._generate(read_prompts(prompts), self._continuation, params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or each of a list, by the model's chat template; otherwise as ``generate``. A
        message has a ``role`` and a ``content``, which is a text or a list of text parts.
        """
        return self._generate(read_conversations(messages), self._requests.from_messages, params, priority, use_tqdm)

    def close(self) -> None:
        """Gives the model's memory back. Nothing can be run any more."""
        with self._lock:
            self._usable = False
            self._grammars.close()
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[T],
        build: Callable[[T, SamplingParams, int], PreparedRequest],
        params: Params,
        priority: Priority,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self._check_usable()
        each_params = broadcast("params", params, SamplingParams(), len(prompts))
        each_priority = broadcast("priority", priority, 0, len(prompts))
        submissions = []
        for index, asked in enumerate(zip(prompts, each_params, each_priority, strict=True)):
            try:
                submissions.append(build(*asked))
            except QuireError as error:
                raise with_prompt_index(index, len(prompts), error) from None
        return self._run(submissions, use_tqdm)

    def _continuation(self, prompt: str | list[int], params: SamplingParams, priority: int) -> PreparedRequest:
        if isinstance(prompt, str):
            return self._requests.from_text(prompt, params, priority)
        return self._requests.from_tokens(prompt, params, priority)

    def _run(self, submissions: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with self._lock, Progress(len(submissions), shown=use_tqdm) as progress, defer_sigint() as release:
            self._check_usable()  # again: a call that this one has waited for may have changed it
            self._current_run = batch = OfflineRun(submissions, self._core, self._text, progress)
            try:
                results = batch.run(release)
            finally:
                self._current_run = None
                self._usable = not batch.broken
        _log_failures(results)
        return results

    def _check_usable(self) -> None:
        if not self._usable:
            raise QuireError(ErrorCode.UNAVAILABLE, "This LLM was closed, or has failed in the middle of a step.")

    def _publish(self, step: EngineCoreOutputs) -> None:
        if self._current_run is not None:
            self._current_run.on_step(step)


def _log_failures(results: Sequence[RequestOutput]) -> None:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        log.warning("%d of %d prompts failed, the first one with: %s", len(failed), len(results), failed[0])
