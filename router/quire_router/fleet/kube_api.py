"""What of the Kubernetes API discovery needs: to list and to watch the EndpointSlices of one Service.

A Role with ``get``, ``list`` and ``watch`` on ``endpointslices`` (group ``discovery.k8s.io``) of its namespace is
enough. Slices stay the JSON they are: to make the library's models of a thousand endpoints takes far longer than to
read what is needed.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse
from kubernetes.aio.client import DiscoveryV1Api

from quire_router.fleet.slices import Json
from quire_router.kube_access import KubeAccess
from quire_router.kube_client import kube_client, own_namespace

SERVICE_LABEL = "kubernetes.io/service-name"
# An object of the API has 3 MB at most, so that whatever comes without an end is given up before it fills the memory.
_MAX_EVENT = 8 * 2**20
_MAX_LIST = 64 * 2**20
_PAGE = 100  # slices, of a hundred endpoints each unless somebody changed that
_MAX_PAGES = 200


class KubeProblem(Exception):  # noqa: N818 - handled where it is raised, and told of in the log
    """The API refused. ``code`` is the HTTP status; ``retry_after`` the seconds to wait, where it said so."""

    def __init__(self, code: int, text: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.retry_after = retry_after


@asynccontextmanager
async def connect(access: KubeAccess, namespace: str | None, service: str) -> AsyncIterator["KubeApi"]:
    """``namespace`` is the client's own where it is None. Raises as ``kube_client`` does."""
    async with kube_client(access) as client:
        yield KubeApi(DiscoveryV1Api(client), namespace or own_namespace(access), service)


class KubeApi:
    """The EndpointSlices of a Service. All calls raise ``KubeProblem``, ``aiohttp.ClientError`` or ``TimeoutError``,
    and whatever comes of looking into an answer that is none.
    """

    def __init__(self, api: DiscoveryV1Api, namespace: str, service: str) -> None:
        self._api = api
        self._which = {"namespace": namespace, "label_selector": f"{SERVICE_LABEL}={service}"}

    async def list_all(self, patience: float) -> tuple[list[Json], str]:
        """All slices, and the version from which on to watch; within ``patience`` seconds."""
        items: list[Json] = []
        more: str | None = None
        left = _MAX_LIST
        async with asyncio.timeout(patience):
            for _ in range(_MAX_PAGES):
                body = await self._page(more, left)
                left -= len(body)
                page: Json = json.loads(body)
                items += page.get("items") or ()
                more = page["metadata"].get("continue")
                if not more:
                    return items, page["metadata"]["resourceVersion"]
        raise ValueError("a list without an end")

    async def _page(self, token: str | None, most: int) -> bytes:
        call = self._api.list_namespaced_endpoint_slice_without_preload_content
        response = await call(**self._which, limit=_PAGE, _continue=token)
        async with response:
            await _check(response)
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise ValueError("a list without an end")
            return bytes(body)

    async def watch(self, version: str, seconds: int, patience: float) -> AsyncGenerator[list[Json], None]:
        """What happens after ``version``, in lists of events as they come, the first of them empty when the watch is
        open. The API ends it after ``seconds``, and it counts as broken if that takes ``patience`` longer.
        """
        call = self._api.list_namespaced_endpoint_slice_without_preload_content
        async with asyncio.timeout(patience):
            response = await call(
                **self._which,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=seconds,
                _request_timeout=seconds + patience,
            )
        async with response:
            await _check(response)
            yield []
            async for lines in _lines(response):
                yield [_event(line) for line in lines if line]


async def _check(response: ClientResponse) -> None:
    if response.status != 200:
        after = response.headers.get("Retry-After", "")
        seconds = float(after) if after.isascii() and after.isdigit() else 0.0
        raise KubeProblem(response.status, response.reason or "", seconds)


async def _lines(response: ClientResponse) -> AsyncIterator[list[bytes]]:
    """Whole lines. Of a stream that breaks in the middle of one, that is left out."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        end = chunk.rfind(b"\n")
        rest += chunk[: end + 1] or chunk
        if end >= 0:
            *lines, _ = bytes(rest).split(b"\n")
            rest = bytearray(chunk[end + 1 :])
            yield lines
        if len(rest) > _MAX_EVENT:
            raise ValueError("an event without an end")


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        raise KubeProblem(int(status.get("code") or 0), str(status.get("reason") or "an error of the watch"))
    return event
