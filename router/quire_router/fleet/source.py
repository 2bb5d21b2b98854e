"""What ``--engine`` names: one engine, or a place that knows engines. Does no I/O."""

import re
from dataclasses import dataclass

from quire_router.fleet.endpoint import address_of

_ADDRESS = re.compile(r"(\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")
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
    try:
        return _parse(entry)
    except ValueError:
        kinds = "HOST:PORT, dns://NAME:PORT or kubernetes://[NAMESPACE/]SERVICE[:PORT]"
        raise ValueError(f"{entry!r} is not {kinds}") from None


def _parse(entry: str) -> Source:
    if match := _ADDRESS.fullmatch(entry):
        port = _port(match["port"])
        return Address(address_of(match["six"], port, six=True) if match["six"] else f"{match['host']}:{port}")
    if match := _DNS.fullmatch(entry):
        return DnsName(match["name"], _port(match["port"]))
    if match := _KUBERNETES.fullmatch(entry):
        name = match["port"] or DEFAULT_PORT_NAME
        return KubernetesService(match["namespace"], match["service"], _port(name) if name.isdigit() else name)
    raise ValueError(entry)


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise ValueError(text)
    return port
