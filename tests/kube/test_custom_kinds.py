"""Custom resources are held against the schemas of those who define them, strictly, and against the rules by hand."""

import json
import re
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.kube.custom_kinds import CUSTOM_KINDS, definition, specification
from tests.kube.custom_rules import RULES
from tests.kube.helm import ROOT, Manifest
from tests.kube.validity import custom_problem

KINDS = [(version, kind) for version, kinds in CUSTOM_KINDS.items() for kind in kinds.split()]
GATEWAY, KEDA, CERTIFICATES = "gateway.networking.k8s.io/v1", "keda.sh/v1alpha1", "cert-manager.io/v1"
GROUPS, POOLS = "leaderworkerset.x-k8s.io/v1", "inference.networking.k8s.io/v1"
PARENT = {"name": "public"}
ROUTE: Manifest = {
    "parentRefs": [PARENT],
    "rules": [{
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "backendRefs": [{"name": "quire-router", "port": 8000}],
        "timeouts": {"request": "0s", "backendRequest": "1h"},
    }],
}  # fmt: skip
CALLS: Manifest = {
    "parentRefs": [PARENT],
    "rules": [{"matches": [{"method": {"service": "quire.v1.Llm"}}], "backendRefs": [{"name": "quire", "port": 8001}]}],
}
LISTENER = {"name": "https", "port": 443, "protocol": "HTTPS", "tls": {"certificateRefs": [{"name": "public"}]}}
DOOR: Manifest = {"gatewayClassName": "example", "listeners": [LISTENER]}
SCALED: Manifest = {
    "scaleTargetRef": {"name": "quire-engine"},
    "minReplicaCount": 1,
    "maxReplicaCount": 2,
    "triggers": [{"type": "external-push", "name": "load", "metadata": {"target": "16"}}],
}
CERTIFICATE: Manifest = {
    "secretName": "quire-router-tls",
    "dnsNames": ["quire-router"],
    "duration": "2160h",
    "renewBefore": "720h",
    "privateKey": {"algorithm": "ECDSA", "size": 256},
    "issuerRef": {"name": "quire-ca"},
}
GROUP: Manifest = {"replicas": 2, "leaderWorkerTemplate": {"size": 2, "workerTemplate": {"spec": {}}}}
STANDING = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 0}}
POOL: Manifest = {
    "selector": {"matchLabels": {"app": "vllm"}},
    "targetPorts": [{"number": 8000}],
    "endpointPickerRef": {"name": "quire-router-internal", "port": {"number": 9002}, "failureMode": "FailOpen"},
}
ISSUER: Manifest = {"ca": {"secretName": "quire-ca"}}
GOOD = {
    "HTTPRoute": (GATEWAY, ROUTE), "GRPCRoute": (GATEWAY, CALLS), "Gateway": (GATEWAY, DOOR),
    "ScaledObject": (KEDA, SCALED), "Certificate": (CERTIFICATES, CERTIFICATE), "Issuer": (CERTIFICATES, ISSUER),
    "LeaderWorkerSet": (GROUPS, GROUP), "InferencePool": (POOLS, POOL),
}  # fmt: skip
BAD: list[tuple[str, str, Any, str]] = [
    ("HTTPRoute", "rules.0.timeout", "1s", "Additional properties"),
    ("HTTPRoute", "rules.0.matches.0.path.type", "Prefix", "is not one of"),
    ("HTTPRoute", "rules.0.timeouts.request", "1 hour", "does not match"),
    ("HTTPRoute", "rules.0.timeouts.request", "10m", "longer than request"),
    ("HTTPRoute", "rules.0.matches.0.path.value", "v1", "absolute path"),
    ("HTTPRoute", "rules.0.matches.0.path.value", "/v1/../health", "absolute path"),
    ("HTTPRoute", "rules.0.backendRefs", [{"name": "quire-router"}], "without a port"),
    ("HTTPRoute", "parentRefs", [PARENT, PARENT], "twice"),
    ("GRPCRoute", "rules.0.matches.0.method", {"type": "Exact"}, "neither service nor method"),
    ("GRPCRoute", "rules.0.backendRefs.0.port", 0, "minimum"),
    ("Gateway", "listeners", [LISTENER, LISTENER], "twice"),
    ("Gateway", "listeners.0.tls", {"mode": "Terminate"}, "without a certificate"),
    ("Gateway", "listeners.0.protocol", "HTTP", "which HTTP has not"),
    ("ScaledObject", "minReplicas", 1, "Additional properties"),
    ("ScaledObject", "triggers.0.metadata.target", 16, "is not of type 'string'"),
    ("ScaledObject", "maxReplicaCount", 0, "less than minReplicaCount"),
    ("ScaledObject", "idleReplicaCount", 1, "not less than minReplicaCount"),
    ("ScaledObject", "triggers.0.metricType", "Average", "metricType"),
    ("ScaledObject", "triggers", [], "none"),
    ("ScaledObject", "triggers", 2 * SCALED["triggers"], "one name for two"),
    ("Certificate", "issuerRef", {"kind": "Issuer"}, "'name' is a required property"),
    ("Certificate", "usages", ["server"], "is not one of"),
    ("Certificate", "dnsNames", [], "for nobody"),
    ("Certificate", "commonName", 65 * "x", "64 characters"),
    ("Certificate", "duration", "30m", "less than an hour"),
    ("Certificate", "renewBefore", "2160h", "renewBefore"),
    ("Certificate", "privateKey.size", 2048, "no ECDSA"),
    ("Issuer", "selfSigned", {}, "of one type"),
    ("LeaderWorkerSet", "leaderWorkerTemplate.restartPolicy", "Always", "is not one of"),
    ("LeaderWorkerSet", "leaderWorkerTemplate.size", 0, "no pod"),
    ("LeaderWorkerSet", "rolloutStrategy", STANDING, "no update could begin"),
    ("LeaderWorkerSet", "template", {}, "Additional properties"),
    ("InferencePool", "endpointPickerRef", {"name": "quire-router-internal"}, "without a port"),
    ("InferencePool", "endpointPickerRef.failureMode", "Open", "is not one of"),
    ("InferencePool", "selector.matchLabels", {}, "non-empty"),
    ("InferencePool", "targetPorts", 2 * [{"number": 8000}], "twice"),
    ("InferencePool", "extensionRef", {"name": "x"}, "Additional properties"),
]  # fmt: skip


def manifest(kind: str, spec: Manifest) -> Manifest:
    return {"apiVersion": GOOD[kind][0], "kind": kind, "metadata": {"name": "x"}, "spec": spec}


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_right_is_taken(kind: str) -> None:
    assert custom_problem(manifest(kind, GOOD[kind][1])) is None


@pytest.mark.parametrize(("kind", "path", "value", "why"), BAD)
def test_what_is_wrong_is_refused(kind: str, path: str, value: Any, why: str) -> None:
    spec = json.loads(json.dumps(GOOD[kind][1]))
    inner = spec
    *folders, last = path.split(".")
    for folder in folders:
        inner = inner[int(folder) if isinstance(inner, list) else folder]
    inner[last] = value
    assert why in (custom_problem(manifest(kind, spec)) or "it is taken")


def test_every_rule_by_hand_is_broken_once() -> None:
    assert set(RULES) == set(GOOD)


@pytest.mark.parametrize(("api_version", "kind"), KINDS)
def test_a_custom_resource_definition_agrees_with_the_schema(api_version: str, kind: str) -> None:
    schema = specification(api_version, kind)
    assert schema is not None
    Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object"
    defined = definition(api_version, kind, f"{kind.lower()}s")
    assert structural(defined["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def structural(schema: Manifest) -> bool:
    """Whether an API server takes a definition with that schema: the rules for ``properties`` and types."""
    if "type" not in schema:
        own = "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"
        return any(schema.get(word) is True for word in own)
    assert not {"properties", "additionalProperties"} <= set(schema)
    assert schema.get("additionalProperties", {}) is not False
    assert isinstance(schema["type"], str)
    inner = [
        *schema.get("properties", {}).values(),
        *(schema[name] for name in ("items", "additionalProperties") if name in schema),
    ]
    return schema["type"] in ("object", "array", "string", "integer", "number", "boolean") and all(
        map(structural, inner)
    )


def test_there_is_a_schema_for_what_is_made_here_and_for_nothing_else() -> None:
    texts = [
        path.read_text()
        for folder in ("charts/quire/templates", "k8s")
        for path in sorted((ROOT / folder).rglob("*.yaml"))
    ]
    made = {kind for _, kind in KINDS if any(f"\nkind: {kind}\n" in f"\n{text}\n" for text in texts)}
    assert made == {kind for _, kind in KINDS}


def test_what_the_pages_show_is_taken() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "k8s/README.md", ROOT / "charts/quire/README.md"]
    texts = [
        text
        for page in pages
        for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    shown = [part for text in texts for part in yaml.safe_load_all(text) if isinstance(part, dict)]
    ours = [part for part in shown if part.get("apiVersion") in CUSTOM_KINDS]
    assert ours
    assert [problem for part in ours if (problem := custom_problem(part))] == []
