"""``ProbeServer``: the HTTP server of the engine's metrics and probes."""

import json
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from sys import exception
from threading import Lock, Thread

from prometheus_client import CollectorRegistry, MetricsHandler
from quire_proto.cli import describe_listen_error
from quire_proto.local_hosts import CONTAINER_HOSTS, is_local_host, is_loopback

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Each connection has a thread. One more closes the oldest: monitoring clients ask once and read at once."""
_OK = HTTPStatus.OK, {"status": "ok"}
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE, {"status": "unavailable"}
_NO_PAGE = "There is no such page: an engine has metrics and probes here, and is reached by clients through a router."
_NOT_FOUND = HTTPStatus.NOT_FOUND, {"error": _NO_PAGE}
_OTHER_HOST = HTTPStatus.FORBIDDEN, {"error": "this port is asked by names of this machine alone, as localhost"}


class ProbeServer:
    """Serves ``/metrics``, and each of ``probes`` at its path as 200 or 503, on its own threads. On a loopback address,
    it only accepts host names of this machine. Raises ``OSError`` with the address if it cannot listen.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, probes: Mapping[str, Callable[[], bool]]
    ) -> None:
        is_local = is_loopback(host)

        class Handler(MetricsHandler):
            timeout = 10  # seconds, so that a silent client cannot occupy a thread forever

            def do_GET(self) -> None:  # noqa: N802 - named by the library
                path = self.path.partition("?")[0]
                if is_local and not is_local_host(self.headers.get("Host", "localhost"), CONTAINER_HOSTS):
                    _respond(self, *_OTHER_HOST)
                elif path in probes:
                    _respond(self, *(_OK if probes[path]() else _UNAVAILABLE))
                elif path == "/metrics":
                    super().do_GET()
                else:
                    _respond(self, *_NOT_FOUND)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        Handler.registry = registry
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _BoundedServer((host, port), Handler, family)
        except OSError as error:
            raise OSError(describe_listen_error("--metrics-port", host, port, error)) from error
        self.port: int = self._server.server_address[1]
        Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    """Has at most ``MAX_CONNECTIONS``. A client that disconnects is not an error."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[MetricsHandler], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._changing = Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """``::`` accepts IPv4 too, like gRPC's ports."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Starts the thread of a connection, and ends the oldest connection if there are too many."""
        with self._changing:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """Closes a connection."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs why a request failed, unless its client has gone."""
        del request
        if isinstance(exception(), OSError):
            log.debug("a client of the metrics port broke off: %s", client_address)
        else:
            log.exception("a request at the metrics port failed")


def _respond(handler: MetricsHandler, status: HTTPStatus, content: Mapping[str, str]) -> None:
    body = json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
