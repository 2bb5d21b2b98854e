"""Where the Kubernetes API is, with which credentials, and in which namespace this process runs.

Plain data; ``kube_client`` makes the client.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAMESPACE_FILE = SERVICE_ACCOUNT / "namespace"


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


def pod_namespace() -> str:
    """The namespace of this pod. Raises ``ValueError`` outside of a pod."""
    try:
        return _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError("--scaling-port needs --scaling-namespace: this does not run in a pod") from error
