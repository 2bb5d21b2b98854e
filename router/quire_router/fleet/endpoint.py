"""Where an engine is, as a source of engines says it. Plain data, and how several sayings become one."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass


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


def address_of(host: str, port: int, *, six: bool) -> str:
    """``host:port`` of an IP address, written as every source writes it, so that one engine has one address. Raises
    ``ValueError`` where ``host`` is no address of IPv4, or of IPv6 where ``six``.
    """
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        host = socket.inet_ntop(family, socket.inet_pton(family, host))
    except OSError:
        raise ValueError(f"{host!r} is no address of IPv{6 if six else 4}") from None
    return f"[{host}]:{port}" if six else f"{host}:{port}"


def merged(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
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
