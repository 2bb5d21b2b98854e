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
from kubernetes.aio.client import ApiClient, Configuration, DiscoveryV1Api
from kubernetes.aio.config import list_kube_config_contexts, load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from quire_router.fleet.access import Access
from quire_router.fleet.slices import Json

SERVICE_LABEL = "kubernetes.io/service-name"
_MAX_LINE = 64 * 2**20
_PAGE = 100  # slices, of a hundred endpoints each unless somebody changed that


class KubeProblem(Exception):  # noqa: N818 - handled where it is raised, and told of in the log
    """The API refused. ``code`` is the HTTP status; ``retry_after`` the seconds to wait, where it said so."""

    def __init__(self, code: int, text: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.retry_after = retry_after


@asynccontextmanager
async def connect(access: Access, namespace: str | None, service: str) -> AsyncIterator["KubeApi"]:
    """Reads certificates and token anew, as they are changed from time to time; the token of a pod is also read again
    every minute. Raises ``ConfigException``, ``OSError`` or ``ValueError`` where they cannot be used.
    """
    configuration = Configuration()
    if access.kubeconfig is not None:
        await load_kube_config(access.kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        loader = InClusterConfigLoader(str(access.account / "token"), str(access.account / "ca.crt"))
        loader.load_and_set(configuration)
    client = ApiClient(configuration)
    try:
        yield KubeApi(DiscoveryV1Api(client), namespace or _own_namespace(access), service)
    finally:
        await client.close()


def _own_namespace(access: Access) -> str:
    if access.kubeconfig is None:
        return (access.account / "namespace").read_text().strip()
    _, current = list_kube_config_contexts(access.kubeconfig)
    return str(current["context"].get("namespace") or "default")


class KubeApi:
    """The EndpointSlices of a Service. All calls raise ``KubeProblem``, ``aiohttp.ClientError`` or ``TimeoutError``."""

    def __init__(self, api: DiscoveryV1Api, namespace: str, service: str) -> None:
        self._api = api
        self._which = {"namespace": namespace, "label_selector": f"{SERVICE_LABEL}={service}"}

    async def list_all(self, patience: float) -> tuple[list[Json], str]:
        """All slices, and the version from which on to watch; within ``patience`` seconds."""
        items: list[Json] = []
        more: str | None = None
        async with asyncio.timeout(patience):
            while True:
                page = await self._page(more)
                items += page.get("items") or ()
                more = page["metadata"].get("continue")
                if not more:
                    return items, page["metadata"]["resourceVersion"]

    async def _page(self, token: str | None) -> Json:
        call = self._api.list_namespaced_endpoint_slice_without_preload_content
        response = await call(**self._which, limit=_PAGE, _continue=token)
        async with response:
            await _check(response)
            page: Json = json.loads(await response.read())
            return page

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
        await response.read()
        after = response.headers.get("Retry-After", "")
        raise KubeProblem(response.status, response.reason or "", float(after) if after.isdigit() else 0.0)


async def _lines(response: ClientResponse) -> AsyncIterator[list[bytes]]:
    """Whole lines. Of a stream that breaks in the middle of one, that is left out."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE:
            raise KubeProblem(0, "an event without an end")
        yield lines


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        raise KubeProblem(status.get("code") or 0, status.get("reason") or "an error of the watch")
    return event
