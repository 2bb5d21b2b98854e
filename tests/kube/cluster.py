"""API servers besides the one inside the tests: that one as a process of its own, the person's cluster
(``KUBECONFIG``), or one started from the programs in ``KUBEBUILDER_ASSETS``.
"""

import base64
import json
import os
import shutil
import socket
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import trustme
import yaml
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config_dict
from urllib3.exceptions import HTTPError

from tests.kube.custom_kinds import CUSTOM_KINDS, definition
from tests.kube.helm_api import KINDS, Kind, kinds_of
from tests.support.ports import free_port
from tests.support.processes import Process

CONSENT = "QUIRE_TEST_CLUSTER"
"""Must be 1 before a person's cluster is touched: a KUBECONFIG alone may lead to anything."""
EVERYWHERE = {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}
"""What every namespace has."""
MADE_BY_OTHERS = ("Event", "Endpoints", "EndpointSlice", "ReplicaSet", "Pod", "Lease", "PersistentVolumeClaim")
"""Kinds that controllers make and take away, sooner or later."""
SECONDS_TO_START = 90.0


class RealCluster:
    """An API server behind a kubeconfig. ``own`` says that it is the tests' alone, definitions of kinds included, and
    ``plays`` that its Pods succeed at once.
    """

    def __init__(self, kubeconfig: str, *, own: bool, plays: bool = False) -> None:
        self.kubeconfig = kubeconfig
        self.own = own
        self.plays = plays
        self._client: ApiClient = new_client_from_config_dict(yaml.safe_load(kubeconfig))

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer; None where there is no such thing. Raises an ``ApiException`` for what else is refused."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        call = self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = self._client.call_api(*call, _request_timeout=30)
        answer.read()
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise ApiException(status=answer.status, reason=answer.data.decode(errors="replace"))
        return json.loads(answer.data) if method != "DELETE" else {}

    def ready(self) -> bool:
        """Whether it takes requests."""
        answer = self._client.call_api("GET", f"{self._client.configuration.host}/readyz", _request_timeout=5)
        return bool(answer.status == 200)

    def serves(self, api_version: str) -> bool:
        """Whether it knows a group of kinds."""
        return self.request("GET", f"/apis/{api_version}") is not None

    def define(self, api_version: str) -> None:
        """Installs the definitions of a group of custom kinds, and waits until they are served."""
        assert self.own, "a person's cluster gets no definitions"
        for kind in kinds_of({api_version: CUSTOM_KINDS[api_version]}):
            where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            self.request("POST", where, definition(api_version, kind.name, kind.plural))
        wait_until(lambda: self.serves(api_version), f"{api_version} is served")

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """The name of a namespace that is there for one test."""
        name = f"quire-test-{uuid.uuid4().hex[:8]}"
        self.request(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
        try:
            yield name
        finally:
            self.request("DELETE", f"/api/v1/namespaces/{name}")

    def contents(self, namespace: str, release: str) -> set[str]:
        """What there is in a namespace, and of the release anywhere, but for what others make."""
        found: set[str] = set()
        for kind in kinds_of({**KINDS, **CUSTOM_KINDS}):
            if kind.name not in MADE_BY_OTHERS:
                found.update(f"{kind.name}/{name}" for name in self._names(kind, namespace, release))
        return {name for name in found - EVERYWHERE if "/sh.helm.release." not in name}

    def secret(self, namespace: str, name: str) -> dict[str, bytes]:
        """What a Secret holds; nothing where there is none."""
        found = self.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}") or {"data": {}}
        return {key: base64.b64decode(text) for key, text in found["data"].items()}

    def _names(self, kind: Kind, namespace: str, release: str) -> Iterator[str]:
        root = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
        paths = [f"{root}/{kind.plural}?labelSelector=app.kubernetes.io%2Finstance%3D{release}"]
        if kind.namespaced:
            paths.append(f"{root}/namespaces/{namespace}/{kind.plural}")
        for path in paths:
            answer = self.request("GET", path)
            if answer is not None:
                yield from (item["metadata"]["name"] for item in answer["items"])


def wait_until(content: Callable[[], bool], what: str, seconds: float = SECONDS_TO_START) -> None:
    """Returns when something is so."""
    deadline = time.monotonic() + seconds
    while not content():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.05)


@contextmanager
def started(programs: Path, folder: Path, *, plays: bool) -> Iterator[RealCluster]:
    """An API server of its own from the ``etcd`` and ``kube-apiserver`` in a folder."""
    authority = trustme.CA()
    files = {
        "ca.crt": authority.cert_pem.bytes(),
        "accounts.key": authority.issue_cert("accounts").private_key_pem.bytes(),
    }
    server, admin = authority.issue_cert("127.0.0.1", "localhost"), _administrator(authority)
    for name, leaf in (("server", server), ("admin", admin)):
        files |= {f"{name}.crt": leaf.cert_chain_pems[0].bytes(), f"{name}.key": leaf.private_key_pem.bytes()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    store, peers, port = free_port(), free_port(), free_port()
    cluster = RealCluster(kubeconfig(f"https://127.0.0.1:{port}", files), own=True, plays=plays)
    with (
        _running(_etcd(programs, folder, store, peers), folder, lambda: _healthy(store)),
        _running(_api_server(programs, folder, store, port), folder, lambda: _listens(port) and cluster.ready()),
    ):
        yield cluster


@contextmanager
def _running(command: list[str], folder: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """A program that is ready at the beginning of a block and gone at its end."""
    name = Path(command[0]).name
    process = Process(command, folder / f"{name}.log")

    def answers() -> bool:
        assert process.popen.poll() is None, f"{name} has ended: {process.text[-2000:]}"
        try:
            return ready()
        except (OSError, HTTPError):
            return False

    try:
        wait_until(answers, f"{name} is ready")
        yield
    finally:
        process.stop()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)


def _administrator(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("admin.test", common_name="admin", organization_name="system:masters")


def _etcd(programs: Path, folder: Path, port: int, peers: int) -> list[str]:
    return [
        str(programs / "etcd"), "--data-dir", str(folder / "data"),
        "--listen-client-urls", f"http://127.0.0.1:{port}", "--advertise-client-urls", f"http://127.0.0.1:{port}",
        "--listen-peer-urls", f"http://127.0.0.1:{peers}",
    ]  # fmt: skip


def _api_server(programs: Path, folder: Path, store: int, port: int) -> list[str]:
    return [
        str(programs / "kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{store}",
        "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(port),
        "--cert-dir", str(folder / "certificates"),
        "--tls-cert-file", str(folder / "server.crt"), "--tls-private-key-file", str(folder / "server.key"),
        "--client-ca-file", str(folder / "ca.crt"), "--authorization-mode", "RBAC",
        "--service-account-issuer", f"https://127.0.0.1:{port}",
        "--service-account-key-file", str(folder / "accounts.key"),
        "--service-account-signing-key-file", str(folder / "accounts.key"),
        "--service-cluster-ip-range", "10.0.0.0/24",
        # From 1.37 on a server does not advertise a loopback address.
        "--endpoint-reconciler-type", "none",
        # Nobody makes a namespace's default account here.
        "--disable-admission-plugins", "ServiceAccount",
    ]  # fmt: skip


def kubeconfig(server: str, files: Mapping[str, bytes]) -> str:
    """How to reach a server as its administrator."""
    texts = {name: base64.b64encode(content).decode() for name, content in files.items()}
    user = {"client-certificate-data": texts["admin.crt"], "client-key-data": texts["admin.key"]}
    return yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": texts["ca.crt"]}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": user}],
    })  # fmt: skip


def stand_ins(folder: Path) -> Path:
    """A folder with an ``etcd`` and a ``kube-apiserver`` that are the tests' own."""
    folder.mkdir()
    root = Path(__file__).parents[2]
    for name in ("etcd", "kube-apiserver"):
        program = folder / name
        program.write_text(f'#!/bin/sh\ncd "{root}" && exec "{sys.executable}" -m tests.kube.stand_ins {name} "$@"\n')
        program.chmod(0o755)
    return folder


@contextmanager
def given(file: Path) -> Iterator[RealCluster]:
    """The person's cluster."""
    yield RealCluster(file.read_text(), own=False)


def missing(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why a cluster cannot be used here, or None."""
    where = environment.get(name)
    if name == OWN:
        return None
    if not where:
        return f"{name} is not set"
    if name == "KUBEBUILDER_ASSETS":
        absent = [program for program in ("etcd", "kube-apiserver") if not shutil.which(program, path=where)]
        return f"KUBEBUILDER_ASSETS has no {' and no '.join(absent)}" if absent else None
    if environment.get(CONSENT) != "1":
        return f"{CONSENT} is not 1: the cluster of KUBECONFIG is left alone"
    return None if Path(where).is_file() else f"KUBECONFIG is not one file: {where}"


def open_cluster(name: str, folder: Path) -> AbstractContextManager[RealCluster]:
    """The cluster of that name, for the length of a block. ``folder`` is empty and for its files."""
    if name == "KUBECONFIG":
        return given(Path(os.environ[name]))
    programs = stand_ins(folder / "programs") if name == OWN else Path(os.environ[name])
    return started(programs, folder, plays=name == OWN)


OWN = "the tests' own"
CLUSTERS = (OWN, "KUBEBUILDER_ASSETS", "KUBECONFIG")
