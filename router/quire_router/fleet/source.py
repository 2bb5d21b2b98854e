"""What ``--engine`` names: one engine, or a place that knows engines. Does no I/O."""

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_DNS = re.compile(r"dns://(?P<name>[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}))(?::(?P<port>[0-9]{1,5}))")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(
    rf"kubernetes://((?P<namespace>{_LABEL})/)?(?P<service>{_LABEL})(:(?P<port>[a-z0-9-]{{1,15}}))?"
)
DEFAULT_PORT_NAME = "grpc"


@dataclass(frozen=True, slots=True)
class Address:
    """One engine, ``HOST:PORT``."""

    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True)
class DnsName:
    """All addresses of a name: ``dns://NAME:PORT``."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns://{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """The endpoints of a Service: ``kubernetes://[NAMESPACE/]SERVICE[:PORT]``. ``port`` is the name that the Service
    gives it or a number; without ``namespace`` it is the pod's own.
    """

    namespace: str | None
    service: str
    port: str | int = DEFAULT_PORT_NAME

    def __str__(self) -> str:
        namespace = "" if self.namespace is None else f"{self.namespace}/"
        return f"kubernetes://{namespace}{self.service}:{self.port}"


Source = Address | DnsName | KubernetesService


def parse_source(entry: str) -> Source:
    """Raises ``ValueError`` where the entry is none of the three."""
    source = _parse(entry)
    if source is None:
        raise ValueError(f"{entry!r} is not HOST:PORT, dns://NAME:PORT or kubernetes://[NAMESPACE/]SERVICE[:PORT]")
    return source


def _parse(entry: str) -> Source | None:
    if match := _ADDRESS.fullmatch(entry):
        return Address(entry) if _is_port(match["port"]) else None
    if match := _DNS.fullmatch(entry):
        return DnsName(match["name"], int(match["port"])) if _is_port(match["port"]) else None
    if match := _KUBERNETES.fullmatch(entry):
        port = match["port"] or DEFAULT_PORT_NAME
        if not port.isdigit():
            return KubernetesService(match["namespace"], match["service"], port)
        if _is_port(port):
            return KubernetesService(match["namespace"], match["service"], int(port))
    return None


def _is_port(text: str) -> bool:
    return 1 <= int(text) <= 65535
