"""Where the Kubernetes API is, with which credentials, and clients of it: each component that uses it has its own.

The library takes half a second to import, and 20 MB: it is imported where a client is made, before anything is served.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quire_proto.extras import install_command

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """Access with the file ``kubeconfig``; None: as the pod whose service account's files are in ``account``."""

    kubeconfig: str | None = None
    account: Path = SERVICE_ACCOUNT

    @classmethod
    def of_environment(cls) -> Self:
        """From ``KUBECONFIG``, or the pod's. Raises ``ValueError`` if that variable is not set and this is no pod."""
        kubeconfig = os.environ.get("KUBECONFIG")
        if not kubeconfig and not os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise ValueError("the Kubernetes API can be asked from a pod only, or with the variable KUBECONFIG")
        return cls(kubeconfig or None)


def require_library(what: str) -> None:
    """Raises ``ValueError`` if the library that ``what`` needs is not installed: it takes 120 MB, and only routers in
    Kubernetes need it.
    """
    if find_spec("kubernetes") is None:
        raise ValueError(f"{what} needs the package kubernetes: {install_command('quire-router', 'kubernetes')}")


@asynccontextmanager
async def kube_client(access: KubeAccess) -> AsyncIterator["ApiClient"]:
    """A client with certificates and token as they are now, since they are replaced from time to time; it also reads
    the token of a pod again every minute. Raises ``ConfigException``, ``OSError`` or ``ValueError`` if they cannot be
    used.
    """
    from kubernetes.aio.client import ApiClient, Configuration
    from kubernetes.aio.config import load_kube_config
    from kubernetes.aio.config.incluster_config import InClusterConfigLoader

    configuration = Configuration()
    if access.kubeconfig is not None:
        await load_kube_config(access.kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        loader = InClusterConfigLoader(str(access.account / "token"), str(access.account / "ca.crt"))
        loader.load_and_set(configuration)
    async with ApiClient(configuration) as client:
        yield client


def own_namespace(access: KubeAccess) -> str:
    """The pod's namespace, which needs no client, or that of the file's current context. Raises as ``kube_client``
    does: ``OSError`` outside of a pod.
    """
    if access.kubeconfig is None:
        return (access.account / "namespace").read_text(encoding="ascii").strip()
    from kubernetes.aio.config import list_kube_config_contexts

    _, current = list_kube_config_contexts(access.kubeconfig)
    return str(current["context"].get("namespace") or "default")


class ClusterError(Exception):
    """The API refused."""


async def read_config_map(namespace: str, name: str) -> dict[str, str]:
    """The data of a ConfigMap, read with the access of ``KubeAccess.of_environment``. Raises ``ClusterError``, and what
    the client's libraries raise.
    """
    from kubernetes.aio.client import CoreV1Api

    async with kube_client(KubeAccess.of_environment()) as client:
        call = CoreV1Api(client).read_namespaced_config_map_without_preload_content
        async with await call(name, namespace) as response:
            if response.status != 200:
                raise ClusterError(f"{response.status} {response.reason}")
            contents: dict[str, str] = json.loads(await response.read()).get("data") or {}
            return contents
