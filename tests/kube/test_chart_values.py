"""Wrong values fail at installation with their path; values that contradict each other are named together."""

import json
import re
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.kube.conftest import Examples
from tests.kube.helm import CHART, Helm, HelmError, Release
from tests.kube.manifests import components
from tests.kube.policies import POLICIES
from tests.kube.policies.lifetime import delay, setting
from tests.kube.validity import problems
from tests.kube.values import EXAMPLES, example_values, over, with_values

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())

OTHER: dict[str, Any] = {"servedName": "smollm2-135m", "source": {"path": "/x"}}
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
    "a negative weight": ("models__demo__weight", -1),
    "a part of a weight": ("models__demo__weight", 0.5),
    "a shadow of more than all": ("models__demo__shadowPercent", 101),
    "a name that is none": ("models__Not_A_Name", {"source": {"path": "/x"}}),
    "a list for a map": ("redis", []),
    "a source that is none": ("models__demo__source", {"s3": {"bucket": "x"}}),
    "no such TLS": ("tls__mode", "maybe"),
    "YAML's off": ("tls__mode", False),
    "two ways at once": ("autoscaling__mode", ["hpa", "keda"]),
    "a number for a tag": ("router__image__tag", 1.0),
    "a key of a model that is too long": ("models__" + "m" * 41, {"source": {"path": "/x"}}),
    "a name with a quote": ("models__demo__servedName", 'a"b'),
    "a name with a template": ("models__demo__servedName", "{{ .Values }}"),
    "a name with a line": ("commonLabels__a", "b\n  c: d"),
    "a branch for a commit": ("models__demo__source__download__revision", "main"),
    "a way out of the volume": ("models__demo__source", {"pvc": {"claimName": "x", "folder": "../y"}}),
    "no unit of Kubernetes": ("models__demo__resources__requests__memory", "8GB"),
    "no unit of Redis": ("redis__maxMemory", "512Mi"),
    "a registry with a scheme": ("image__registry", "https://registry.example.com"),
    "a number in an annotation": ("router__podAnnotations__a", 5),
    "a folder of the node": ("router__volumes", [{"name": "x", "hostPath": {"path": "/"}}]),
    "a folder without a bound": ("router__volumes", [{"name": "x", "emptyDir": {}}]),
    "settings from a Secret": ("router__envFrom", [{"prefix": "QUIRE_", "secretRef": {"name": "x"}}]),
    "no address": ("networkPolicy__apiServerCidrs", ["10.0.0.1"]),
    "a flag that the chart sets": ("models__demo__flags__tlsCert", "/x"),
    "no drain at all": ("router__shutdownTimeout", 0),
    "no engine that scales": ("models__demo__autoscaling__maxReplicas", 0),
    "no router": ("router__replicas", 0),
    "all engines at once": ("models__demo__disruptionsAllowed", "100%"),
    "days": ("tls__certManager__duration", "90d"),
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
    "GPUs that no stage uses": (
        {"models__demo__gpus": 4, "models__demo__tensorParallelSize": 4, "models__demo__pipelineParallelSize": 2},
        ["models.demo.gpus", "models.demo.pipelineParallelSize"],
    ),
    "nodes that processes are not divided among": (
        {"models__demo__nodes": 2, "tls__mode": "helm"},
        ["models.demo.nodes", "models.demo.pipelineParallelSize"],
    ),
    "nodes that do not know each other": (
        {"models__demo__nodes": 2, "models__demo__pipelineParallelSize": 2},
        ["models.demo.nodes", "tls.mode"],
    ),
    "GPUs that no node uses": (
        {
            "models__demo__nodes": 2,
            "models__demo__gpus": 4,
            "models__demo__pipelineParallelSize": 4,
            "tls__mode": "helm",
        },
        ["models.demo.gpus", "models.demo.nodes"],
    ),
    "fewest above most": (
        {"models__demo__autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        ["models.demo.autoscaling.minReplicas", "maxReplicas"],
    ),
    "more engines than autoscaling allows": (
        {"autoscaling__mode": "hpa", "models__demo__replicas": 8},
        ["models.demo.replicas is 8", "models.demo.autoscaling.maxReplicas is 4", "Raise maxReplicas"],
    ),
    "an Ingress for a port that is closed": (
        {"router__service__grpc": False, "ingress__grpc": {"enabled": True}},
        ["router.service.grpc", "ingress.grpc.enabled"],
    ),
    "two models of one name for metrics": (
        {"models__other": {"servedName": "a/b", "source": {"path": "/x"}}, "models__demo__servedName": "a_b"},
        ["models.demo", "models.other"],
    ),
    "a target called as its name": (
        {"models__demo__servedName": "other", "models__other": {"source": {"path": "/x"}}},
        ["models.demo", "models.other", "another key, such as other-v1"],
    ),
    "no weight at all": (
        {"models__demo__weight": 0, "models__other": {**OTHER, "weight": 0}},
        ["servedName smollm2-135m add up to 0", "a weight above 0"],
    ),
    "two shadows": (
        {
            "models__other": {**OTHER, "shadowPercent": 1},
            "models__more": {**OTHER, "shadowPercent": 1},
        },
        ["models.more", "models.other", "both shadows of smollm2-135m"],
    ),
    "a shadow of nothing": (
        {"models__demo__shadowPercent": 1},
        ["models.demo.shadowPercent", "there is nothing to shadow"],
    ),
    "a shadow with a weight": (
        {"models__other": {**OTHER, "shadowPercent": 1, "weight": 1}},
        ["models.other", "a weight and a shadowPercent"],
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
    "a pool that nobody picks in": (
        {"gateway__inferencePool": {"enabled": True, "matchLabels": {"app": "vllm"}}},
        ["gateway.inferencePool.enabled", "router.picker.enabled"],
    ),
    "a pool of all pods": (
        {
            "gateway__inferencePool__enabled": True,
            "router__picker__enabled": True,
            "router__engines": ["vllm+kubernetes://vllm"],
            "networkPolicy__gatewayNamespace": "gateways",
        },
        ["gateway.inferencePool.matchLabels"],
    ),
    "a picker behind a closed port": (
        {"router__picker__enabled": True, "router__engines": ["vllm+kubernetes://vllm"]},
        ["router.picker.enabled", "networkPolicy.gatewayNamespace"],
    ),
    "a picker with nothing to pick": (
        {"router__picker__enabled": True, "networkPolicy__gatewayNamespace": "gateways"},
        ["router.picker.enabled", "router.engines"],
    ),
    "a wait longer than the request": (
        {"router__limits__holdTimeout": 700, "router__limits__requestTimeout": 600},
        ["router.limits.holdTimeout", "router.limits.requestTimeout"],
    ),
    "a test of no model": ({"tests__model": "nobody"}, ["tests.model", "models"]),
    "GPUs twice": (
        {"models__demo__resources__limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}},
        ["models.demo.resources.limits", "models.demo.gpus"],
    ),
    "more set aside than allowed": (
        {"models__demo__resources__requests__memory": "8Gi"},
        ["models.demo.resources.requests.memory", "8Gi", "models.demo.resources.limits.memory", "2Gi"],
    ),
    "more processors set aside than allowed": (
        {"models__demo__resources__requests__cpu": "2500m"},
        ["models.demo.resources.requests.cpu", "models.demo.resources.limits.cpu"],
    ),
    "more shared than there is": (
        {"models__demo__tensorParallelSize": 2},
        ["models.demo.sharedMemory", "models.demo.resources.limits.memory"],
    ),
    "more shared than there is by stages": (
        {"models__demo__pipelineParallelSize": 2},
        ["models.demo.sharedMemory", "models.demo.resources.limits.memory"],
    ),
    "more kept than there is": (
        {"redis__maxMemory": "1gb"},
        ["redis.maxMemory", "redis.resources.limits.memory"],
    ),
    "more kept than the volume has": (
        {"redis__persistence__size": "500Mi"},
        ["redis.maxMemory", "redis.persistence.size"],
    ),
    "more blocks than /tmp has room for": (
        {"models__demo__flags": {"kvDiskPath": "/tmp/kv", "kvDiskSpace": 4}},
        ["models.demo.flags.kvDiskSpace", "models.demo.temporaryStorage"],
    ),
    "the Secret of another Redis": (
        {"redis__mode": "external", "redis__external__host": "r", "redis__existingSecret": "x"},
        ["redis.existingSecret", "redis.external.existingSecret"],
    ),
    "two users of Redis": (
        {"redis__mode": "external", "redis__external": {"urlKey": "u", "existingSecret": "s", "username": "x"}},
        ["redis.external.username", "redis.external.urlKey"],
    ),
    "KEDA without certificates": (
        {
            "tls__mode": "existingSecret",
            "tls__existingSecret": {"engine": "a", "router": "b"},
            "autoscaling__mode": "keda",
        },
        ["tls.mode", "autoscaling.mode", "tls.existingSecret.keda"],
    ),
    "scaled routers that know of nobody": (
        {"redis__mode": "none", "router__autoscaling__enabled": True},
        ["router.autoscaling.enabled", "redis.mode"],
    ),
    "fewest routers above most": (
        {"router__autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}},
        ["router.autoscaling.minReplicas", "maxReplicas"],
    ),
    "a class of nothing": (
        {"router__service__loadBalancerClass": "x"},
        ["router.service.loadBalancerClass", "router.service.type"],
    ),
    "ports of no node": (
        {"router__service__nodePorts__http": 30080},
        ["router.service.nodePorts", "router.service.type"],
    ),
    "a volume that is there already": (
        {"router__volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]},
        ["router.volumes", "tmp"],
    ),
    "a volume that nobody sees": (
        {"models__demo__volumes": [{"name": "x", "configMap": {"name": "c"}}]},
        ["models.demo.volumes", "models.demo.volumeMounts"],
    ),
    "a volume over the model": (
        {
            "router__volumes": [{"name": "x", "configMap": {"name": "c"}}],
            "router__volumeMounts": [{"name": "x", "mountPath": "/models/demo/"}],
        },
        ["router.volumeMounts", "/models/demo"],
    ),
    "a label of the chart": ({"router__podLabels": {"quire.dev/model": "x"}}, ["router.podLabels", "quire.dev/model"]),
    "a secret in a variable": ({"models__demo__env": {"HF_TOKEN": "x"}}, ["models.demo.env", "tokenSecret"]),
    "a password in a variable": (
        {"router__env": {"HTTPS_PROXY": "http://me:secret@proxy:443"}},
        ["router.env", "HTTPS_PROXY", "router.envFrom"],
    ),
    "a proxy that is closed": (
        {"router__env": {"HTTPS_PROXY": "http://proxy:3128"}},
        ["router.env.HTTPS_PROXY", "networkPolicy.downloadPorts"],
    ),
    "a variable of the chart": ({"router__env": {"QUIRE_ROUTER_WORKERS": "2"}}, ["router.env", "QUIRE_ROUTER_WORKERS"]),
    "an image that moves": ({"redis__image__tag": "7"}, ["redis.image.tag", "redis:7"]),
    "two authorities": (
        {"trust": {"configMap": "a", "existingSecret": "b"}},
        ["trust.configMap", "trust.existingSecret"],
    ),
    "one host for both APIs": (
        {
            "gateway__httpRoute": {"enabled": True, "hostnames": ["x.example.com"]},
            "gateway__grpcRoute": {"enabled": True, "hostnames": ["x.example.com"]},
            "gateway__parentRefs": [{"name": "g"}],
        },
        ["gateway.httpRoute.hostnames", "gateway.grpcRoute.hostnames"],
    ),
    "headers for nobody": ({"telemetry__headersSecret": "x"}, ["telemetry.headersSecret", "telemetry.otlpEndpoint"]),
}


def demo(**changes: Any) -> dict[str, Any]:
    """The demo's values with changes."""
    return with_values(example_values("cpu-demo"), **changes)


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_finds_a_wrong_value(case: str) -> None:
    path, value = WRONG[case]
    errors = list(Draft7Validator(SCHEMA).iter_errors(over(DEFAULTS, demo(**{path: value}))))
    assert errors
    for error in errors:
        place = "__".join(map(str, error.path))
        assert place.startswith(path) or (path.startswith(place) and path.rpartition("__")[2] in error.message)


@pytest.mark.parametrize("case", ["a misspelt key further in", "a word for a number", "no such mode", "root"])
def test_helm_names_a_wrong_value(helm: Helm, case: str) -> None:
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
    assert "secret@" not in message


def test_no_model_is_no_release_and_lint_says_the_same(helm: Helm) -> None:
    sentence = "models is empty: say at least one model and its source, as in ci/cpu-demo-values.yaml."
    with pytest.raises(HelmError, match=re.escape(sentence)):
        helm.render({})
    severity, log = helm.lint(CHART)
    assert severity < 3, "an error of a template"
    assert sentence in log


def test_scaling_to_zero_needs_a_kubernetes_that_supports_it(helm: Helm) -> None:
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


def test_a_name_that_services_cannot_have_is_refused_and_dots_are_none(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"begins with a digit.*fullnameOverride"):
        helm.render(demo(), release="123")
    release = helm.render(demo(fullnameOverride="yes", nameOverride="no"), release="123")
    assert breaches(release) == []
    assert breaches(helm.render(demo(), release="my.release")) == []


def with_model(key: str) -> dict[str, Any]:
    """The demo's values with a single model of that key, and everything that has a long name."""
    return {**demo(autoscaling__mode="hpa", tls__mode="helm"), "models": {key: {"source": {"path": "/x"}}}}


def test_numbers_are_written_out(helm: Helm) -> None:
    release = helm.render(demo(router__limits__maxBodyBytes=10**10))
    (router,) = components(release, "router")
    assert setting(router, "max-body-bytes") == "10000000000"


def test_each_revision_of_pods_is_spread_by_itself(helm: Helm) -> None:
    release = helm.render(demo())
    for component in ("router", "engine"):
        (pod,) = components(release, component)
        (spread,) = pod.spec["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["matchLabelKeys"]) == ("kubernetes.io/hostname", ["pod-template-hash"])
    own = {"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["x"]}
    (pod,) = components(helm.render(demo(router__topologySpread=[own])), "router")
    assert [each["matchLabelKeys"] for each in pod.spec["topologySpreadConstraints"]] == [["x"]]


def test_everything_can_be_turned_off(helm: Helm) -> None:
    values = demo(
        networkPolicy__enabled=False,
        redis__mode="none",
        router__auth__mode="none",
        engineToken__existingSecret="tokens",
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
def test_the_notes_show_how_to_send_a_request(example: Examples, values: str) -> None:
    assert "/v1/" in example(values, "1.37").notes


def breaches(release: Release) -> list[str]:
    """Whatever the policies find."""
    return [breach for policy in POLICIES for breach in policy(release)]
