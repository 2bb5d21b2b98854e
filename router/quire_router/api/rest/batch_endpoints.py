"""OpenAI's ``/v1/files`` and ``/v1/batches``: their routes. What they list is read page by page."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from secrets import token_hex
from time import time
from typing import Annotated, Literal, Protocol

from pydantic import Field, StringConstraints
from quire_proto.errors import QuireError, invalid

from quire_router.api.rest.http import (
    BodyLimits,
    ClientDisconnectedError,
    HttpExchange,
    body_too_large,
    read_body,
    to_json,
    upload_too_slow,
)
from quire_router.api.rest.item_list import read_query
from quire_router.api.rest.multipart import Field as FormField
from quire_router.api.rest.multipart import MultipartParser, malformed
from quire_router.api.schemas.base import WHOLE, StrictModel
from quire_router.api.service import ApiService
from quire_router.batches.batch import ENDPOINTS, WINDOW, Batch
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import CHUNK_BYTES, MAX_FILENAME, MAX_TTL, MIN_TTL, FileInfo, Upload
from quire_router.batches.worker import BatchWorker
from quire_router.core.errors import file_in_use, files_forbidden

log = logging.getLogger(__name__)

FILES, BATCHES = "/v1/files", "/v1/batches"
UPLOAD_RATE = 32_768  # bytes a second that an upload has to reach, after the time that any body may take
_FORM_BYTES = 65_536  # beside the file
_VALUE_BYTES = 1_024  # of a field that is no file


class Shown(Protocol):
    """A file or a batch."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    def to_object(self) -> dict[str, object]:
        """Returns it as OpenAI's API shows it."""
        ...


# Bodies


class OutputExpiresAfter(StrictModel):
    """When a batch's files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL, le=MAX_TTL), WHOLE]


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
            query = read_query(exchange)
            ascending = query.get("order", "desc") == "asc"
            tenant, purpose = exchange.caller.tenant, query.get("purpose")
            files = self._files.list(tenant, query.get("after", ""), ascending=ascending, purpose=purpose)
            await exchange.response.send(200, to_json(await _page(files, query, 10_000, 10_000)))

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """Sends what is known of a file; for ``DELETE``, deletes it, unless a batch reads it."""
        method = exchange.scope["method"]
        with self._service.request_scope(f"{method} {FILES}/{{id}}", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            info = await self._files.get(_id(exchange), exchange.caller.tenant)
            if method != "DELETE":
                await exchange.response.send(200, to_json(info.to_object()))
                return
            if (batch_id := await self._batches.reading(info)) is not None:
                raise file_in_use(batch_id)
            await self._files.delete(info)
            await exchange.response.send(200, to_json({"id": info.id, "object": "file", "deleted": True}))

    async def content(self, exchange: HttpExchange) -> None:
        """Sends what a file holds."""
        with self._service.request_scope(f"GET {FILES}/{{id}}/content", exchange.request_id, exchange.headers):
            self._service.count_poll(exchange.caller)
            info = await self._files.get(_id(exchange), exchange.caller.tenant)
            self._service.charge_read(exchange.caller, info.bytes)
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(info.bytes).encode()),
            ]
            async with aclosing(self._files.read(info)) as chunks:
                first = await anext(chunks, b"")  # before the head: it may have gone just now
                await exchange.response.start(200, headers)
                await exchange.response.write(first)
                try:
                    async for chunk in chunks:
                        await exchange.response.write(chunk)
                except QuireError as error:
                    # It has gone, or cannot be read now: the connection breaks, so that nobody takes a part for all.
                    log.warning("file %s was sent only in part: %s", info.id, error.message)
                    raise ClientDisconnectedError from None
            await exchange.response.end()

    async def _upload(self, exchange: HttpExchange) -> FileInfo:
        most = self._files.settings.max_bytes + _FORM_BYTES
        if exchange.content_length > most:
            raise body_too_large(self._files.settings.max_bytes)
        parser = MultipartParser(exchange.headers.get("content-type", ""))
        if exchange.caller.policy.retention == 0:
            raise files_forbidden()
        with self._service.bodies.reserve_incoming(exchange.caller.tenant, 0) as memory:
            memory.reserve(CHUNK_BYTES)
            upload = await self._files.new_upload(exchange.caller.tenant)
            try:
                form = _Form(upload)
                async with aclosing(self._parts(exchange, most)) as parts:
                    async for part in parts:
                        for piece in parser.feed(part):
                            await form.take(piece)
                if not parser.ended:
                    raise malformed("its last boundary is missing")
                return await form.end()
            except BaseException:
                await upload.abandon()
                raise

    async def _parts(self, exchange: HttpExchange, most: int) -> AsyncGenerator[bytes]:
        """Yields the body as it arrives. It may take as long as any other body as a whole, and a second more for each
        ``UPLOAD_RATE`` bytes that have arrived. Time in which the router writes them does not count.
        """
        received, more, loop = 0, True, asyncio.get_running_loop()
        left = self._limits.timeout
        while more:
            since = loop.time()
            try:
                async with asyncio.timeout(left):
                    message = await exchange.receive()
            except TimeoutError:
                raise upload_too_slow(self._limits.timeout, UPLOAD_RATE) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            data, more = message.get("body", b""), message.get("more_body", False)
            received += len(data)
            left += len(data) / UPLOAD_RATE - (loop.time() - since)
            if received > most:
                raise body_too_large(self._files.settings.max_bytes)
            yield data


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
            raise invalid("file", "The form has no file.")
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
            query = read_query(exchange)
            batches = self._batches.list(exchange.caller.tenant, query.get("after", ""))
            await exchange.response.send(200, to_json(await _page(batches, query, 100, 20)))

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
            request = await self._service.offload(caller, len(body), lambda: BatchBody.from_json(body.detach()))
        if request.endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}.")
        info = await self._batches.files.get(request.input_file_id, caller.tenant, "input_file_id")
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
            listed=caller.policy.listed,
        )
        await self._batches.create(batch)
        self._worker.wake()
        return batch


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])


async def _page(listed: AsyncGenerator[Shown], query: Mapping[str, str], most: int, default: int) -> dict[str, object]:
    """Returns the page of a list that a query asks for, and reads no further. Raises ``QuireError`` INVALID."""
    given = query.get("limit", str(default))
    if not given.isascii() or not given.isdigit() or len(given) > 6 or not 1 <= int(given) <= most:
        raise invalid("limit", f"limit must be a number from 1 to {most}.")
    page: list[Shown] = []
    has_more = False
    async with aclosing(listed) as records:
        async for record in records:
            if len(page) == int(given):
                has_more = True
                break
            page.append(record)
    return {
        "object": "list",
        "data": [each.to_object() for each in page],
        "first_id": page[0].id if page else "",
        "last_id": page[-1].id if page else "",
        "has_more": has_more,
    }
