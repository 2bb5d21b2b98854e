"""Two routers, two engines and a Redis, all of them real, for tests of what routers share; and a third router whose
engine can be reached only later.
"""

import json
import socket
import socketserver
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx
from openai import OpenAI
from quire.v1.inference_pb2_grpc import InferenceStub

from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Engine, Router, eventually, fetch
from tests.support.redis_server import RedisServer, redis_server

MODEL = "quire-demo"
FEW = 8  # tenants with few requests a minute
TENANTS: dict[str, dict[str, Any]] = {
    "reader": {},
    "stranger": {},
    "elsewhere": {"models": ["another-model"]},
    **{f"few-{number}": {"requests_per_minute": 3} for number in range(FEW)},
    "short": {"tokens_per_minute": 100},
    "single": {"max_concurrent": 1},
}
ENGINE_FLAGS = ("--dtype", "float32", "--kv-cache-memory", str(64 << 20), "--swap-space", "0.0625")
HOLD = 120


def key_of(tenant: str) -> str:
    """The API key of one of ``TENANTS``."""
    return f"key-of-the-tenant-{tenant}"


class RouterClients:
    """The clients of one tenant at one router."""

    def __init__(self, router: Router, tenant: str = "reader") -> None:
        self.router = router
        self.openai = OpenAI(base_url=f"{router.url}/v1", api_key=key_of(tenant), max_retries=0, timeout=90)
        self.http = httpx.Client(base_url=router.url, headers=dict([self._authorization(tenant)]), timeout=90)
        self.metadata = (self._authorization(tenant),)
        self._channel = grpc.insecure_channel(router.grpc_address)
        self.grpc = InferenceStub(self._channel)

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        self._channel.close()

    @staticmethod
    def _authorization(tenant: str) -> tuple[str, str]:
        return "authorization", f"Bearer {key_of(tenant)}"


class _Forward(socketserver.BaseRequestHandler):
    server: "LatePort"

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as there:
            back = Thread(target=_copy, args=(there, self.request), daemon=True)
            back.start()
            _copy(self.request, there)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


class LatePort(socketserver.ThreadingTCPServer):
    """A port that is taken and refuses connections until it is opened; then it is that of ``target``."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward, bind_and_activate=False)
        self.target = target
        self._serving: Thread | None = None
        self.server_bind()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def open(self) -> None:
        self.server_activate()
        self._serving = Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._serving.start()

    def server_close(self) -> None:
        if self._serving is not None:
            self.shutdown()
        super().server_close()


@dataclass(frozen=True)
class Replicas:
    """``late`` is the third router, and ``late_port`` the one under which it looks for its engine."""

    redis: RedisServer
    engines: list[Engine]
    routers: list[Router]
    late: Router
    late_port: LatePort

    @contextmanager
    def clients(self, tenant: str = "reader") -> Iterator[list[RouterClients]]:
        """A tenant's clients, of each of the two routers."""
        clients = [RouterClients(router, tenant) for router in self.routers]
        try:
            yield clients
        finally:
            for client in clients:
                client.close()

    def generated(self) -> float:
        """Tokens that the engines have made."""
        return sum(engine.metric("quire_engine_generation_tokens_total") for engine in self.engines)

    def running(self) -> float:
        """Sequences that the engines are at."""
        return sum(engine.metric("quire_engine_running_sequences") for engine in self.engines)


def write_tenants(folder: Path, tenants: Mapping[str, Mapping[str, Any]]) -> Path:
    """A file of tenants, each with one key."""
    path = folder / "tenants.json"
    entries = [{"name": name, "keys": [key_of(name)], **limits} for name, limits in tenants.items()]
    path.write_text(json.dumps({"tenants": entries}))
    return path


@contextmanager
def replicas(model: Path, folder: Path) -> Iterator[Replicas]:
    """All of them, ready, but for the late one. Everything has to end in order."""
    flags = ("--tenants", str(write_tenants(folder, TENANTS)), "--debug-route", "--hold-timeout", str(HOLD))
    with redis_server() as redis, ExitStack() as ending:
        engines = [ForkedEngine(model, folder, *ENGINE_FLAGS) for _ in range(2)]
        addresses = [engine.address for engine in engines]
        routers = [ForkedRouter(model, addresses, folder, *flags, "--redis-url", redis.url) for _ in range(2)]
        late_port = ending.enter_context(LatePort(engines[0].port))
        late = ForkedRouter(model, [late_port.address], folder, *flags)
        processes = [late, *routers, *engines]
        try:
            for process in (*engines, *routers):
                process.wait_ready()
            for router in routers:
                eventually(lambda router=router: router.metric("quire_engines_ready") == 2)
            eventually(lambda: fetch(late.http_port, "/live")[0] == 200)
            yield Replicas(redis, engines, routers, late, late_port)
        finally:
            codes = [process.stop() for process in processes]
    assert codes == [0] * len(processes), [process.text for process in processes]
