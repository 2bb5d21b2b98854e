"""Who may ask a service that listens on this machine alone and asks for no key: programs of this machine, and pages
that it serves. Browsers of its users also run pages of other sites, which can send requests to loopback addresses, or
have their own names resolve to one.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final
from urllib.parse import urlsplit

from quire_proto.local_hosts import ANY_HOST, is_local_host
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_router.api.rest.http import ClientDisconnectedError, HttpError, HttpResponse, other_host, other_site
from quire_router.api.rest.page import HOME
from quire_router.api.rest.rest_app import format_of_errors
from quire_router.api.service import new_request_id

_NAVIGATION: Final = {"sec-fetch-mode": ["navigate"], "sec-fetch-dest": ["document"]}


class LocalCallers:
    """``app``, which refuses other callers than local ones while ``is_open``: requests for hosts that are neither names
    of this machine nor among ``hosts``, and those of pages of other sites that are not among ``origins``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        origins: Collection[str] = (),
        is_open: Callable[[], bool] = lambda: True,
        client_timeout: float,
    ) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)
        self._is_open = is_open
        self._client_timeout = client_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        try:
            if self._is_open():
                self._check(scope)
        except HttpError as error:
            await self._refuse(scope, send, error)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ``HttpError``. A request of HTTP/1.0 may have no Host, and is none of a browser then."""
        for host in _values(scope, "host"):
            if not is_local_host(host, self._hosts):
                raise other_host(host)
        origins = _values(scope, "origin")
        for origin in origins:
            if not self._is_allowed_origin(origin):
                raise other_site(origin)
        if not origins and "cross-site" in _values(scope, "sec-fetch-site") and not _opens_the_page(scope):
            raise other_site("another site")

    def _is_allowed_origin(self, origin: str) -> bool:
        if origin in self._origins or ANY_HOST in self._origins:
            return True
        parts = urlsplit(origin)
        return bool(parts.netloc) and ANY_HOST not in parts.netloc and is_local_host(parts.netloc, self._hosts)

    async def _refuse(self, scope: Scope, send: Send, error: HttpError) -> None:
        response = HttpResponse(send, self._client_timeout, new_request_id())
        try:
            await response.send(*format_of_errors(scope["path"]).error_response(error, response.request_id))
        except ClientDisconnectedError:
            return
        finally:
            response.close()


def _opens_the_page(scope: Scope) -> bool:
    """Whether somebody follows a link to the page: what comes back is shown to them, not to the site with the link."""
    is_navigation = all(_values(scope, name) == values for name, values in _NAVIGATION.items())
    return scope["method"] == "GET" and scope["path"] == HOME and is_navigation


def _values(scope: Scope, name: str) -> Sequence[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name.encode()]
