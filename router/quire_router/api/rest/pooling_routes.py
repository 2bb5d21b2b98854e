"""The routes that pool prompts: ``/v1/embeddings``, ``/score`` and ``/rerank``, with their answers in the words of
OpenAI, vLLM, and Cohere and Jina.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from quire_router.api.pooled_requests import PooledAnswer, PreparedPooling, scores_of, vector_of
from quire_router.api.prepared_request import options_from_headers
from quire_router.api.request_limits import ReservedBody
from quire_router.api.rest.http import (
    JSON_HEADERS,
    BodyLimits,
    HttpExchange,
    read_body,
    to_json,
    x_headers,
)
from quire_router.api.schemas.pooling import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from quire_router.api.service import ApiService, counting_rejections, ignored_parameters_header, target_header
from quire_router.core.generation import Usage

EMBEDDINGS = "/v1/embeddings"
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
BodyT = TypeVar("BodyT", bound=PoolingBody)
Write = Callable[[BodyT, PreparedPooling, PooledAnswer], Awaitable[bytes]]
"""Makes the JSON of an answer."""
_BASE64 = "base64"


class PoolingHandler(Generic[BodyT]):
    """One of these routes. ``path`` names its span, ``parse`` reads the request in its body, ``write`` its answer."""

    def __init__(
        self,
        service: ApiService,
        path: str,
        parse: Callable[[bytes | bytearray], BodyT],
        write: Write[BodyT],
        limits: BodyLimits,
    ) -> None:
        self._service = service
        self._name = f"POST {path}"
        self._parse = parse
        self._write = write
        self._limits = limits

    async def __call__(self, exchange: HttpExchange) -> None:
        """Handles one request. Raises what the application turns into an error response."""
        exchange.check_json_body(self._limits.max_bytes)
        with (
            self._service.request_scope(self._name, exchange.request_id, exchange.headers),
            self._service.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            await exchange.cancel_on_disconnect(self._answer(exchange, body))

    async def _answer(self, exchange: HttpExchange, body: ReservedBody) -> None:
        with counting_rejections():
            options = options_from_headers(exchange.values)
        requests: list[BodyT] = []

        def read() -> BodyT:
            requests.append(self._parse(body.detach()))
            return requests[0]

        size = len(body)
        prepared = await self._service.prepare_pooling(read, exchange.request_id, exchange.caller, options, size=size)
        body.reserve(prepared.num_bytes)
        body.hold_until_queued(prepared.generations[-1].request_id)
        answer = await self._service.pool(prepared)
        written = await self._write(requests[0], prepared, answer)
        headers = x_headers(target_header(prepared.first) | ignored_parameters_header(prepared.ignored))
        await exchange.response.send(200, written, [*JSON_HEADERS, *headers])


def pooling_handlers(
    service: ApiService, limits: BodyLimits
) -> Mapping[str, Callable[[HttpExchange], Awaitable[None]]]:
    """The handlers of all routes that pool prompts, by their paths."""
    make = partial(PoolingHandler, service, limits=limits)
    return {
        EMBEDDINGS: make(EMBEDDINGS, EmbeddingRequest.from_json, embeddings_json),
        **{path: make(path, ScoreRequest.from_json, _scores_json) for path in SCORE},
        **{path: make(path, RerankRequest.from_json, _rerank_json) for path in RERANK},
    }


async def embeddings_json(request: EmbeddingRequest, prepared: PreparedPooling, answer: PooledAnswer) -> bytes:
    """Returns the embeddings; lets the event loop run between them."""
    items = []
    for index, pooled in enumerate(answer.pooled):
        items.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, _number_list(request, pooled)))
        await asyncio.sleep(0)
    head = to_json({**_head("embd", prepared), "object": "list", "usage": _usage(answer.usage)})
    return b'%b,"data":[%b]}' % (head[:-1], b",".join(items))


def _number_list(request: EmbeddingRequest, pooled: bytes) -> bytes:
    """Returns an embedding as the client asked for it. Nine digits tell every float32."""
    if request.encoding_format == _BASE64:
        return b'"%b"' % b64encode(pooled)
    numbers = vector_of(pooled).tolist()
    return ("[" + ",".join(["%.9g"] * len(numbers)) % tuple(numbers) + "]").encode("ascii")


async def _scores_json(request: ScoreRequest, prepared: PreparedPooling, answer: PooledAnswer) -> bytes:
    del request
    scores = await scores_of(prepared, answer)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return to_json({**_head("score", prepared), "object": "list", "data": data, "usage": _usage(answer.usage)})


async def _rerank_json(request: RerankRequest, prepared: PreparedPooling, answer: PooledAnswer) -> bytes:
    """Returns the documents, those that are most relevant first; of equal ones, the earlier. The tokens are told twice,
    as Jina and vLLM do (``usage``) and as Cohere does: the AI SDK takes no answer without ``meta``.
    """
    scores = await scores_of(prepared, answer)
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.top_n or None]
    results = [_result(index, scores, None if request.return_documents is False else request.texts) for index in order]
    meta = {"tokens": {"input_tokens": answer.usage.prompt_tokens, "output_tokens": 0}}
    return to_json({**_head("rerank", prepared), "results": results, "usage": _usage(answer.usage), "meta": meta})


def _result(index: int, scores: Sequence[float], texts: Sequence[str] | None) -> dict[str, Any]:
    shown = {} if texts is None else {"document": {"text": texts[index]}}
    return {"index": index, **shown, "relevance_score": scores[index]}


def _head(kind: str, prepared: PreparedPooling) -> dict[str, Any]:
    first = prepared.first
    return {"id": f"{kind}-{first.request_id}", "created": int(first.created), "model": first.model_name}


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
