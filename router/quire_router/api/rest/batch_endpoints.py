"""OpenAI's ``/v1/files`` and ``/v1/batches``: their routes, and ``BatchLines``, which runs the lines of batches as
background requests of the routes that they name.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from secrets import token_hex
from time import time
from typing import Annotated, Any, Final, Literal, Protocol
from urllib.parse import parse_qsl

from pydantic import Field, StringConstraints
from quire_proto.errors import ErrorCode, QuireError, invalid
from starlette.types import Message

from quire_router.admission.tenants import Tenants
from quire_router.api.auth import Identity
from quire_router.api.prepared_request import PreparedRequest, RequestOptions
from quire_router.api.rest.answer_format import AnswerFormat
from quire_router.api.rest.http import (
    BodyLimits,
    ClientDisconnectedError,
    HttpExchange,
    body_too_large,
    body_too_slow,
    read_body,
    to_json,
)
from quire_router.api.rest.multipart import Field as FormField
from quire_router.api.rest.multipart import MultipartParser, malformed
from quire_router.api.rest.openai_format import CHAT, COMPLETION
from quire_router.api.rest.response_history import prepare_response
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.rest.sse import collect
from quire_router.api.schemas.base import StrictModel
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.service import ApiService
from quire_router.batches.batch import ENDPOINTS, WINDOW, Batch, Line
from quire_router.batches.files import MAX_FILENAME, MAX_TTL, MIN_TTL, FileInfo, Upload
from quire_router.batches.worker import Batches, BatchWorker, LineAnswer
from quire_router.core.errors import batch_waits, file_in_use, files_forbidden
from quire_router.core.retry import wait_at_most

FILES, BATCHES = "/v1/files", "/v1/batches"
LOWEST_PRIORITY: Final = 2**31 - 1
_POLL = 0.05  # seconds between two looks for room
_SPARE_RETENTION = 3_600.0  # seconds after the window for which the records of lines are kept
_FORM_BYTES = 65_536  # beside the file
_VALUE_BYTES = 1_024  # of a field that is no file
_TEMPORARY = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
_MAX_QUERY_FIELDS = 16
PrepareLine = Callable[[bytes, str, Identity, RequestOptions], Awaitable[PreparedRequest]]
"""Returns the request in a body, with this id. Raises ``QuireError``."""


# Lines


class Room(Protocol):
    """What the engines have to do; see ``EnginePool``."""

    def ready(self, model: str) -> int:
        """Returns the number of engines that can run the model now."""
        ...

    def has_spare_capacity(self, model: str) -> bool:
        """Returns True if engines have so little to do that one more request delays no other."""
        ...


class SpareRoom:
    """Admits lines one by one, each only while the engines have little to do and nothing waits for them: so interactive
    requests find room, whoever sends them. While there is no engine, lines are admitted, so that autoscalers see them.
    """

    def __init__(self, engines: Room, waiting: Callable[[str], int] = lambda _: 0) -> None:
        self._engines = engines
        self._waiting = waiting
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changed = asyncio.Event()

    def notify_capacity(self) -> None:
        """There may be room now: a stream has ended, or an engine is ready. Never waits."""
        self._changed.set()

    @asynccontextmanager
    async def admitted(self, model: str) -> AsyncIterator[None]:
        """Waits for room; the block starts a request, which is counted before the next one is admitted."""
        async with self._locks[model]:
            while self._is_busy(model):
                self._changed.clear()
                await wait_at_most(self._changed, _POLL)  # what engines have to do changes with every step
            yield
            await asyncio.sleep(0)  # in which the request is dispatched
            await asyncio.sleep(0)

    def _is_busy(self, model: str) -> bool:
        return bool(self._engines.ready(model)) and (
            self._waiting(model) > 0 or not self._engines.has_spare_capacity(model)
        )


class BatchLines:
    """See ``LineRunner``. Lines are prepared and answered as at the routes that they name."""

    def __init__(self, service: ApiService, tenants: Tenants, room: SpareRoom) -> None:
        self._service = service
        self._tenants = tenants
        self._routes: Mapping[str, tuple[PrepareLine, AnswerFormat]] = {
            "/v1/chat/completions": (self._preparing(ChatRequest), CHAT),
            "/v1/completions": (self._preparing(CompletionRequest), COMPLETION),
            "/v1/responses": (self._prepare_response, RESPONSES),
        }
        self._room = room
        self._under_way: Counter[str] = Counter()

    async def run(self, batch: Batch, line: Line) -> LineAnswer:
        """See ``LineRunner``. The id of the request follows from the batch and the line's number, as from an
        idempotency key that no client can send.
        """
        prepare, answer_format = self._routes[batch.endpoint]
        caller, options = self._caller(batch), _options(batch, line.number)
        request_id = options.request_id(caller)
        most = caller.policy.max_concurrent
        if most is not None and self._under_way[caller.tenant] >= max(1, most // 2):
            raise batch_waits()
        self._under_way[caller.tenant] += 1
        try:
            prepared = _as_line(await prepare(line.body, request_id, caller, options), batch)
            async with self._room.admitted(prepared.first.model):
                stored, _ = await self._service.responses.start_background(prepared)
            try:
                answer = await self._service.replay(stored, caller)
                body, _ = await collect(answer, answer_format)
            except QuireError as error:
                # Its record is not there: the journal has lost it, and it is begun again.
                raise batch_waits() if error.code is ErrorCode.NOT_FOUND else error from None
        except QuireError as error:
            if error.code in _TEMPORARY:
                raise
            status, body, _ = answer_format.error_response(error, request_id)
            return LineAnswer(status, request_id, body)
        finally:
            self._under_way[caller.tenant] -= 1
        return LineAnswer(200, request_id, body)

    async def cancel(self, batch: Batch, number: int) -> None:
        """See ``LineRunner``."""
        await self._service.end(_options(batch, number).request_id(self._caller(batch)))

    def _preparing(self, body_type: type[ChatRequest] | type[CompletionRequest]) -> PrepareLine:
        async def prepare(body: bytes, request_id: str, caller: Identity, options: RequestOptions) -> PreparedRequest:
            return await self._service.prepare(
                lambda: body_type.from_json(body), request_id, caller, options, size=len(body)
            )

        return prepare

    async def _prepare_response(
        self, body: bytes, request_id: str, caller: Identity, options: RequestOptions
    ) -> PreparedRequest:
        return await prepare_response(self._service, lambda: body, len(body), request_id, caller, options)

    def _caller(self, batch: Batch) -> Identity:
        return Identity(batch.tenant, bytes.fromhex(batch.cache_salt), self._tenants[batch.tenant])


def _options(batch: Batch, number: int) -> RequestOptions:
    return RequestOptions(key=f"\0batch\0{batch.id}\0{number}")


def _as_line(prepared: PreparedRequest, batch: Batch) -> PreparedRequest:
    """Returns the request as one that goes behind all others. Its record is kept until the window of its batch has
    ended, whatever the request or its tenant says: a router that stalls, and begins the line again later, finds it.
    """
    if len(prepared.generations) > 1:
        raise invalid("prompt", "A request of a batch takes one prompt: give each a line of its own.")
    left = max(0.0, batch.expires_at - time())
    first = replace(
        prepared.first,
        background=True,
        priority=LOWEST_PRIORITY,
        deadline=float(batch.expires_at),
        retention=left + _SPARE_RETENTION,
    )
    return replace(prepared, generations=(first,))


# Bodies


class OutputExpiresAfter(StrictModel):
    """When a batch's files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL, le=MAX_TTL)]


class BatchBody(StrictModel):
    """The body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiresAfter | None = None


# Routes


@dataclass(frozen=True, slots=True)
class BatchApi:
    """What the routes need: the records, and the worker, which is woken when one changes."""

    batches: Batches
    worker: BatchWorker


class FileEndpoints:
    """Handlers of ``/v1/files``."""

    def __init__(self, service: ApiService, api: BatchApi, limits: BodyLimits) -> None:
        self._service = service
        self._batches = api.batches
        self._files = api.batches.files
        self._limits = limits

    async def list_or_upload(self, exchange: HttpExchange) -> None:
        """Lists the caller's files, or for ``POST`` stores one that arrives as a form."""
        method = exchange.scope["method"]
        with self._service.request_scope(f"{method} {FILES}", exchange.request_id, exchange.headers):
            if method == "POST":
                await self._service.charge(exchange.caller)
                await exchange.response.send(200, to_json((await self._upload(exchange)).to_object()))
                return
            self._service.count_poll(exchange.caller)
            query = _query(exchange)
            purpose = query.get("purpose")
            owned = [file for file in await self._files.list(exchange.caller.tenant) if purpose in (None, file.purpose)]
            if query.get("order", "desc") == "asc":
                owned.reverse()
            objects = [file.to_object() for file in owned]
            await exchange.response.send(200, to_json(_page(objects, query, "file_id", 10_000, 10_000)))

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """Sends what is known of a file; for ``DELETE``, deletes it, unless a batch reads it."""
        method = exchange.scope["method"]
        with self._service.request_scope(f"{method} {FILES}/{{id}}", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            info = await self._files.get(_id(exchange), exchange.caller.tenant)
            if method != "DELETE":
                await exchange.response.send(200, to_json(info.to_object()))
                return
            for batch in await self._batches.list(exchange.caller.tenant):
                if batch.input_file_id == info.id and not batch.ended:
                    raise file_in_use(batch.id)
            await self._files.delete(info)
            await exchange.response.send(200, to_json({"id": info.id, "object": "file", "deleted": True}))

    async def content(self, exchange: HttpExchange) -> None:
        """Sends what a file holds."""
        with self._service.request_scope(f"GET {FILES}/{{id}}/content", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            info = await self._files.get(_id(exchange), exchange.caller.tenant)
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(info.bytes).encode()),
            ]
            async with aclosing(self._files.read(info)) as chunks:
                first = await anext(chunks, b"")  # before the head: it may have gone just now
                await exchange.response.start(200, headers)
                await exchange.response.write(first)
                async for chunk in chunks:
                    await exchange.response.write(chunk)
            await exchange.response.end()

    async def _upload(self, exchange: HttpExchange) -> FileInfo:
        most = self._files.settings.max_bytes + _FORM_BYTES
        if exchange.content_length > most:
            raise body_too_large(self._files.settings.max_bytes)
        parser = MultipartParser(exchange.headers.get("content-type", ""))
        if exchange.caller.policy.retention == 0:
            raise files_forbidden()
        upload = await self._files.new_upload(exchange.caller.tenant)
        try:
            form = _Form(upload)
            received, more = 0, True
            while more:
                message = await self._receive(exchange)
                data, more = message.get("body", b""), message.get("more_body", False)
                received += len(data)
                if received > most:
                    raise body_too_large(self._files.settings.max_bytes)
                for piece in parser.feed(data):
                    await form.take(piece)
            if not parser.ended:
                raise malformed("its last boundary is missing")
            return await form.end()
        except BaseException:
            await upload.abandon()
            raise

    async def _receive(self, exchange: HttpExchange) -> Message:
        """Returns the next part of the body, which may take as long as any other body as a whole."""
        try:
            async with asyncio.timeout(self._limits.timeout):
                message = await exchange.receive()
        except TimeoutError:
            raise body_too_slow(self._limits.timeout) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        return message


class _Form:
    """The fields of an upload as they arrive: the file goes on to ``upload``."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._values: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._field = FormField("", None)

    async def take(self, piece: FormField | bytes) -> None:
        """Takes the head of a field, or some of its bytes."""
        if isinstance(piece, FormField):
            self._field = piece
            if piece.name == "file":
                if self._filename is not None:
                    raise malformed("there is more than one file")
                self._filename = (piece.filename or "upload.jsonl")[-MAX_FILENAME:]
        elif self._field.name == "file":
            await self._upload.write(piece)
        else:
            value = self._values.setdefault(self._field.name, bytearray())
            value += piece
            if len(value) > _VALUE_BYTES:
                raise malformed(f"a field has more than {_VALUE_BYTES} bytes")

    async def end(self) -> FileInfo:
        """Makes it a file. Raises ``QuireError`` INVALID when something is missing or not for what files are here."""
        purpose = self._text("purpose")
        if purpose != "batch":
            raise invalid("purpose", "purpose must be 'batch': files are for nothing else here.")
        if self._filename is None:
            raise invalid("file", "There is no file.")
        return await self._upload.end(self._filename, purpose, self._ttl())

    def _ttl(self) -> float | None:
        seconds = self._text("expires_after[seconds]")
        if not seconds:
            return None
        if self._text("expires_after[anchor]") != "created_at":
            raise invalid("expires_after", "expires_after.anchor must be 'created_at'.")
        if not seconds.isascii() or not seconds.isdigit() or not MIN_TTL <= int(seconds) <= MAX_TTL:
            raise invalid("expires_after", f"expires_after.seconds must be a number from {MIN_TTL} to {MAX_TTL}.")
        return float(seconds)

    def _text(self, name: str) -> str:
        return bytes(self._values.get(name, b"")).decode("utf-8", "replace")


class BatchEndpoints:
    """Handlers of ``/v1/batches``."""

    def __init__(self, service: ApiService, api: BatchApi, limits: BodyLimits) -> None:
        self._service = service
        self._batches = api.batches
        self._worker = api.worker
        self._limits = limits

    async def list_or_create(self, exchange: HttpExchange) -> None:
        """Lists the caller's batches, or for ``POST`` begins one."""
        method = exchange.scope["method"]
        with self._service.request_scope(f"{method} {BATCHES}", exchange.request_id, exchange.headers):
            if method == "POST":
                await self._service.charge(exchange.caller)
                await exchange.response.send(200, to_json((await self._create(exchange)).to_object()))
                return
            self._service.count_poll(exchange.caller)
            objects = [batch.to_object() for batch in await self._batches.list(exchange.caller.tenant)]
            await exchange.response.send(200, to_json(_page(objects, _query(exchange), "batch_id", 100, 20)))

    async def show(self, exchange: HttpExchange) -> None:
        """Sends a batch as it is now."""
        with self._service.request_scope(f"GET {BATCHES}/{{id}}", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            batch = await self._batches.get(_id(exchange), exchange.caller.tenant)
            await exchange.response.send(200, to_json(batch.to_object()))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Asks for the end of a batch, and sends it."""
        with self._service.request_scope(f"POST {BATCHES}/{{id}}/cancel", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            batch = await self._batches.cancel(_id(exchange), exchange.caller.tenant)
            self._worker.wake()
            await exchange.response.send(200, to_json(batch.to_object()))

    async def _create(self, exchange: HttpExchange) -> Batch:
        exchange.check_json_body(self._limits.max_bytes)
        caller = exchange.caller
        with self._service.bodies.reserve_incoming(caller.tenant, exchange.content_length) as body:
            await read_body(exchange.receive, self._limits, body)
            request = BatchBody.from_json(body.detach())
        if request.endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}.")
        info = await self._batches.files.get(request.input_file_id, caller.tenant)
        if info.purpose != "batch":
            raise invalid("input_file_id", "The purpose of the input file must be 'batch'.")
        now, output = int(time()), request.output_expires_after
        batch = Batch(
            id=f"batch_{token_hex(12)}",
            tenant=caller.tenant,
            cache_salt=caller.cache_salt.hex(),
            endpoint=request.endpoint,
            input_file_id=info.id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=request.metadata,
            output_ttl=None if output is None else output.seconds,
        )
        await self._batches.create(batch)
        self._worker.wake()
        return batch


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])


def _query(exchange: HttpExchange) -> dict[str, str]:
    """Returns the fields of the address, the last of each name. Raises ``QuireError`` INVALID for too many."""
    try:
        fields = parse_qsl(exchange.scope["query_string"].decode("latin-1"), max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise invalid("query", f"The address has more than {_MAX_QUERY_FIELDS} fields.") from None
    return dict(fields)


def _page(
    objects: Sequence[dict[str, Any]], query: Mapping[str, str], param: str, most: int, default: int
) -> dict[str, object]:
    """Returns the page of a list that a query asks for. Raises ``QuireError`` INVALID."""
    given = query.get("limit", str(default))
    if not given.isascii() or not given.isdigit() or len(given) > 6 or not 1 <= int(given) <= most:
        raise invalid("limit", f"limit must be a number from 1 to {most}.")
    ids, after = [each["id"] for each in objects], query.get("after")
    if after is not None and after not in ids:
        raise invalid("after", f"There is no such {param.partition('_')[0]}.")
    begin = 0 if after is None else ids.index(after) + 1
    page = objects[begin : begin + int(given)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(objects),
    }
