"""What a router asks of the cluster in which it runs: one ConfigMap."""

import json

from quire_router.kube_access import KubeAccess
from quire_router.kube_client import kube_client


class ClusterError(Exception):
    """The API refused."""


async def read_config_map(namespace: str, name: str) -> dict[str, str]:
    """The contents of a ConfigMap, as the file that ``KUBECONFIG`` names has access to it, else as the pod has. Raises
    ``ClusterError``, and whatever the client's libraries do.
    """
    from kubernetes.aio.client import CoreV1Api

    async with kube_client(KubeAccess.of_environment()) as client:
        call = CoreV1Api(client).read_namespaced_config_map_without_preload_content
        async with await call(name, namespace) as response:
            if response.status != 200:
                raise ClusterError(f"{response.status} {response.reason}")
            contents: dict[str, str] = json.loads(await response.read()).get("data") or {}
            return contents
