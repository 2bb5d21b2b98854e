"""Names of this machine, for services on loopback addresses that ask for no key. Any web site can have its own name
resolve to such an address (DNS rebinding), so requests for other names are refused: ``is_local_host``.
"""

from collections.abc import Container
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

CONTAINER_HOSTS: Final = (
    "host.docker.internal",
    "gateway.docker.internal",
    "host.containers.internal",
    "host.lima.internal",
    "host.minikube.internal",
    "host.k3d.internal",
    "host.orb.internal",
    "host.rancher-desktop.internal",
)
"""What containers call the machine that they run on: Docker, Podman, Lima, minikube, k3d, OrbStack, Rancher Desktop."""
ANY_HOST: Final = "*"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address or name."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_local_host(authority: str, allowed: Container[str] = ()) -> bool:
    """Returns whether ``HOST`` or ``HOST:PORT``, as in a Host header, names this machine, or is one of the ``allowed``
    names, which are in small letters. An empty one names nothing, and comes from no browser.
    """
    try:
        host = (urlsplit(f"//{authority}").hostname or "").removesuffix(".")
    except ValueError:
        return ANY_HOST in allowed
    return not authority or ANY_HOST in allowed or host in allowed or is_loopback(host)
