"""Settings of autoscaling that cannot be are refused at the start, in a sentence that names what is missing."""

from pathlib import Path

import pytest
from quire_proto.cli import read_settings
from quire_proto.tls import ServerTls
from quire_router.autoscale.scaling_server import namespace_of_pod
from quire_router.clients.kube_client import KubeAccess
from quire_router.config import Settings

from tests.support.autoscalers import NAMESPACE, PROXY_NAME, Cluster


def settings(*flags: str, model: str = "m=folder") -> Settings:
    return read_settings(Settings, ("--model", model, *flags))


def test_autoscalers_are_not_served_unless_the_settings_say_so() -> None:
    assert not settings().is_asked_for_load
    assert settings("--keda-port", "0").is_asked_for_load
    assert settings("--keda-port", "0", "--host", "0.0.0.0", "--keda-insecure").is_asked_for_load


def test_all_of_it_is_read(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    parsed = settings(*cluster.flags(8003))
    assert parsed.is_asked_for_load
    assert parsed.scaling_port == 8003
    assert parsed.scaling_identity == cluster.router
    assert parsed.scaling_namespace == NAMESPACE
    assert (parsed.scaling_client_ca, parsed.scaling_client_name) == (cluster.proxies_ca, [PROXY_NAME])


def test_pods_are_marked_where_kubernetes_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    marking = ("--pod-deletion-cost-lease", "marks")
    assert settings("--engine", "kubernetes://engines", *marking).pod_deletion_cost_lease == "marks"
    with pytest.raises(SystemExit):
        settings("--engine", "dns://engines:9000", *marking)
    with pytest.raises(SystemExit):
        settings("--engine", "kubernetes://engines", "--pod-deletion-cost-lease", "Marks")


def test_keda_is_served_over_tls_if_the_settings_name_a_certificate(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    shown = ("--keda-cert", str(cluster.router.certificate), "--keda-key", str(cluster.router.key))
    assert settings("--keda-port", "0").keda_tls is None
    assert settings(*shown).keda_tls == ServerTls(cluster.router)
    asking = settings(*shown, "--keda-client-ca", str(cluster.proxies_ca))
    assert asking.keda_tls == ServerTls(cluster.router, cluster.proxies_ca)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--scaling-port", "8003"), "--scaling-port needs --scaling-cert and --scaling-key"),
        (("--scaling-port", "8003", "--scaling-cert", "CERT"), "--scaling-cert needs --scaling-key"),
        (("--scaling-cert", "CERT", "--scaling-key", "OTHER"), "--scaling-key: "),
        (("--scaling-client-name", "x"), "--scaling-client-name needs --scaling-client-ca"),
        (("--scaling-client-ca", "no/such/file"), "--scaling-client-ca: "),
        (("--scaling-namespace", "No"), "'No' is not the name of a namespace"),
        (("--keda-port", "70000"), "--keda-port: "),
        (("--keda-key", "OTHER"), "--keda-key needs --keda-cert"),
        (("--keda-cert", "CERT", "--keda-key", "OTHER"), "--keda-key: "),
        (("--keda-client-ca", "CERT"), "--keda-client-ca needs --keda-cert"),
        (("--keda-port", "0", "--host", "0.0.0.0"), "--keda-port needs --keda-client-ca"),
        (("--keda-port", "0", "--host", "::", "--keda-cert", "CERT", "--keda-key", "KEY"), "needs --keda-client-ca"),
        (("--keda-client-ca", "CERT", "--keda-cert", "CERT", "--keda-key", "KEY", "--keda-insecure"), "exclude each"),
        (("--keda-port", "0", "--model", "a/b=folder,a_b=folder"), "would both be 'a_b'"),
    ],
)
def test_invalid_autoscaling_settings_are_refused_with_a_message(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path)
    other = cluster.issue(cluster.servers, "other")
    files = {"CERT": str(cluster.router.certificate), "KEY": str(cluster.router.key), "OTHER": str(other.key)}
    with pytest.raises(SystemExit):
        settings(*(files.get(flag, flag) for flag in flags))
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_models_with_equal_labels_are_accepted_without_external_metrics() -> None:
    assert len(settings(model="a/b=folder,a_b=folder").models) == 2


def test_a_namespace_is_needed_outside_of_a_pod(tmp_path: Path) -> None:
    pod = KubeAccess(account=tmp_path)
    with pytest.raises(ValueError, match="--scaling-port needs --scaling-namespace"):
        namespace_of_pod(pod)
    (tmp_path / "namespace").write_text("serving\n")
    assert namespace_of_pod(pod) == "serving"
