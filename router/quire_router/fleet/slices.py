"""A Service's EndpointSlices, as the Kubernetes API writes them, and the engines they are together. Does no I/O."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from quire_router.fleet.endpoint import Endpoint, address_of, merged

Json = Mapping[str, Any]
_FAMILIES = ("IPv4", "IPv6")


@dataclass(frozen=True, slots=True)
class _Slice:
    family: str
    endpoints: tuple[Endpoint, ...]
    has_port: bool


class Slices:
    """The slices of one Service by their names. ``port`` is the port's name or its number.

    What is given is not believed to be a slice: it is taken whole, or raises some ``Exception`` and changes nothing.
    """

    def __init__(self, port: str | int) -> None:
        self._port = port
        self._slices: dict[str, _Slice] = {}

    def replace(self, items: Iterable[Json]) -> None:
        """Takes a list of all slices, which leaves nothing of what was known."""
        self._slices = {_name(item): self._read(item) for item in items}

    def put(self, item: Json) -> None:
        """Takes a slice that is new or was changed."""
        self._slices[_name(item)] = self._read(item)

    def drop(self, item: Json) -> None:
        """Takes that a slice is gone."""
        self._slices.pop(_name(item), None)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All engines, each once, in the order of the slices' names.

        A pod of a Service with both families is in a slice of each, and would be two engines. So one family counts:
        IPv4 where there is such a slice, even an empty one, which does not change while pods come and go.
        """
        slices = [self._slices[name] for name in sorted(self._slices)]
        family = next((each for each in _FAMILIES if any(part.family == each for part in slices)), None)
        return merged(chain.from_iterable(part.endpoints for part in slices if part.family == family))

    @property
    def lacking_port(self) -> tuple[str, ...]:
        """The slices that do not have the port, so that their pods cannot be reached."""
        return tuple(sorted(name for name, part in self._slices.items() if not part.has_port))

    def _read(self, item: Json) -> _Slice:
        port, family = self._port_of(item), item.get("addressType") or ""
        listed = item.get("endpoints") or ()
        endpoints: tuple[Endpoint, ...] = ()
        if port is not None and family in _FAMILIES:
            endpoints = tuple(_endpoints(listed, port, family))
        return _Slice(family, endpoints, port is not None or not listed)

    def _port_of(self, item: Json) -> int | None:
        if isinstance(self._port, int):
            return self._port
        ports = item.get("ports") or ()
        port = next((each.get("port") for each in ports if each.get("name") == self._port), None)
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise ValueError(f"{port!r} is no port")
        return port


def _name(item: Json) -> str:
    return _text(item["metadata"]["name"])


def _endpoints(listed: Iterable[Json], port: int, family: str) -> Iterator[Endpoint]:
    for entry in listed:
        addresses = entry.get("addresses") or ()
        if addresses:  # any of them would do, and all clients take the first
            yield _endpoint(entry, address_of(_text(addresses[0]), port, six=family == "IPv6"))


def _endpoint(entry: Json, address: str) -> Endpoint:
    """``serving`` is the pod's own readiness; ``ready`` is that only until it terminates, and not where the Service
    publishes what is not ready. What is not said means ready, and not terminating.
    """
    conditions, zone = entry.get("conditions") or {}, entry.get("zone")
    ready = conditions.get("serving")
    if ready is None:
        ready = conditions.get("ready")
    terminating = conditions.get("terminating") is True
    return Endpoint(address, ready is not False, terminating, None if zone is None else _text(zone))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where there has to be text")
    return value
