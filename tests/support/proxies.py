"""nginx and HAProxy before a router: set up word by word as docs/gateways.md says, or with no more than they need."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.processes import Process, Router, eventually

PAGE = Path(__file__).parents[2] / "docs" / "gateways.md"
PATH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"  # where Debian has them; users may not
NGINX, HAPROXY, CURL = (shutil.which(name, path=PATH) for name in ("nginx", "haproxy", "curl"))
"""None if there is none: ``scripts/proxies.sh`` installs them."""
HOST = "127.0.0.1"

# What a package of nginx brings, with everything that it writes in a folder of ours. Only root has a say in
# whose its workers are.
NGINX_MAIN = """\
daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""
# HTTP/1.0 to the router, buffered responses, bodies of 1 MiB at most: nginx does that unasked. Its timeouts are 60 s.
NGINX_LEAST = """\
server {
    listen 80;
    location / {
        proxy_pass http://127.0.0.1:8000;
        proxy_read_timeout 1500ms;
    }
}
server {
    listen 81 http2;
    location / {
        grpc_pass grpc://127.0.0.1:8001;
        grpc_read_timeout 1500ms;
    }
}
"""
# HAProxy has no timeouts of its own; those of Debian's file are 50 s.
HAPROXY_LEAST = """\
defaults
    mode http
    timeout connect 5s
    timeout client 1500ms
    timeout server 1500ms
frontend rest
    bind :80
    default_backend rest
frontend grpc
    bind :81 proto h2
    default_backend grpc
backend rest
    server router 127.0.0.1:8000
backend grpc
    server router 127.0.0.1:8001 proto h2
"""


def of_page(language: str) -> str:
    """The one block of the page in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return text


def replaced(text: str, values: Mapping[str, str]) -> str:
    """``text`` with other values. Each has to stand there."""
    for old, new in values.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


class Proxy(Process, ABC):
    """A proxy before ``router``: as the page has it, one port with TLS for all, or ``least``, with a plain one for REST
    and one for gRPC. ``versions`` are those of HTTP that its clients may speak, as curl's flags.
    """

    def __init__(self, router: Router, authority: Authority, folder: Path, *, least: bool) -> None:
        self.folder, self.ca = folder, None if least else authority.ca
        self.port = free_port()
        self.grpc_port = free_port() if least else self.port
        self.versions = ("http1.0", "http1.1") if least else ("http1.0", "http1.1", "http2")
        servers = {"127.0.0.1:8000": f"{HOST}:{router.http_port}", "127.0.0.1:8001": router.grpc_address}
        command = self._prepare(servers, authority, least=least)
        super().__init__(command, folder / "output.log")

    @abstractmethod
    def _prepare(self, servers: Mapping[str, str], authority: Authority, *, least: bool) -> list[str]:
        """Writes the configuration with the ports of ``servers`` in it; returns the command."""

    @property
    @abstractmethod
    def reload_signal(self) -> signal.Signals: ...

    @property
    def url(self) -> str:
        return f"{'http' if self.ca is None else 'https'}://{HOST}:{self.port}"

    def channel(self) -> grpc.Channel:
        """A channel of its own to the gRPC API."""
        address, options = f"{HOST}:{self.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
        if self.ca is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes()), options)

    def post(self, path: str, body: bytes | Mapping[str, Any], version: str) -> "Post":
        """Begins a request."""
        return Post(f"{self.url}{path}", body, version, self.ca)

    def wait_ready(self) -> "Proxy":
        eventually(lambda: self._listens(self.port) and self._listens(self.grpc_port), message=self.log.name)
        return self

    def _listens(self, port: int) -> bool:
        assert self.popen.poll() is None, self.text
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) == 0

    @property
    def workers(self) -> set[int]:
        """The processes that pass on what comes."""
        return {child.pid for child in psutil.Process(self.popen.pid).children()}

    def reload(self) -> set[int]:
        """Has new processes take what comes from now on; returns those before them, which end with what they have."""
        before = self.workers
        self.signal(self.reload_signal)
        eventually(lambda: self.workers - before)
        return before


class Nginx(Proxy):
    reload_signal = signal.SIGHUP

    def _prepare(self, servers: Mapping[str, str], authority: Authority, *, least: bool) -> list[str]:
        assert NGINX is not None
        if least:
            ports = {"listen 80;": f"listen {HOST}:{self.port};", "listen 81 ": f"listen {HOST}:{self.grpc_port} "}
            server = replaced(NGINX_LEAST, {**servers, **ports})
        else:
            issued = authority.issue(HOST, files="nginx")
            own = {
                "listen 443 ": f"listen {HOST}:{self.port} ",
                "/etc/nginx/quire.crt": str(issued.certificate),
                "/etc/nginx/quire.key": str(issued.key),
            }
            server = replaced(of_page("nginx"), {**servers, **own})
        file = self.folder / "nginx.conf"
        file.write_text(NGINX_MAIN.format(folder=self.folder, server=server))
        return [NGINX, "-p", str(self.folder), "-e", "stderr", "-c", str(file)]


class HAProxy(Proxy):
    reload_signal = signal.SIGUSR2

    def _prepare(self, servers: Mapping[str, str], authority: Authority, *, least: bool) -> list[str]:
        assert HAPROXY is not None
        if least:
            ports = {"bind :80": f"bind {HOST}:{self.port}", "bind :81": f"bind {HOST}:{self.grpc_port}"}
            text = replaced(HAPROXY_LEAST, {**servers, **ports})
        else:
            issued, both = authority.issue(HOST, files="haproxy"), self.folder / "quire.pem"
            both.write_bytes(issued.certificate.read_bytes() + issued.key.read_bytes())
            own = {"bind :443": f"bind {HOST}:{self.port}", "/etc/haproxy/quire.pem": str(both)}
            text = replaced(of_page("haproxy"), {**servers, **own})
        file = self.folder / "haproxy.cfg"
        file.write_text(text)
        return [HAPROXY, "-W", "-f", str(file)]


class Post:
    """A request that curl makes, in a process of its own."""

    def __init__(self, url: str, body: bytes | Mapping[str, Any], version: str, ca: Path | None) -> None:
        assert CURL is not None
        command = [CURL, "--silent", "--no-buffer", "--max-time", "120", f"--{version}", "--data-binary", "@-"]
        command += ["--header", "content-type: application/json", "--header", "expect:"]
        command += ["--write-out", "\n%{http_code}", *(() if ca is None else ("--cacert", str(ca))), url]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._lines: Iterator[bytes] = iter(self._popen.stdout)
        self._popen.stdin.write(body if isinstance(body, bytes) else json.dumps(body).encode())
        self._popen.stdin.close()

    def line(self) -> str:
        """The next line that is not empty, as soon as it is there; the last one is the status."""
        return next(line for raw in self._lines if (line := raw.decode().strip()))

    def answer(self) -> tuple[int, str]:
        """The status, and what is left of the body. Raises ``AssertionError`` if the connection breaks."""
        body, _, status = b"".join(self._lines).decode().rpartition("\n")
        assert self._popen.wait() == 0, f"curl ended with {self._popen.returncode} after {body[-500:]}"
        return int(status), body

    def hang_up(self) -> None:
        """The client is gone, and its connection with it."""
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
