"""What discovery is made of: the ``Discovery`` protocol, ``Endpoint``, what ``--engine`` can name, and
``SourceHealth``.

Implementations: ``combined`` (several sources as one, and fixed addresses), ``dns`` and ``kubernetes``.
"""

import logging
import re
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Literal, Protocol

from quire_proto.cli import join_host_port

from quire_router.core import metrics

log = logging.getLogger(__name__)

_LOGGED_BREAKS = 5
"""Failures with a response between each two that are worth a warning, if none of the connections lasted."""
_MAX_PROBLEM = 200  # characters of a problem that are logged: a source may answer anything


Readiness = Literal["hint", "external", "all"]
"""For which engines ``Endpoint.ready`` is more than a hint: none, servers that others have written, or all."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine at ``address``: ``host:port``, or the URL of a server that is not Quire's, with its kind before it
    (``vllm+http://host:port``).

    One that is ``terminating`` gets nothing new, and what runs there goes on. ``ready`` is a hint: the connection knows
    sooner and better whether an engine would run a request, as the engine reports every step, than a probe that asks
    every few seconds and fails while the engine is merely busy. So an engine with an open session is chosen whatever
    ``ready`` says, and one that becomes ready is connected to at once. Sources that have no readiness report True.
    ``zone`` is that of its node, and ``pod`` its ``NAMESPACE/NAME``; None if unknown.
    """

    address: str
    ready: bool = True
    terminating: bool = False
    zone: str | None = None
    pod: str | None = None


def format_address(host: str, port: int, *, six: bool) -> str:
    """``host:port`` of an IP address in canonical form, so that one engine has one address whichever source names it.
    Raises ``ValueError`` if ``host`` is not an address of IPv4, or with ``six`` of IPv6.
    """
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        host = socket.inet_ntop(family, socket.inet_pton(family, host))
    except OSError:
        raise ValueError(f"{host!r} is not an address of IPv{6 if six else 4}") from None
    return join_host_port(host, port)


def merge_endpoints(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """One endpoint for each address, in the order in which addresses first come.

    An address can occur more than once: in two sources, while Kubernetes moves it from one slice to another, or because
    a new pod has it. Then an endpoint that is not terminating counts, and of those one that is ready.
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
        """Yields all engines once they are known, and again whenever they change. Does not end or fail when the source
        cannot be reached: the last list stays valid until it can. May be called again after what it returned was
        closed, and then yields all engines anew.
        """
        ...


_ADDRESS = re.compile(r"(\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")
_DNS = re.compile(r"dns://(?P<name>[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}))(?::(?P<port>[0-9]{1,5}))")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(
    rf"kubernetes://((?P<namespace>{_LABEL})/)?(?P<service>{_LABEL})(:(?P<port>[a-z0-9-]{{1,15}}))?"
)
DEFAULT_PORT_NAME = "grpc"

EXTERNAL_KINDS = ("vllm", "sglang", "openai")
"""Servers that others have written, which speak HTTP."""

_EXTERNAL = re.compile(rf"(?P<kind>{'|'.join(EXTERNAL_KINDS)})\+(?P<rest>.*)")
_URL = re.compile(
    r"(?P<scheme>https?)://(\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(:(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(/[A-Za-z0-9._~-]+)*)/?"
)
_EXTERNAL_PORT_NAME = "http"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """One engine, ``HOST:PORT``, or ``KIND+http(s)://HOST[:PORT][/PATH]``, where ``PATH`` is what stands before the
    server's own paths.
    """

    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True)
class DnsName:
    """All addresses of a name: ``[KIND+]dns://NAME:PORT``. ``kind`` is empty for Quire's engines."""

    name: str
    port: int
    kind: str = ""

    def __str__(self) -> str:
        return f"{_prefix(self.kind)}dns://{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """The endpoints of a Service: ``[KIND+]kubernetes://[NAMESPACE/]SERVICE[:PORT]``. ``port`` is the name that the
    Service gives it or a number; without ``namespace`` it is the pod's own. ``kind`` is empty for Quire's engines.
    """

    namespace: str | None
    service: str
    port: str | int = DEFAULT_PORT_NAME
    kind: str = ""

    def __str__(self) -> str:
        namespace = "" if self.namespace is None else f"{self.namespace}/"
        return f"{_prefix(self.kind)}kubernetes://{namespace}{self.service}:{self.port}"


def _prefix(kind: str) -> str:
    return f"{kind}+" if kind else ""


EngineSource = Address | DnsName | KubernetesService


def parse_source(entry: str) -> EngineSource:
    """What an entry of ``--engine`` names. Raises ``ValueError`` if it is nothing that can be one."""
    external = _EXTERNAL.fullmatch(entry)
    try:
        return _parse(entry) if external is None else _parse_external(external["kind"], external["rest"])
    except ValueError:
        forms = "HOST:PORT, dns://NAME:PORT or kubernetes://[NAMESPACE/]SERVICE[:PORT]"
        if external is not None:
            forms = "http(s)://HOST[:PORT][/PATH], dns://NAME:PORT or kubernetes://[NAMESPACE/]SERVICE[:PORT]"
            forms = f"{external['kind']}+ before {forms}"
        raise ValueError(f"{entry!r} is not {forms}") from None


def split_external(address: str) -> tuple[str, str]:
    """Kind and URL of a server that is not Quire's, as ``Endpoint.address`` has it; both empty for Quire's engines."""
    match = _EXTERNAL.fullmatch(address)
    return ("", "") if match is None else (match["kind"], match["rest"])


def http_endpoint(address: str) -> str | None:
    """``IP:PORT`` of a server that is not Quire's, as ``Endpoint.address`` has it, if somebody who knows no more can
    send it requests of HTTP: it speaks no TLS, and has no path before its own ones. None otherwise, and for the name of
    a host.
    """
    match = _URL.fullmatch(split_external(address)[1])
    if match is None or match["scheme"] != "http" or match["path"]:
        return None
    port = int(match["port"] or _DEFAULT_PORTS["http"])
    try:
        return format_address(match["six"] or match["host"], port, six=bool(match["six"]))
    except ValueError:
        return None


def _parse_external(kind: str, rest: str) -> EngineSource:
    if match := _URL.fullmatch(rest):
        port = _port(match["port"]) if match["port"] else _DEFAULT_PORTS[match["scheme"]]
        host = format_address(match["six"], port, six=True) if match["six"] else f"{match['host']}:{port}"
        return Address(f"{kind}+{match['scheme']}://{host}{match['path']}")
    source = _parse(rest)
    if isinstance(source, Address):
        raise ValueError(rest)
    if isinstance(source, KubernetesService) and source.port == DEFAULT_PORT_NAME:
        source = replace(source, port=_EXTERNAL_PORT_NAME)
    return replace(source, kind=kind)


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


class SourceHealth:
    """Whether ``source`` (as ``--engine`` names it) can be reached, for metrics and the log. Called for every response
    and every failure.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._unanswered = self._unstable = 0
        self._connected = metrics.DISCOVERY_CONNECTED.labels(source)
        self._last_response = metrics.DISCOVERY_HEARD.labels(source)
        self._connected.set(0)

    def on_response(self) -> None:
        """The source answered: the known engines are up to date."""
        if self._unanswered > 1:
            log.info("%s answers again", self._source)
        self._unanswered = 0
        self._connected.set(1)
        self._last_response.set(time())

    def on_stable(self) -> None:
        """The source has answered for more than a moment."""
        self._unstable = 0

    def on_failure(self, problem: str) -> None:
        """The known engines may be out of date. A connection that ends is not logged as a warning; that none can be
        made is, and that each one breaks at once.
        """
        self._unanswered += 1
        self._unstable += 1
        self._connected.set(0)
        problem = " ".join(problem.split())[:_MAX_PROBLEM]
        if self._unanswered == 2:
            log.warning("cannot query %s, keeping the engines that are known: %s", self._source, problem)
        elif self._unanswered == 1 and self._unstable == _LOGGED_BREAKS:
            log.warning("%s keeps breaking off: %s", self._source, problem)
        else:
            log.debug("%s: %s", self._source, problem)
