"""The page at ``/``: static files of ``quire_router.page``, read once and served without a key. They hold no data: the
page asks the API for what it shows, with the key of its user.
"""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from importlib.resources import files
from typing import Final

from quire_router.api.rest.http import JSON_HEADERS, Header, HttpExchange, no_such_route, to_json

HOME: Final = "/"
FOLDER: Final = "/page/"
_INDEX: Final = "index.html"
_TYPES: Final = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_SECURITY: Final[tuple[Header, ...]] = (
    # Only files and connections of this router; no frame of another site; and no string ever becomes HTML or code.
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),  # asked for again each time, by its ETag: a router may be another version
)
_LINKS: Final = to_json({"models": "/v1/models", "chat": "/v1/chat/completions", "health": "/health", "page": "/"})


class Page:
    """Handlers of the page's routes."""

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths that need no key."""
        return frozenset({HOME, *(FOLDER + name for name in self._files)})

    async def home(self, exchange: HttpExchange) -> None:
        """Sends the page to browsers; to others, which do not ask for HTML, where the API is."""
        if "text/html" in exchange.headers.get("accept", ""):
            await self._send(exchange, _INDEX)
        else:
            await exchange.response.send(200, _LINKS, (*JSON_HEADERS, (b"vary", b"accept")))

    async def file(self, exchange: HttpExchange) -> None:
        """Sends one of the page's files. Raises ``HttpError`` NOT_FOUND."""
        name = str(exchange.path_parameters["name"])
        if name not in self._files:
            raise no_such_route(exchange.path)
        await self._send(exchange, name)

    async def _send(self, exchange: HttpExchange, name: str) -> None:
        """Sends a file; only 304 where the client has this version."""
        body, etag = self._files[name]
        headers = [*_SECURITY, (b"etag", etag), (b"vary", b"accept")]
        if etag.decode() in exchange.headers.get("if-none-match", ""):
            await exchange.response.start(304, headers)
            await exchange.response.end()
        else:
            kind = _TYPES[name.rpartition(".")[2]]
            await exchange.response.send(200, body, (*headers, (b"content-type", kind)))

    @cached_property
    def _files(self) -> dict[str, tuple[bytes, bytes]]:
        """The contents and the ETag of each file by its name."""
        return {name: (body, b'"%s"' % blake2b(body, digest_size=12).hexdigest().encode()) for name, body in _read()}


def _read() -> Iterator[tuple[str, bytes]]:
    for file in files("quire_router.page").iterdir():
        if file.name.rpartition(".")[2] in _TYPES:
            yield file.name, file.read_bytes()
