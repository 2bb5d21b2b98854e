"""Wrong values fail at installation with their path; values that contradict each other are named together."""

from typing import Any

import pytest

from tests.kube.conftest import Examples
from tests.kube.helm import Helm, HelmError, Release
from tests.kube.manifests import components
from tests.kube.policies import POLICIES
from tests.kube.policies.lifetime import delay, setting
from tests.kube.validity import problems
from tests.kube.values import EXAMPLES, example_values, with_values

WRONG: dict[str, tuple[str, Any]] = {
    "a misspelt key": ("routr", {"replicas": 2}),
    "a misspelt key further in": ("router__replica", 2),
    "a misspelt key of a model": ("models__demo__gpu", 1),
    "a word for a number": ("router__replicas", "two"),
    "a negative number": ("models__demo__gpus", -1),
    "no such mode": ("autoscaling__mode", "magic"),
    "no such type": ("models__demo__dtype", "float8"),
    "a number for a word": ("clusterDomain", 7),
    "no such log level": ("router__logLevel", "loud"),
    "root": ("security__runAsUser", 0),
    "a part that is too large": ("models__demo__autoscaling__minReplicas", -1),
    "a name that is none": ("models__Not_A_Name", {"source": {"path": "/x"}}),
    "a list for a map": ("redis", []),
    "a source that is none": ("models__demo__source", {"s3": {"bucket": "x"}}),
    "no such TLS": ("tls__mode", "maybe"),
}
"""What is wrong, by the last part of its path."""

CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several routers, no Redis": (
        {"router__replicas": 2, "redis__mode": "none"},
        ["router.replicas", "redis.mode"],
    ),
    "several workers, no Redis": (
        {"router__workers": 2, "redis__mode": "none"},
        ["router.workers", "redis.mode"],
    ),
    "two sources": (
        {"models__demo__source": {"path": "/x", "pvc": {"claimName": "x"}}},
        ["models.demo.source", "path", "pvc"],
    ),
    "GPUs that nobody uses": (
        {"models__demo__gpus": 4, "models__demo__tensorParallelSize": 2},
        ["models.demo.gpus", "models.demo.tensorParallelSize"],
    ),
    "fewest above most": (
        {"models__demo__autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        ["models.demo.autoscaling.minReplicas", "maxReplicas"],
    ),
    "two models of one name": (
        {"models__other": {"servedName": "smollm2-135m", "source": {"path": "/x"}}},
        ["models.demo", "models.other"],
    ),
    "an update that cannot begin": (
        {"models__demo__maxSurge": 0, "models__demo__maxUnavailable": 0},
        ["models.demo.maxSurge", "models.demo.maxUnavailable"],
    ),
    "a Secret that is not named": (
        {"router__auth__mode": "existing"},
        ["router.auth.mode", "router.auth.existingSecret"],
    ),
    "a Secret that is not used": (
        {"router__auth__existingSecret": "keys"},
        ["router.auth.existingSecret", "router.auth.mode"],
    ),
    "Redis without a host": ({"redis__mode": "external"}, ["redis.mode", "redis.external.host"]),
    "a host without a use": ({"redis__external__host": "redis.example.com"}, ["redis.external", "redis.mode"]),
    "TLS without certificates": ({"tls__mode": "existingSecret"}, ["tls.mode", "tls.existingSecret.engine"]),
    "routes without a Gateway": ({"gateway__httpRoute__enabled": True}, ["gateway.httpRoute", "gateway.parentRefs"]),
    "a wait longer than the request": (
        {"router__limits__holdTimeout": 700, "router__limits__requestTimeout": 600},
        ["router.limits.holdTimeout", "router.limits.requestTimeout"],
    ),
    "a test of no model": ({"tests__model": "nobody"}, ["tests.model", "models"]),
    "headers for nobody": ({"telemetry__headersSecret": "x"}, ["telemetry.headersSecret", "telemetry.otlpEndpoint"]),
}


def demo(**changes: Any) -> dict[str, Any]:
    """The demo's values with changes."""
    return with_values(example_values("cpu-demo"), **changes)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named(helm: Helm, case: str) -> None:
    path, value = WRONG[case]
    with pytest.raises(HelmError) as refused:
        helm.render(demo(**{path: value}))
    message = str(refused.value)
    assert "values don't meet the specifications of the schema" in message
    assert path.rpartition("__")[2] in message
    assert path.rpartition("__")[0].replace("__", "/") in message


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_named_together(helm: Helm, case: str) -> None:
    changes, names = CONTRADICTIONS[case]
    with pytest.raises(HelmError) as refused:
        helm.render(demo(**changes))
    message = str(refused.value)
    assert [name for name in names if name not in message] == [], message
    assert "nil pointer" not in message


def test_no_model_is_no_release(helm: Helm) -> None:
    with pytest.raises(HelmError, match="models"):
        helm.render({})


def test_no_engine_at_all_needs_a_kubernetes_that_knows_it(helm: Helm) -> None:
    values = with_values(example_values("hpa"), models__demo__autoscaling__minReplicas=0)
    with pytest.raises(HelmError, match=r"models\.demo\.autoscaling\.minReplicas.*1\.37.*1\.36"):
        helm.render(values, "1.36")
    (scaler,) = helm.render(values, "1.37").of("HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] == 0


def test_an_old_kubernetes_is_refused(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"1\.28"):
        helm.render(demo(), "1.28")


@pytest.mark.parametrize(("wait", "drain"), [(0, 30), (5, 120), (20, 7.5)])
def test_the_time_to_end_is_that_of_its_parts(helm: Helm, wait: float, drain: float) -> None:
    times = {"shutdownDelay": wait, "shutdownTimeout": drain}
    release = helm.render(
        demo(**{f"{part}__{name}": times[name] for part in ("router", "models__demo") for name in times})
    )
    for pod in components(release, "router", "engine"):
        assert (delay(pod), float(setting(pod, "shutdown-timeout") or 0)) == (wait, drain)
        assert 0 <= pod.spec["terminationGracePeriodSeconds"] - wait - drain - 15 < 1


@pytest.mark.parametrize("release", ["q", "r" * 30])
def test_long_names_fit_or_are_refused_with_advice(helm: Helm, release: str) -> None:
    demo_engine = next(pod for pod in components(helm.render(demo(), release=release), "engine"))
    room = min(40, 63 - len(demo_engine.owner["metadata"]["name"].removesuffix("demo")))
    assert breaches(helm.render(with_model("m" * room), release=release)) == []
    if room < 40:
        with pytest.raises(HelmError, match=rf"may have 63: shorten.*models\.{'m' * (room + 1)}"):
            helm.render(with_model("m" * (room + 1)), release=release)


def test_the_longest_name_of_a_release_fits_or_is_refused_with_advice(helm: Helm) -> None:
    try:
        release = helm.render(with_model("m"), release="r" * 53)
    except HelmError as error:
        if "shorten" not in str(error):
            raise
    else:
        assert breaches(release) == []


def with_model(key: str) -> dict[str, Any]:
    """The demo's values with a single model of that key, and everything that has a long name."""
    return {**demo(autoscaling__mode="hpa", tls__mode="helm"), "models": {key: {"source": {"path": "/x"}}}}


def test_numbers_are_written_out(helm: Helm) -> None:
    release = helm.render(demo(router__limits__maxBodyBytes=10**10))
    (router,) = components(release, "router")
    assert setting(router, "max-body-bytes") == "10000000000"


def test_everything_can_be_turned_off(helm: Helm) -> None:
    values = demo(
        networkPolicy__enabled=False,
        redis__mode="none",
        router__auth__mode="none",
        router__discovery="dns",
        router__replicas=1,
        router__disruptionsAllowed=None,
        models__demo__disruptionsAllowed=None,
        models__demo__topologySpread=[],
    )
    release = helm.render(values)
    assert {item["kind"] for item in release.manifests} == {"Deployment", "Service", "ServiceAccount"}
    assert [pod for pod in components(release, "router") if pod.spec.get("automountServiceAccountToken")] == []


def test_everything_can_be_turned_on(helm: Helm) -> None:
    values = demo(
        monitoring__serviceMonitor__enabled=True,
        monitoring__podMonitor__enabled=True,
        monitoring__prometheusRule__enabled=True,
        monitoring__dashboards__enabled=True,
        tls__mode="certManager",
        autoscaling__mode="hpa",
        autoscaling__hpa__certificate="certManager",
        telemetry__otlpEndpoint="http://collector.monitoring.svc:4317",
        commonLabels={"team": "x"},
    )
    release = helm.render(values)
    assert breaches(release) == []
    assert problems(helm, release.everything, "1.37") == {}
    kinds = {item["kind"] for item in release.manifests}
    assert kinds > {"Certificate", "Issuer", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert all(item["metadata"]["labels"]["team"] == "x" for item in release.manifests)


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_notes_say_how_to_ask(example: Examples, values: str) -> None:
    assert "/v1/" in example(values, "1.37").notes


def breaches(release: Release) -> list[str]:
    """Whatever the policies find."""
    return [breach for policy in POLICIES for breach in policy(release)]
