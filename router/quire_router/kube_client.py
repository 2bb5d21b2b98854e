"""Clients of the Kubernetes API: each room that asks it has one of its own. Knows no call of any room.

Takes half a second to import, and 20 MB: better where it is used, and before anything is served.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import list_kube_config_contexts, load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from quire_router.kube_access import KubeAccess


@asynccontextmanager
async def kube_client(access: KubeAccess) -> AsyncIterator[ApiClient]:
    """Reads certificates and token anew, as they are changed from time to time; the token of a pod is also read again
    every minute. Raises ``ConfigException``, ``OSError`` or ``ValueError`` where they cannot be used.
    """
    configuration = Configuration()
    if access.kubeconfig is not None:
        await load_kube_config(access.kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        loader = InClusterConfigLoader(str(access.account / "token"), str(access.account / "ca.crt"))
        loader.load_and_set(configuration)
    async with ApiClient(configuration) as client:
        yield client


def own_namespace(access: KubeAccess) -> str:
    """The pod's, or that of the file's current context. Raises as ``kube_client`` does."""
    if access.kubeconfig is None:
        return (access.account / "namespace").read_text(encoding="ascii").strip()
    _, current = list_kube_config_contexts(access.kubeconfig)
    return str(current["context"].get("namespace") or "default")
