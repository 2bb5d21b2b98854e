"""Settings that are lists, and tokens of an issuer: both by an upgrade, while a client asks."""

import copy
import json
import textwrap
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster.cluster import Release, eventually
from tests.cluster.conftest import CHART
from tests.cluster.load import ENOUGH, Agents, made_key, router_image, undisturbed
from tests.cluster.rows import ROOT, Row
from tests.kube.values import with_values
from tests.support.adapters import write_adapter
from tests.support.certificates import Authority

ADAPTERS = ("polite", "sql")
SITES = ("https://chat.example", "https://docs.example")
AWAY = 20.0
"""Seconds without the issuer."""
LIFETIME = 3600.0
"""Of a token, in seconds."""
SERVE = textwrap.dedent("""
    import http.server, ssl

    class Issuer(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *request):
            super().__init__(*request, directory="/issuer/documents")

    server = http.server.ThreadingHTTPServer(("", 8443), Issuer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/issuer/tls.crt", "/issuer/tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
""")


@pytest.mark.row("two adapters and two sites, as lists of the engines' and the routers' settings")
def test_lists(row: Row, release: Release, caller: "Caller", tmp_path: Path) -> None:
    release.settled()
    before = release.values
    volume, mounts = adapters(release, tmp_path)
    with_lists = with_values(
        copy.deepcopy(before),
        models__demo__flags={
            **before["models"]["demo"]["flags"],
            "enableLora": True,
            "loraModules": [f"{name}=/adapters/{name}" for name in ADAPTERS],
        },
        models__demo__volumes=[volume],
        models__demo__volumeMounts=mounts,
        router__auth={"allowedOrigins": list(SITES)},
    )
    with row.client(release):
        release.set(CHART, with_lists)
        release.settled()
    texts = [row.known, *(undisturbed(release, row.node, name) for name in ADAPTERS)]
    assert len({str(each) for each in texts}) == len(texts), "an adapter answers as another, or as none"
    for name, known in zip(ADAPTERS, texts[1:], strict=True):
        adapted = Row(row.name, known, row.node)
        with adapted.client(release, name):
            pass
        row.seen += adapted.seen
    assert [caller.allowed_site(site) for site in (*SITES, "https://other.example")] == [*SITES, None]
    with row.client(release):
        release.set(CHART, before)
        release.settled()


@pytest.mark.row(f"tokens of an issuer beside keys, and the issuer away for {AWAY:.0f} s")
def test_tokens(row: Row, release: Release, caller: "Caller", issuer: "Issuer") -> None:
    release.settled()
    before = release.values
    oidc = {"issuerUrl": issuer.url, "clientId": "quire", "caSecret": issuer.name}
    with row.client(release):
        release.set(CHART, with_values(copy.deepcopy(before), router__auth={"oidc": oidc}))
        release.settled()
    eventually("its keys are read", lambda: caller.status(issuer.token("quire")) == 200, seconds=60)
    assert caller.status(issuer.token("another")) == 401
    with row.client(release, key=issuer.token("quire")):
        issuer.scale(0)
        sleep(AWAY)
        issuer.scale(1)
        release.kubectl("rollout", "restart", release.workload("router"))
        release.settled("router")
    with row.client(release):
        release.set(CHART, before)
        release.settled()


@pytest.fixture
def caller(release: Release, agents: Agents, client_node: str) -> "Caller":
    return Caller(release, agents, client_node)


@pytest.fixture
def issuer(release: Release, tmp_path: Path) -> Iterator["Issuer"]:
    made = Issuer(release, tmp_path)
    made.scale(1)
    yield made
    made.close()


class Issuer:
    """An OpenID Connect issuer with one key, over HTTPS, whose authority nobody but its Secret knows."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.name = "issuer"
        self.url = f"https://{self.name}.{release.namespace}.svc"
        self._signer = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._release = release
        authority = Authority(folder)
        pair = authority.issue(f"{self.name}.{release.namespace}.svc")
        key = {**jwt.algorithms.RSAAlgorithm.to_jwk(self._signer.public_key(), as_dict=True), "kid": "1", "use": "sig"}
        documents = {
            "openid-configuration": json.dumps({"issuer": self.url, "jwks_uri": f"{self.url}/keys"}),
            "keys": json.dumps({"keys": [key]}),
        }
        secret = {
            "ca.crt": authority.ca.read_text(), "tls.crt": pair.certificate.read_text(),
            "tls.key": pair.key.read_text(), "serve.py": SERVE, **documents,
        }  # fmt: skip
        service = {"selector": {"app": self.name}, "ports": [{"port": 443, "targetPort": 8443}]}
        release.cluster.apply(
            self._of("v1", "Secret", stringData=secret),
            self._of("v1", "Service", spec=service),
            self._of("apps/v1", "Deployment", spec=self._deployment()),
        )

    def token(self, audience: str) -> str:
        """A token for ``audience``, of one and the same caller."""
        claims = {"iss": self.url, "aud": audience, "sub": "alice", "exp": time() + LIFETIME}
        return jwt.encode(claims, self._signer, "RS256", headers={"kid": "1"})

    def scale(self, replicas: int) -> None:
        """Starts it, or ends it, and waits until it answers or is gone."""
        deployment = f"deployment/{self.name}"
        self._release.kubectl("scale", deployment, f"--replicas={replicas}")
        self._release.kubectl("rollout", "status", deployment, "--timeout=120s")
        if not replicas:
            self._release.kubectl("wait", "--for=delete", "pod", "--selector", f"app={self.name}", "--timeout=60s")

    def close(self) -> None:
        """Takes it away."""
        for kind in ("deployment", "service", "secret"):
            self._release.kubectl("delete", kind, self.name)

    def _of(self, version: str, kind: str, **fields: Any) -> dict[str, Any]:
        metadata = {"name": self.name, "namespace": self._release.namespace}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

    def _deployment(self) -> dict[str, Any]:
        container = {
            "name": self.name, "image": router_image(self._release), "imagePullPolicy": "IfNotPresent",
            "command": ["python", "/issuer/serve.py"], "resources": ENOUGH,
            "volumeMounts": [{"name": self.name, "mountPath": "/issuer"}],
            "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
        }  # fmt: skip
        paths = {"openid-configuration": "documents/.well-known/openid-configuration", "keys": "documents/keys"}
        files = {name: paths.get(name, name) for name in ("tls.crt", "tls.key", "serve.py", *paths)}
        items = [{"key": name, "path": path} for name, path in files.items()]
        spec = {
            "containers": [container], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False,
            "volumes": [{"name": self.name, "secret": {"secretName": self.name, "items": items}}],
        }  # fmt: skip
        labels = {"app": self.name}
        template = {"metadata": {"labels": labels}, "spec": spec}
        return {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}


def adapters(release: Release, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A volume with ``ADAPTERS`` of the demo model, which differ, and its mounts."""
    data, items = {}, []
    for seed, name in enumerate(ADAPTERS):
        written = write_adapter(folder / name, ROOT / "demo" / "model", targets=("q_proj", "v_proj"), seed=seed)
        for file in written.iterdir():
            data[f"{name}.{file.name}"] = b64encode(file.read_bytes()).decode()
            items.append({"key": f"{name}.{file.name}", "path": f"{name}/{file.name}"})
    metadata = {"name": "adapters", "namespace": release.namespace}
    release.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data})
    volume = {"name": "adapters", "configMap": {"name": "adapters", "items": items}}
    return volume, [{"name": "adapters", "mountPath": "/adapters"}]


ASK = """
import json, sys, urllib.error, urllib.request
url, key, site = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"} | ({"origin": site} if site else {})
try:
    response = urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=10)
except urllib.error.HTTPError as error:
    response = error
print(json.dumps([response.status, response.headers.get("access-control-allow-origin")]))
"""


@dataclass
class Caller:
    """Lists the models from a pod of a node's agent."""

    release: Release
    agents: Agents
    node: str

    def status(self, key: str) -> int:
        """What a router answers to a caller with this key or token."""
        return int(self._ask(key, "")[0])

    def allowed_site(self, site: str) -> str | None:
        """The site whose pages may read an answer that a page of ``site`` asked for."""
        return self._ask(made_key(self.release), site)[1]

    def _ask(self, key: str, site: str) -> list[Any]:
        words = ("python", "-c", ASK, self.release.url(), key, site)
        said: list[Any] = json.loads(self.release.kubectl("exec", self.agents.on(self.node), "--", *words))
        return said
