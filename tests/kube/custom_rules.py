"""What a schema cannot say of custom resources: those rules that definitions write in CEL or that admission webhooks
check, and that a manifest of ours could break. Written by hand, since nothing here runs CEL.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

Spec = dict[str, Any]
Rule = Callable[[Spec], Iterator[str]]

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
HOUR = 3600.0


def seconds(duration: str) -> float:
    """A duration as Go writes it, such as 1h30m."""
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", duration))


def complaints(kind: str, spec: Spec) -> Iterator[str]:
    """Why an object of that kind would be refused although it fits its schema."""
    for rule in RULES.get(kind, ()):
        yield from rule(spec)


def _parents(spec: Spec) -> Iterator[str]:
    for one, other in combinations(spec.get("parentRefs", ()), 2):
        same = all(one.get(part) == other.get(part) for part in ("group", "kind", "namespace", "name"))
        if same and len({(ref.get("sectionName"), ref.get("port")) for ref in (one, other)}) == 1:
            yield f"parentRefs: {one['name']} is there twice with one sectionName and port"


def _backends(spec: Spec) -> Iterator[str]:
    for rule in spec.get("rules", ()):
        for backend in rule.get("backendRefs", ()):
            if backend.get("kind", "Service") == "Service" and "port" not in backend:
                yield f"backendRefs: Service {backend['name']} without a port"


def _paths(spec: Spec) -> Iterator[str]:
    for rule in spec.get("rules", ()):
        for match in rule.get("matches", ()):
            path = match.get("path", {"value": "/"})
            value = path.get("value", "/")
            if path.get("type", "PathPrefix") == "RegularExpression":
                continue
            if not value.startswith("/") or re.search(r"//|/\.\.?(/|$)|%2f|#", value, re.IGNORECASE):
                yield f"path: {value} is no absolute path in its plain form"


def _route_timeouts(spec: Spec) -> Iterator[str]:
    for rule in spec.get("rules", ()):
        timeouts = rule.get("timeouts", {})
        request, backend = (seconds(timeouts.get(name, "0s")) for name in ("request", "backendRequest"))
        if request and backend > request:
            yield "timeouts: backendRequest is longer than request"


def _grpc_methods(spec: Spec) -> Iterator[str]:
    for rule in spec.get("rules", ()):
        for match in rule.get("matches", ()):
            if "method" in match and not {"service", "method"} & set(match["method"]):
                yield "method: neither service nor method"


def _listeners(spec: Spec) -> Iterator[str]:
    for one, other in combinations(spec.get("listeners", ()), 2):
        if one["name"] == other["name"]:
            yield f"listeners: {one['name']} is there twice"
        if all(one.get(part) == other.get(part) for part in ("port", "protocol", "hostname")):
            yield f"listeners: {one['name']} and {other['name']} are for the same"


def _listener_tls(spec: Spec) -> Iterator[str]:
    for listener in spec.get("listeners", ()):
        tls, protocol = listener.get("tls"), listener["protocol"]
        if tls is not None and protocol in ("HTTP", "TCP", "UDP"):
            yield f"listeners: {listener['name']} has tls, which {protocol} has not"
        if (
            tls
            and tls.get("mode", "Terminate") == "Terminate"
            and not (tls.get("certificateRefs") or tls.get("options"))
        ):
            yield f"listeners: {listener['name']} ends TLS without a certificate"


def _replicas(spec: Spec) -> Iterator[str]:
    least, most = spec.get("minReplicaCount", 0), spec.get("maxReplicaCount", 100)
    if least > most:
        yield "maxReplicaCount is less than minReplicaCount"
    if spec.get("idleReplicaCount", -1) >= least:
        yield "idleReplicaCount is not less than minReplicaCount"


def _triggers(spec: Spec) -> Iterator[str]:
    names = [trigger["name"] for trigger in spec["triggers"] if "name" in trigger]
    if len(names) > len(set(names)):
        yield "triggers: one name for two"
    if not spec["triggers"]:
        yield "triggers: none"
    for trigger in spec["triggers"]:
        if trigger.get("metricType", "AverageValue") not in ("AverageValue", "Value", "Utilization"):
            yield f"triggers: metricType {trigger['metricType']}"


def _certificate_subject(spec: Spec) -> Iterator[str]:
    names = (
        "commonName",
        "dnsNames",
        "uris",
        "emailAddresses",
        "ipAddresses",
        "otherNames",
        "literalSubject",
    )
    if not any(spec.get(name) for name in names):
        yield "a certificate for nobody"
    if len(spec.get("commonName", "")) > 64:
        yield "commonName has more than 64 characters"


def _certificate_times(spec: Spec) -> Iterator[str]:
    lifetime = seconds(spec.get("duration", "2160h"))
    if lifetime < HOUR:
        yield "duration is less than an hour"
    if "renewBefore" in spec and not 5 * 60 <= seconds(spec["renewBefore"]) < lifetime:
        yield "renewBefore is not between five minutes and the duration"


def _certificate_key(spec: Spec) -> Iterator[str]:
    key = spec.get("privateKey", {})
    sizes = {"ECDSA": (256, 384, 521), "RSA": range(2048, 8193)}.get(key.get("algorithm", "RSA"))
    if sizes and "size" in key and key["size"] not in sizes:
        yield f"privateKey: no {key.get('algorithm', 'RSA')} of {key['size']} bits"


def _one_issuer(spec: Spec) -> Iterator[str]:
    if len(spec) != 1:
        yield "an issuer is of one type"


def _group_size(spec: Spec) -> Iterator[str]:
    if spec["leaderWorkerTemplate"].get("size", 1) < 1:
        yield "size: a group of no pod"


def _group_updates(spec: Spec) -> Iterator[str]:
    update = spec.get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {"maxUnavailable": 1})
    if {update.get("maxSurge", 0), update.get("maxUnavailable", 1)} <= {0, "0%"}:
        yield "rollingUpdateConfiguration: no update could begin"


def _picker_port(spec: Spec) -> Iterator[str]:
    picker = spec.get("endpointPickerRef", {"kind": "Other"})
    if picker.get("kind", "Service") == "Service" and "port" not in picker:
        yield "endpointPickerRef: a Service without a port"


def _pool_ports(spec: Spec) -> Iterator[str]:
    numbers = [port["number"] for port in spec["targetPorts"]]
    if len(numbers) > len(set(numbers)):
        yield "targetPorts: one number twice"


RULES: dict[str, list[Rule]] = {
    "HTTPRoute": [_parents, _backends, _paths, _route_timeouts],
    "GRPCRoute": [_parents, _backends, _grpc_methods],
    "Gateway": [_listeners, _listener_tls],
    "ScaledObject": [_replicas, _triggers],
    "Certificate": [_certificate_subject, _certificate_times, _certificate_key],
    "Issuer": [_one_issuer],
    "LeaderWorkerSet": [_group_size, _group_updates],
    "InferencePool": [_picker_port, _pool_ports],
}
