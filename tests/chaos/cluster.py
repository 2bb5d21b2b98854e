"""What Kubernetes does for a stack: engines get addresses, of this host and each new one another, and an API server
publishes them to routers.
"""

from itertools import count

from tests.support.kube_api import Json, KubeApiServer, endpoint, slice_of
from tests.support.ports import free_port

SERVICE = "engines"
_FIRST = 0x7F_4D_00_01  # 127.77.0.1
_SLICES = 2


class Cluster:
    """Endpoints are in several slices, as those of a large Service. ``port`` is that of all engines."""

    def __init__(self) -> None:
        self.api = KubeApiServer()
        self.api.port = free_port()  # so that no other process takes it while it is away
        self.port = free_port()
        self._numbers = count(_FIRST)
        self._endpoints: dict[str, Json] = {}

    @property
    def engines(self) -> str:
        """The routers' setting."""
        return f"kubernetes://{SERVICE}:grpc"

    def new_host(self) -> str:
        """An address that no engine had."""
        return ".".join(str(byte) for byte in next(self._numbers).to_bytes(4))

    def publish(self, host: str, *, terminating: bool = False) -> None:
        """There is an engine; what terminates serves until it is gone."""
        self._endpoints[host] = endpoint(host, ready=not terminating, serving=True, terminating=terminating)
        self._write(host)

    def forget(self, host: str) -> None:
        """There is none at this address any more."""
        self._endpoints.pop(host, None)
        self._write(host)

    def _write(self, host: str) -> None:
        number = _slice_of(host)
        endpoints = [each for other, each in self._endpoints.items() if _slice_of(other) == number]
        self.api.put(slice_of(f"{SERVICE}-{number}", endpoints, service=SERVICE, ports=[("grpc", self.port)]))


def _slice_of(host: str) -> int:
    return int(host.rpartition(".")[2]) % _SLICES
