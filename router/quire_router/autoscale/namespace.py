"""The name of the namespace in which this runs."""

from quire_router.kube_access import SERVICE_ACCOUNT

_FILE = SERVICE_ACCOUNT / "namespace"


def pod_namespace() -> str:
    """As every pod is told it. Raises ``ValueError`` outside of one."""
    try:
        return _FILE.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError("--scaling-port needs --scaling-namespace: this does not run in a pod") from error
