"""Prompts that are pooled, as both APIs have them: the generations of a request for embeddings or scores
(``pooled_requests``), and what becomes of their answers (``collect``, ``scores_of``).

A model that classifies scores a query and a document as one prompt. One that makes embeddings scores them by the cosine
of theirs, as in vLLM: each text is embedded once, in however many pairs it is.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from quire_proto.context_length import check_pooled_length
from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.hashing import TOKEN_BYTES
from quire_proto.pooling import PoolingParams, Task, check_dimensions
from quire_proto.text.pooled_prompt import PROMPTS, PooledPrompt, Texts
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.multi_prompt import total_usage
from quire_router.api.request_limits import MAX_VALUES
from quire_router.api.schemas.pooling import EmbeddingRequest, PoolingBody, ScoringBody
from quire_router.core.errors import RefusalReason, model_not_ready, request_cancelled
from quire_router.core.generation import Delta, GenerationRequest, Usage, prompt_request_id
from quire_router.engines.settings import ServedModelLimits

_VECTORS_PER_TURN = 64
PROMPTS_AT_ONCE = 128  # of one request
MAX_TOKENS = 2**21
"""Of all prompts of one request: a query counts in each of its pairs, so that a short body can stand for many."""
_A_MINUTE = (RefusalReason.REQUESTS_PER_MINUTE, RefusalReason.TOKENS_PER_MINUTE)
_UNSUPPORTED = {
    Task.GENERATE: "The model {} makes no text, only {}.",
    Task.EMBED: "The model {} makes no embeddings; its engine would with --convert embed.",
    Task.CLASSIFY: "The model {} scores no texts.",
}
_OUTPUTS = {Task.GENERATE: "text", Task.EMBED: "embeddings", Task.CLASSIFY: "scores"}


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """One generation for each prompt of a request, at least one. ``pairs`` are the indexes of the two embeddings of
    each pair of texts that is scored by them; None where each prompt is an answer of its own. ``ignored`` are the
    parameters that change nothing.
    """

    generations: tuple[GenerationRequest, ...]
    pairs: Sequence[tuple[int, int]] | None = None
    ignored: tuple[str, ...] = ()

    @property
    def first(self) -> GenerationRequest:
        """The generation of the first prompt."""
        return self.generations[0]

    @property
    def num_bytes(self) -> int:
        """The bytes that its prompts take, which may be many times those of its body."""
        return TOKEN_BYTES * sum(len(each.prompt_token_ids) for each in self.generations)


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """What each prompt was pooled to, as little-endian float32, and what all of them took."""

    pooled: Sequence[bytes]
    usage: Usage


def check_task(model: str, limits: ServedModelLimits, task: Task) -> None:
    """Raises ``QuireError`` INVALID for a task that the engines of the model do not have, as far as they are known."""
    if limits.supported_tasks is not None and task not in limits.supported_tasks:
        raise wrong_task(model, limits, task)


def wrong_task(model: str, limits: ServedModelLimits, task: Task) -> QuireError:
    """The error of a task that the engines of the model do not have."""
    outputs = " and ".join(_OUTPUTS[each] for each in limits.supported_tasks or ())
    return invalid("model", _UNSUPPORTED[task].format(model, outputs))


def pooled_requests(
    request: PoolingBody, template: GenerationRequest, tokenizer: ModelTokenizer, limits: ServedModelLimits
) -> PreparedPooling:
    """The generations of a request; each is ``template`` with a prompt. Raises ``QuireError``."""
    if isinstance(request, EmbeddingRequest):
        return _embeddings(request, template, tokenizer, limits)
    assert isinstance(request, ScoringBody), "a request for embeddings or for scores"
    return _scores(request, template, tokenizer, limits)


def _embeddings(
    request: EmbeddingRequest, template: GenerationRequest, tokenizer: ModelTokenizer, limits: ServedModelLimits
) -> PreparedPooling:
    check_task(template.model_name, limits, Task.EMBED)
    params = PoolingParams(Task.EMBED, request.dimensions, request.use_activation)
    if limits.pooled_size:
        check_dimensions(params.dimensions, limits.pooled_size, limits.matryoshka_dimensions)
        _check_size("input", len(request.input) * params.output_size(limits.pooled_size))
    cut = _cut(request, limits)
    names = [f"input[{number}]" if len(request.input) > 1 else "input" for number in range(len(request.input))]
    texts = [each for each in request.input if isinstance(each, str)]
    if len(texts) == len(request.input):
        before = tokenizer.prompts.text(request.prompt_name)
        with _naming_prompt(names):
            prompts = tokenizer.encode_pooled(
                [f"{before}{text}" for text in texts],
                limits.max_model_len,
                truncate=cut,
                add_special_tokens=request.add_special_tokens is not False,
                max_tokens=MAX_TOKENS,
            )
    elif request.prompt_name is not None:
        raise invalid("prompt_name", "prompt_name is put before texts, and input holds tokens.")
    else:
        prompts = [PooledPrompt(each[:cut]) for each in request.input if not isinstance(each, str)]
    return PreparedPooling(_generations(template, names, prompts, params, limits))


def _scores(
    request: ScoringBody, template: GenerationRequest, tokenizer: ModelTokenizer, limits: ServedModelLimits
) -> PreparedPooling:
    tasks, cut, pairs = limits.supported_tasks, _cut(request, limits), request.pairs
    if tasks is None:
        raise model_not_ready(template.model_name)
    if Task.EMBED in tasks:
        numbers: dict[str, int] = {}
        indexes = [
            (numbers.setdefault(one, len(numbers)), numbers.setdefault(other, len(numbers))) for one, other in pairs
        ]
        fields = dict[str, str]()
        for pair, places in zip(pairs, request.fields_of_pairs, strict=True):
            for text, place in zip(pair, places, strict=True):
                fields.setdefault(text, place)
        names = [fields[text] for text in numbers]
        before = tokenizer.prompts.text(None)
        texts: list[Texts] = [f"{before}{text}" for text in numbers]
        params = PoolingParams(Task.EMBED, use_activation=True)
    else:
        check_task(template.model_name, limits, Task.CLASSIFY)
        if limits.pooled_size > 1:
            message = f"The model {template.model_name} knows {limits.pooled_size} classes, and a score has one."
            raise invalid("model", message)
        indexes, texts = None, [*pairs]
        names = [place for _, place in request.fields_of_pairs]
        params = PoolingParams(Task.CLASSIFY, use_activation=request.use_activation)
    with _naming_prompt(names):
        prompts = tokenizer.encode_pooled(texts, limits.max_model_len, truncate=cut, max_tokens=MAX_TOKENS)
    return PreparedPooling(_generations(template, names, prompts, params, limits), indexes)


def _cut(request: PoolingBody, limits: ServedModelLimits) -> int | None:
    """To how many tokens a prompt is cut; None for a request whose long prompts are refused."""
    cut = request.truncate_prompt_tokens
    if cut == 0 or (cut is not None and cut > limits.max_model_len):
        message = f"truncate_prompt_tokens is {cut} and must be -1, or between 1 and {limits.max_model_len}."
        raise invalid("truncate_prompt_tokens", message)
    return limits.max_model_len if cut == -1 else cut


def _generations(
    template: GenerationRequest,
    names: Sequence[str],
    prompts: Sequence[PooledPrompt],
    params: PoolingParams,
    limits: ServedModelLimits,
) -> tuple[GenerationRequest, ...]:
    generations = []
    for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        ids = prompt.token_ids
        with _naming_prompt([name]):
            check_pooled_length(len(ids), limits.max_model_len)
        if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise invalid(name, f"{name} holds a token id outside of this model's vocabulary of {limits.vocab_size}.")
        own = replace(params, second_text_start=prompt.second_text_start)
        request_id = prompt_request_id(template.request_id, number) if number else template.request_id
        generations.append(replace(template, request_id=request_id, prompt_token_ids=array("i", ids), pooling=own))
    return tuple(generations)


@contextmanager
def _naming_prompt(names: Sequence[str]) -> Iterator[None]:
    """Lets errors about ``prompt``, ``prompt[1]`` and all ``PROMPTS`` name the fields that hold the prompts."""
    try:
        yield
    except QuireError as error:
        fields = {
            "prompt": names[0],
            PROMPTS: names[-1].partition("[")[0],
            **{f"prompt[{number}]": name for number, name in enumerate(names)},
        }
        raise error.about(fields.get(error.param or "prompt", error.param)) from None


def _check_size(param: str, values: int) -> None:
    if values > MAX_VALUES:
        message = f"The answer would hold {values} numbers, and at most {MAX_VALUES} are allowed: send fewer inputs."
        raise invalid(param, message)


PoolOne = Callable[[GenerationRequest, int], Coroutine[Any, Any, tuple[bytes, Usage]]]
"""Pools one prompt of a request, of which so many others hold slots; 0 for one that has the slot of the request itself.
Raises ``QuireError``.
"""


async def pool_all(generations: Sequence[GenerationRequest], pool_one: PoolOne) -> PooledAnswer:
    """Returns what all prompts of a request are pooled to. At most ``PROMPTS_AT_ONCE`` of them run or wait at a time,
    so that a long list does not fill the queue. If a limit refuses one while others of the list run, it comes again
    when one of these has ended: no list is refused for its own length. Raises the first error.
    """
    answers: dict[int, tuple[bytes, Usage]] = {}
    waiting, running = deque(range(len(generations))), dict[asyncio.Task[tuple[bytes, Usage]], int]()
    room, first = PROMPTS_AT_ONCE, -1
    try:
        while waiting or running:
            while waiting and len(running) < room:
                number = waiting.popleft()
                first, others = (first, len(running)) if first in running.values() else (number, 0)
                running[asyncio.create_task(pool_one(generations[number], others))] = number
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = {running.pop(task): task for task in done}
            refused = [number for number, task in ended.items() if _is_refusal(task)]
            if refused and len(refused) == len(ended) and not running:
                ended[refused[0]].result()  # raises
            answers |= {number: task.result() for number, task in ended.items() if number not in refused}
            waiting.extendleft(sorted(refused, reverse=True))
            room = max(1, len(running)) if refused else min(PROMPTS_AT_ONCE, room + 1)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    ordered = [answers[number] for number in range(len(generations))]
    return PooledAnswer([pooled for pooled, _ in ordered], total_usage([usage for _, usage in ordered]))


def _is_refusal(task: asyncio.Task[tuple[bytes, Usage]]) -> bool:
    """Whether a prompt was refused for what is in progress."""
    error = None if task.cancelled() else task.exception()
    return isinstance(error, QuireError) and error.code is ErrorCode.OVERLOADED and error.reason not in _A_MINUTE


async def collect(deltas: AsyncGenerator[Delta]) -> tuple[bytes, Usage]:
    """Returns what one prompt is pooled to. Raises ``QuireError``, also if somebody cancelled it."""
    pooled, usage = b"", Usage(0, 0)
    async with aclosing(deltas):
        async for delta in deltas:
            pooled, usage = delta.pooled or pooled, delta.usage or usage
    if not pooled:
        raise request_cancelled()
    return pooled, usage


def vector_of(pooled: bytes) -> np.ndarray:
    """The numbers of one prompt, [size] float32."""
    return np.frombuffer(pooled, "<f4")


async def scores_of(prepared: PreparedPooling, answer: PooledAnswer) -> list[float]:
    """The score of each pair: of two embeddings, which are normalised, the product. Lets the event loop run in
    between.
    """
    if prepared.pairs is None:
        return [float(vector_of(each)[0]) for each in answer.pooled]
    vectors = [vector_of(each) for each in answer.pooled]
    scores = []
    for number, (one, other) in enumerate(prepared.pairs, 1):
        scores.append(float(vectors[one] @ vectors[other]))
        if number % _VECTORS_PER_TURN == 0:
            await asyncio.sleep(0)
    return scores
