"""One HTTP request and its answer, as the routes see them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.types import Receive, Scope

from quire_router.api.identity import ANONYMOUS, Identity
from quire_router.api.rest.connection import HttpResponse

LAST_EVENT_ID = "last-event-id"
KEY_HEADERS = ("api-key", "x-api-key")  # those of Azure's and Anthropic's clients
_STATE = "quire.exchange"


@dataclass
class HttpExchange:
    """``caller`` is known once the key was checked. A stream has ``begun`` once a piece of its answer came. The request
    of a ``lasting`` one can be come back to even before that. ``event_ids`` are those of its stream's events.
    """

    scope: Scope
    receive: Receive
    reply: HttpResponse
    caller: Identity = ANONYMOUS
    has_output: bool = False
    resumable: bool = False
    event_ids: bool = False

    @classmethod
    def from_scope(cls, scope: Scope) -> "HttpExchange":
        """The exchange that a route was called with."""
        exchange = scope[_STATE]
        assert isinstance(exchange, cls)
        return exchange

    def attach(self) -> Scope:
        """The scope for the routes, with this exchange in it."""
        self.scope[_STATE] = self
        return self.scope

    @property
    def request_id(self) -> str:
        """That of the request which is answered: ours, whatever the client sent."""
        return self.reply.request_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        self.reply.request_id = request_id

    @property
    def path(self) -> str:
        """The path that routing uses; never one that a Host header could change."""
        return str(self.scope["path"])

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers by their names in small letters; of several with one name, the last."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.scope["headers"]}

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name.encode()]

    @property
    def credentials(self) -> list[str]:
        """Every ``authorization``; where there is none, the keys in the headers of clients that send them bare."""
        return self.values("authorization") or [f"Bearer {key}" for name in KEY_HEADERS for key in self.values(name)]

    @property
    def content_length(self) -> int:
        """Size of the body as its sender states it; 0 where nothing is stated."""
        return int(self.headers.get("content-length", 0))

    @property
    def head_bytes(self) -> int:
        """Size of the request line and headers."""
        target = len(self.scope["raw_path"]) + len(self.scope["query_string"])
        return target + sum(len(name) + len(value) + 4 for name, value in self.scope["headers"])

    @property
    def path_parameters(self) -> dict[str, Any]:
        """What the route's pattern took from the path."""
        return dict(self.scope["path_params"])
