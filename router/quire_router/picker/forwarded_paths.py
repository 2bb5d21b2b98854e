"""Which requests gateways send on: those of the APIs that the router reads, the list of models, and what the operator
names. Servers trust their network, so that any other path could be one of their administration.
"""

from collections.abc import Iterable
from typing import Final

from quire_router.api.forwarded_requests import api_path
from quire_router.api.rest.http import no_such_route, wrong_method

MODELS: Final = "/v1/models"


class ForwardedPaths:
    """``more`` are a method and a whole path each, as ``POST /tokenize``."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._methods = {MODELS: {"GET"}}
        for entry in more:
            method, _, path = entry.partition(" ")
            self._methods.setdefault(path, set()).add(method)

    def check(self, method: str, target: str) -> str:
        """Returns the path of the API in a request's target, empty for a request that only a server understands.
        Raises ``HttpError`` for one that is not sent on.
        """
        path, known = target.partition("?")[0], api_path(target)
        methods = {"POST"} if known else self._methods.get(path)
        if methods is None:
            raise no_such_route(path, "gateways send on requests of the API, and those of --picker-forward")
        if method not in methods:
            raise wrong_method(path, method, ", ".join(sorted(methods)))
        return known
