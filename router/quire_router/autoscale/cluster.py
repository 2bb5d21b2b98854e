"""What a router asks of the cluster in which it runs: one ConfigMap. Takes long to import: better where it is used, and
before anything is served.
"""

import json
import os

from kubernetes.aio.client import ApiClient, Configuration, CoreV1Api
from kubernetes.aio.config import load_incluster_config, load_kube_config


class ClusterError(Exception):
    """The API refused."""


async def read_config_map(namespace: str, name: str) -> dict[str, str]:
    """The contents of a ConfigMap, as the file that ``KUBECONFIG`` names has access to it, else as the pod has. Raises
    ``ClusterError``, and whatever the client's libraries do.
    """
    configuration = Configuration()
    if kubeconfig := os.environ.get("KUBECONFIG"):
        await load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        load_incluster_config(configuration)
    async with ApiClient(configuration) as client:
        call = CoreV1Api(client).read_namespaced_config_map_without_preload_content
        async with await call(name, namespace) as response:
            if response.status != 200:
                raise ClusterError(f"{response.status} {response.reason}")
            contents: dict[str, str] = json.loads(await response.read()).get("data") or {}
            return contents
