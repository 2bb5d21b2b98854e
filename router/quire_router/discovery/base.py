"""Where engines are found. Implementations: ``static``, ``dns``, ``kubernetes``, and ``combined`` of several."""

import logging
import re
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from time import time
from typing import Protocol

from quire_proto.cli import join_host_port

from quire_router.core import metrics

log = logging.getLogger(__name__)

# Where an engine is, as a source of engines says it. Plain data, and how several sayings become one.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine at ``address`` (``host:port``).

    One that is ``terminating`` gets nothing new, and what runs there goes on. ``ready`` is a hint: whether a request
    that is sent now would be run is known by the link, whose engine speaks at every step, sooner and better than by a
    probe that asks every few seconds and fails where the engine is merely busy. So an engine with an open session is
    chosen whatever ``ready`` says, and one that becomes ready is connected to at once. Sources that cannot tell say
    that all are ready. ``zone`` is that of its node, where it is known.
    """

    address: str
    ready: bool = True
    terminating: bool = False
    zone: str | None = None


def format_address(host: str, port: int, *, six: bool) -> str:
    """``host:port`` of an IP address, written as every source writes it, so that one engine has one address. Raises
    ``ValueError`` where ``host`` is no address of IPv4, or of IPv6 where ``six``.
    """
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        host = socket.inet_ntop(family, socket.inet_pton(family, host))
    except OSError:
        raise ValueError(f"{host!r} is no address of IPv{6 if six else 4}") from None
    return join_host_port(host, port)


def merge_endpoints(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """One endpoint for each address, in the order in which addresses first come.

    An address can be told of more than once: by two sources, while Kubernetes moves it from one slice to another, or
    because a new pod has it. Then the one that lives counts, and of those that do, one that is ready.
    """
    known: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        before = known.get(endpoint.address)
        if before is None or _rank(endpoint) > _rank(before):
            known[endpoint.address] = endpoint
    return tuple(known.values())


def _rank(endpoint: Endpoint) -> tuple[bool, bool, bool]:
    return not endpoint.terminating, endpoint.ready, endpoint.zone is not None


class Discovery(Protocol):
    """A source of engines."""

    def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields all engines that are known, as soon as that can be said, and again whenever it changes. Never ends
        because the source cannot be asked: what was said last stands until it can. May be called again after what it
        returned was closed, and then yields all engines anew.
        """
        ...


# What ``--engine`` names: one engine, or a place that knows engines. Does no I/O.


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


EngineSource = Address | DnsName | KubernetesService


def parse_source(entry: str) -> EngineSource:
    """Raises ``ValueError`` where the entry is none of the three."""
    try:
        return _parse(entry)
    except ValueError:
        kinds = "HOST:PORT, dns://NAME:PORT or kubernetes://[NAMESPACE/]SERVICE[:PORT]"
        raise ValueError(f"{entry!r} is not {kinds}") from None


def _parse(entry: str) -> EngineSource:
    if match := _ADDRESS.fullmatch(entry):
        port = _port(match["port"])
        return Address(format_address(match["six"], port, six=True) if match["six"] else f"{match['host']}:{port}")
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


# Whether a source of engines can be asked, for the metrics and the log.


_FEW = 5
"""Failures between which something was heard that are worth a warning, where none of it lasted."""
_LONGEST = 200  # characters of a problem: who is asked may answer whatever it likes


class SourceHealth:
    """Of the source that is configured as ``source``. It is told of every answer and of every failure."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._unanswered = self._unsteady = 0
        self._connected = metrics.DISCOVERY_CONNECTED.labels(source)
        self._heard = metrics.DISCOVERY_HEARD.labels(source)
        self._connected.set(0)

    def on_response(self) -> None:
        """What is known is true now."""
        if self._unanswered > 1:
            log.info("%s answers again", self._source)
        self._unanswered = 0
        self._connected.set(1)
        self._heard.set(time())

    def on_stable(self) -> None:
        """It answered, and not only for a moment."""
        self._unsteady = 0

    def on_failure(self, problem: str) -> None:
        """What is known may have become old. A connection that ends is no news; that none can be made is, and that each
        one ends at once.
        """
        self._unanswered += 1
        self._unsteady += 1
        self._connected.set(0)
        told = " ".join(problem.split())[:_LONGEST]
        if self._unanswered == 2:
            log.warning("%s cannot be asked, and the engines that are known stay: %s", self._source, told)
        elif self._unanswered == 1 and self._unsteady == _FEW:
            log.warning("%s answers and breaks off, again and again: %s", self._source, told)
        else:
            log.debug("%s: %s", self._source, told)
