"""Clients that read a router's load: the cluster's front proxy, with its certificates, and KEDA."""

import json
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import trustme
from quire_proto.tls import CertKeyFiles
from quire_router.core.errors import load_redis_away

NAMESPACE = "serving"
RESOURCE = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/quire_load"
PROXY_NAME = "front-proxy-client"


class KnownLoad:
    """A load that is told, or is not known."""

    def __init__(self, **load: int) -> None:
        self.load = load
        self.known = True
        self.reads = 0

    async def read(self) -> Mapping[str, int]:
        self.reads += 1
        if not self.known:
            raise load_redis_away()
        return self.load

    async def close(self) -> None:
        pass


class Cluster:
    """One that vouches for its front proxy, and for the router's name in it. Its files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers, self.proxies = trustme.CA(), trustme.CA()
        self.servers_ca, self.proxies_ca = folder / "servers.pem", folder / "proxies.pem"
        self.write()
        self.router = self.issue(self.servers, "router", "localhost", "127.0.0.1")

    def write(self) -> None:
        self.servers.cert_pem.write_to_path(str(self.servers_ca))
        self.proxies.cert_pem.write_to_path(str(self.proxies_ca))

    def issue(self, authority: trustme.CA, common_name: str, *names: str, **terms: Any) -> CertKeyFiles:
        leaf = authority.issue_cert(*(names or ("client.test",)), common_name=common_name, **terms)
        certificate, key = self._folder / f"{common_name}.crt", self._folder / f"{common_name}.key"
        certificate.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        return CertKeyFiles(certificate, key)

    def context(self, shown: CertKeyFiles | None = None) -> ssl.SSLContext:
        """A client's, which trusts the router's certificate."""
        context = ssl.create_default_context(cafile=str(self.servers_ca))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        return context

    def proxy(self, common_name: str = PROXY_NAME) -> ssl.SSLContext:
        """The front proxy's."""
        return self.context(self.issue(self.proxies, common_name))

    def flags(self, port: int) -> tuple[str, ...]:
        """With which a router serves it."""
        return (
            *("--scaling-port", str(port), "--scaling-namespace", NAMESPACE),
            *("--scaling-cert", str(self.router.certificate), "--scaling-key", str(self.router.key)),
            *("--scaling-client-ca", str(self.proxies_ca), "--scaling-client-name", PROXY_NAME),
        )

    def keda_flags(self) -> tuple[str, ...]:
        """With which a router serves KEDA over TLS, and nobody without a certificate."""
        shown = ("--keda-cert", str(self.router.certificate), "--keda-key", str(self.router.key))
        return (*shown, "--keda-client-ca", str(self.proxies_ca))

    def keda(self) -> grpc.ChannelCredentials:
        """What KEDA shows then."""
        shown = self.issue(self.proxies, "keda")
        return grpc.ssl_channel_credentials(
            self.servers_ca.read_bytes(), shown.key.read_bytes(), shown.certificate.read_bytes()
        )

    def kubeconfig(self, port: int) -> Path:
        """The file with which ``kubectl`` asks the router as the front proxy does."""
        shown = self.issue(self.proxies, PROXY_NAME)
        file = self._folder / "kubeconfig"
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(self.servers_ca)}
        user = {"client-certificate": str(shown.certificate), "client-key": str(shown.key)}
        file.write_text(json.dumps(kubeconfig(cluster, user)))
        return file


def kubeconfig(cluster: Mapping[str, str], user: Mapping[str, str]) -> dict[str, Any]:
    """A file of access to one cluster as one user."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def kubectl(access: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "--kubeconfig", str(access), "--request-timeout", "10s", *arguments]
    home = {"HOME": str(access.parent), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=home, check=False)


async def ask(port: int, context: ssl.SSLContext, path: str = RESOURCE, method: str = "GET", **headers: str) -> Any:
    """One request on a connection of its own."""
    async with httpx.AsyncClient(verify=context, timeout=10) as client:
        return await client.request(method, f"https://127.0.0.1:{port}{path}", headers=headers)


def value(answer: httpx.Response) -> int | None:
    """The sum of the values, as an autoscaler adds them up; None where it is told none."""
    if answer.status_code != 200:
        return None
    return sum(int(item["value"]) for item in answer.json()["items"])
