"""Where the Kubernetes API is and as whom it is asked. Plain data; ``kube_client`` makes the client."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """With the file that ``kubeconfig`` names, else as the pod whose service account's files are in ``account``."""

    kubeconfig: str | None = None
    account: Path = SERVICE_ACCOUNT

    @classmethod
    def of_environment(cls) -> Self:
        """Raises ``ValueError`` where there is neither ``KUBECONFIG`` nor what every pod has."""
        kubeconfig = os.environ.get("KUBECONFIG")
        if not kubeconfig and not os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise ValueError("the Kubernetes API can be asked from a pod only, or with the variable KUBECONFIG")
        return cls(kubeconfig or None)


# The name of the namespace in which this runs.


_FILE = SERVICE_ACCOUNT / "namespace"


def pod_namespace() -> str:
    """As every pod is told it. Raises ``ValueError`` outside of one."""
    try:
        return _FILE.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError("--scaling-port needs --scaling-namespace: this does not run in a pod") from error
