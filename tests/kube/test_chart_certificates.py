"""The certificates that helm makes: router and engine trust each other, and the API server trusts the router."""

import base64
import ssl
from pathlib import Path

import pytest

from tests.kube.conftest import Examples
from tests.kube.helm import Helm, Manifest, Release
from tests.kube.manifests import components
from tests.kube.settings import environment
from tests.kube.values import EXAMPLES, example_values


class Side:
    """One end of a handshake in memory, from the files of a Secret."""

    def __init__(self, data: dict[str, bytes], folder: Path, *, server: bool, authority: bytes | None) -> None:
        folder.mkdir()
        for name in ("tls.crt", "tls.key"):
            (folder / name).write_bytes(data[name])
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        self._context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        if authority is not None:
            self._context.load_verify_locations(cadata=authority.decode())
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.inbox, self.outbox = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server = server

    def start(self, name: str | None) -> None:
        self.end = self._context.wrap_bio(self.inbox, self.outbox, server_side=self._server, server_hostname=name)

    def step(self) -> bool:
        try:
            self.end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True


def shake_hands(server: Side, client: Side, name: str) -> None:
    """Raises ``ssl.SSLError`` where one does not trust the other."""
    server.start(None)
    client.start(name)
    for _ in range(10):
        done = [side.step() for side in (client, server)]
        server.inbox.write(client.outbox.read())
        client.inbox.write(server.outbox.read())
        if all(done):
            return
    raise AssertionError("the handshake does not end")


def data_of(secret: Manifest) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def mounted(release: Release, component: str, volume: str) -> dict[str, bytes]:
    """What the Secret holds that a component has as that volume."""
    pod = components(release, component)[0]
    (name,) = [item["secret"]["secretName"] for item in pod.volumes if item["name"] == volume]
    (secret,) = [item for item in release.of("Secret") if item["metadata"]["name"] == name]
    return data_of(secret)


@pytest.fixture
def encrypted(example: Examples) -> Release:
    return example("tls", "1.37")


def expected_name(release: Release) -> str:
    return environment(components(release, "router")[0].containers[0])["QUIRE_ROUTER_ENGINE_TLS_NAME"]


def test_routers_and_engines_trust_each_other(encrypted: Release, tmp_path: Path) -> None:
    engine, router = mounted(encrypted, "engine", "tls"), mounted(encrypted, "router", "tls")
    server = Side(engine, tmp_path / "engine", server=True, authority=engine["ca.crt"])
    client = Side(router, tmp_path / "router", server=False, authority=router["ca.crt"])
    shake_hands(server, client, expected_name(encrypted))


def test_keda_and_routers_trust_only_each_other(encrypted: Release, tmp_path: Path) -> None:
    (authentication,) = encrypted.of("TriggerAuthentication")
    given = {entry["parameter"]: entry for entry in authentication["spec"]["secretTargetRef"]}
    (secret,) = [
        data_of(item) for item in encrypted.of("Secret") if item["metadata"]["name"] == given["caCert"]["name"]
    ]
    files = {"ca.crt": "caCert", "tls.crt": "tlsClientCert", "tls.key": "tlsClientKey"}
    keda = {name: secret[given[parameter]["key"]] for name, parameter in files.items()}
    routers, engine = mounted(encrypted, "router", "keda"), mounted(encrypted, "engine", "tls")
    (trigger,) = encrypted.of("ScaledObject")[0]["spec"]["triggers"]
    host = trigger["metadata"]["scalerAddress"].partition(":")[0]

    def meet(number: int, server: dict[str, bytes], client: dict[str, bytes], name: str) -> None:
        shake_hands(
            Side(server, tmp_path / f"server-{number}", server=True, authority=server["ca.crt"]),
            Side(client, tmp_path / f"client-{number}", server=False, authority=client["ca.crt"]),
            name,
        )

    meet(0, routers, keda, host)
    strangers = [(routers, mounted(encrypted, "router", "tls"), host), (engine, keda, expected_name(encrypted))]
    for number, (server, client, name) in enumerate([*strangers, (keda, keda, host)], 1):
        with pytest.raises(ssl.SSLError):
            meet(number, server, client, name)


def test_no_other_authority_is_trusted(helm: Helm, encrypted: Release, tmp_path: Path) -> None:
    foreign = mounted(helm.render(example_values("tls")), "router", "tls")
    engine, router = mounted(encrypted, "engine", "tls"), mounted(encrypted, "router", "tls")
    stranger = Side(foreign, tmp_path / "stranger", server=False, authority=router["ca.crt"])
    with pytest.raises(ssl.SSLError):
        shake_hands(
            Side(engine, tmp_path / "engine", server=True, authority=engine["ca.crt"]),
            stranger,
            expected_name(encrypted),
        )


def test_a_routers_certificate_is_no_engines(encrypted: Release, tmp_path: Path) -> None:
    router = mounted(encrypted, "router", "tls")
    server = Side(router, tmp_path / "server", server=True, authority=router["ca.crt"])
    client = Side(router, tmp_path / "client", server=False, authority=router["ca.crt"])
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client, expected_name(encrypted))


def test_engines_never_get_a_routers_key(encrypted: Release) -> None:
    assert mounted(encrypted, "engine", "tls")["tls.key"] != mounted(encrypted, "router", "tls")["tls.key"]
    for secret in encrypted.of("Secret"):
        assert "ca.key" not in secret["data"]


def test_the_api_server_trusts_the_router(example: Examples, tmp_path: Path) -> None:
    release = example("hpa", "1.37")
    (api_service,) = release.of("APIService")
    files = mounted(release, "router", "scaling")
    server = Side(files, tmp_path / "router", server=True, authority=None)
    client = Side(files, tmp_path / "client", server=False, authority=base64.b64decode(api_service["spec"]["caBundle"]))
    service = api_service["spec"]["service"]
    shake_hands(server, client, f"{service['name']}.{service['namespace']}.svc")
    assert "insecureSkipTLSVerify" not in api_service["spec"]


def test_there_are_examples_of_both() -> None:
    assert {"tls", "hpa"} <= set(EXAMPLES)
