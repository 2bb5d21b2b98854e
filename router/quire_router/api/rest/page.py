"""The page at ``/``, and the API's reference at ``/docs``: static files of ``quire_router.page``, read once and served
without a key. They hold no data: the page asks the API for what it shows, with the key of its user.
"""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from importlib.resources import files
from typing import Final

from quire_router.api.rest.http import JSON_HEADERS, Header, HttpExchange, no_such_route, to_json

HOME: Final = "/"
DOCS: Final = "/docs"
FOLDER: Final = "/page/"
_INDEX: Final = "index.html"
_REFERENCE: Final = "docs.html"
_PACKED: Final = ".gz"
_TYPES: Final = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# Only files and connections of this router, and no frame of another site.
_OWN: Final = b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
# No string ever becomes HTML or code.
_POLICY: Final = b"default-src 'self'; " + _OWN + b"require-trusted-types-for 'script'; trusted-types 'none'"
# Swagger UI makes HTML out of descriptions, which are the router's own, and its style sheet has its icons.
_REFERENCE_POLICY: Final = b"default-src 'self'; img-src 'self' data:; " + _OWN.removesuffix(b"; ")
_SECURITY: Final[tuple[Header, ...]] = (
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
        return frozenset({HOME, DOCS, *(FOLDER + name for name in self._files)})

    async def home(self, exchange: HttpExchange) -> None:
        """Sends the page to browsers; to others, which do not ask for HTML, where the API is."""
        if "text/html" in exchange.headers.get("accept", ""):
            await self._send(exchange, _INDEX)
        else:
            await exchange.response.send(200, _LINKS, (*JSON_HEADERS, (b"vary", b"accept")))

    async def docs(self, exchange: HttpExchange) -> None:
        """Sends the API's reference."""
        await self._send(exchange, _REFERENCE)

    async def file(self, exchange: HttpExchange) -> None:
        """Sends one of the page's files. Raises ``HttpError`` NOT_FOUND."""
        name = str(exchange.path_parameters["name"])
        if name not in self._files:
            raise no_such_route(exchange.path)
        await self._send(exchange, name)

    async def _send(self, exchange: HttpExchange, name: str) -> None:
        """Sends a file; only 304 where the client has this version."""
        body, etag, packed = self._files[name]
        policy = _REFERENCE_POLICY if name == _REFERENCE else _POLICY
        headers = [(b"content-security-policy", policy), *_SECURITY, (b"etag", etag), (b"vary", b"accept")]
        if etag.decode() in exchange.headers.get("if-none-match", ""):
            await exchange.response.start(304, headers)
            await exchange.response.end()
        else:
            headers.append((b"content-type", _TYPES[name.rpartition(".")[2]]))
            if packed:  # as every browser takes it
                headers.append((b"content-encoding", b"gzip"))
            await exchange.response.send(200, body, headers)

    @cached_property
    def _files(self) -> dict[str, tuple[bytes, bytes, bool]]:
        """The contents and the ETag of each file by its name, and whether it is packed by gzip."""
        return {
            name.removesuffix(_PACKED): (
                body,
                b'"%s"' % blake2b(body, digest_size=12).hexdigest().encode(),
                name.endswith(_PACKED),
            )
            for name, body in _read()
        }


def _read() -> Iterator[tuple[str, bytes]]:
    page = files("quire_router.page")
    for folder in (page, page / "swagger"):
        for file in folder.iterdir():
            if file.name.removesuffix(_PACKED).rpartition(".")[2] in _TYPES:
                yield file.name, file.read_bytes()
