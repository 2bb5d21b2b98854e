"""A Kubernetes API server that knows just what Helm asks of one: discovery, objects that are created, read, listed,
applied, replaced and deleted, and the immutable fields that make an upgrade fail. Nothing runs in it, and there are no
controllers but the one that makes and removes the claims of a StatefulSet.
"""

import itertools
import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.kube.protobuf_secret import MAGIC, read_secret

Object = dict[str, Any]
Labels = Mapping[str, str]

KINDS = {
    "v1": "Namespace! Pod Service Secret ConfigMap ServiceAccount PersistentVolumeClaim Event Endpoints",
    "apps/v1": "Deployment StatefulSet DaemonSet ReplicaSet",
    "batch/v1": "Job CronJob",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy Ingress",
    "discovery.k8s.io/v1": "EndpointSlice",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole! ClusterRoleBinding!",
    "apiregistration.k8s.io/v1": "APIService!",
    "apiextensions.k8s.io/v1": "CustomResourceDefinition!",
    "coordination.k8s.io/v1": "Lease",
    "scheduling.k8s.io/v1": "PriorityClass!",
}
"""The kinds that every cluster has, by API version; those with an exclamation mark belong to no namespace."""
CUSTOM_KINDS = {
    "gateway.networking.k8s.io/v1": "HTTPRoute GRPCRoute Gateway BackendTLSPolicy",
    "keda.sh/v1alpha1": "ScaledObject TriggerAuthentication",
    "monitoring.coreos.com/v1": "ServiceMonitor PodMonitor PrometheusRule",
    "cert-manager.io/v1": "Issuer Certificate",
}
"""What Gateway API, KEDA, prometheus-operator and cert-manager add to a cluster."""

IMMUTABLE = {
    "Deployment": ["spec.selector"],
    "StatefulSet": ["spec.selector", "spec.serviceName", "spec.volumeClaimTemplates", "spec.podManagementPolicy"],
    "Job": ["spec.selector", "spec.template"],
    "PersistentVolumeClaim": ["spec.accessModes", "spec.storageClassName", "spec.volumeName"],
    "Service": ["spec.clusterIP"],
    "RoleBinding": ["roleRef"],
    "ClusterRoleBinding": ["roleRef"],
}
"""Fields that the API server lets nobody change in an object that is there."""

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_NUMBERS = itertools.count(1)


class RefusalError(Exception):
    """What an API server answers instead of an object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
        }  # fmt: skip
        self.code = code


class Kind(NamedTuple):
    """One kind of object, as discovery tells it."""

    api_version: str
    name: str
    namespaced: bool

    @property
    def plural(self) -> str:
        """How a path calls objects of this kind."""
        lower = self.name.lower()
        if lower.endswith("y") and not lower.endswith("ay"):
            return f"{lower[:-1]}ies"
        return f"{lower}es" if lower.endswith(("ss", "ch")) else lower if lower.endswith("s") else f"{lower}s"

    @property
    def listed(self) -> Object:
        """Its entry in the list of one API version, which `lookup` asks for."""
        return {
            "name": self.plural, "singularName": self.name.lower(), "namespaced": self.namespaced,
            "kind": self.name, "verbs": VERBS,
        }  # fmt: skip

    def resource(self, group: str, version: str) -> Object:
        """Its entry in the list of all kinds."""
        return {
            "resource": self.plural, "singularResource": self.name.lower(),
            "scope": "Namespaced" if self.namespaced else "Cluster",
            "responseKind": {"group": group, "version": version, "kind": self.name},
            "verbs": VERBS,
        }  # fmt: skip


class Key(NamedTuple):
    """Where an object is; "" is the namespace of what belongs to none."""

    kind: str
    namespace: str
    name: str


class Target(NamedTuple):
    """What a path means: a kind, a namespace ("" is all of them or none) and a name ("" is a list)."""

    kind: Kind
    namespace: str
    name: str


def _kinds(table: Mapping[str, str]) -> Iterator[Kind]:
    for api_version, names in table.items():
        for name in names.split():
            yield Kind(api_version, name.rstrip("!"), not name.endswith("!"))


@dataclass
class Cluster:
    """The objects of one cluster, and what it says of itself.

    ``custom_kinds`` are those of ``CUSTOM_KINDS`` that are installed, by API version.
    """

    version: str = "1.37"
    custom_kinds: Mapping[str, str] = field(default_factory=lambda: CUSTOM_KINDS)
    objects: dict[Key, Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.kinds = [*_kinds(KINDS), *_kinds(self.custom_kinds)]
        self._revision = itertools.count(1)
        for name in ("default", "kube-system"):
            self.create(self.kind("v1", "Namespace"), "", {"metadata": {"name": name}})
        self._at_start = set(self.objects)

    @property
    def added(self) -> dict[Key, Object]:
        """Everything that was not there when the cluster was new."""
        with self.lock:
            return {key: value for key, value in self.objects.items() if key not in self._at_start}

    def kind(self, api_version: str, name: str) -> Kind:
        """The kind of that name, or a refusal."""
        for kind in self.kinds:
            if (kind.api_version, kind.name) == (api_version, name):
                return kind
        raise RefusalError(404, "NotFound", f"the server has no {name} of {api_version}")

    def target(self, path: str) -> Target:
        """What ``/api/v1/namespaces/default/secrets/name`` and its like mean."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api_version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        for kind in self.kinds:
            if rest and (kind.api_version, kind.plural) == (api_version, rest[0]):
                return Target(kind, namespace, rest[1] if len(rest) > 1 else "")
        raise RefusalError(404, "NotFound", "the server could not find the requested resource")

    def get(self, target: Target) -> Object:
        """The object, or a refusal."""
        try:
            return self.objects[Key(target.kind.name, target.namespace, target.name)]
        except KeyError:
            where = f'{target.kind.plural} "{target.name}" not found'
            raise RefusalError(404, "NotFound", where) from None

    def list(self, target: Target, selector: str) -> Object:
        """The objects of a kind whose labels ``selector`` picks."""
        items = [
            value
            for key, value in self.objects.items()
            if key.kind == target.kind.name
            and target.namespace in ("", key.namespace)
            and selects(selector, value["metadata"].get("labels", {}))
        ]
        return {
            "kind": f"{target.kind.name}List", "apiVersion": target.kind.api_version,
            "metadata": {"resourceVersion": str(next(self._revision))}, "items": items,
        }  # fmt: skip

    def create(self, kind: Kind, namespace: str, value: Object) -> Object:
        """Adds an object that is not there yet."""
        key = Key(kind.name, namespace if kind.namespaced else "", value["metadata"]["name"])
        if key in self.objects:
            raise RefusalError(409, "AlreadyExists", f'{kind.plural} "{key.name}" already exists')
        if kind.namespaced and Key("Namespace", "", namespace) not in self.objects:
            raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
        for claim in _claims(value):
            self.create(self.kind("v1", "PersistentVolumeClaim"), namespace, claim)
        return self._keep(key, kind, value, {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"})

    def replace(self, target: Target, value: Object) -> Object:
        """Puts another object in the place of one that is there."""
        there = self.get(target)
        expected = value["metadata"].get("resourceVersion")
        if expected and expected != there["metadata"]["resourceVersion"]:
            raise RefusalError(409, "Conflict", f'{target.kind.plural} "{target.name}" has been modified')
        _refuse_changes(there, value)
        kept = {name: there["metadata"][name] for name in ("uid", "creationTimestamp")}
        return self._keep(Key(target.kind.name, target.namespace, target.name), target.kind, value, kept)

    def apply(self, target: Target, value: Object) -> Object:
        """Server-side apply with one manager, who owns every field: what it leaves out is gone."""
        value["metadata"].pop("resourceVersion", None)
        if Key(target.kind.name, target.namespace, target.name) in self.objects:
            return self.replace(target, value)
        return self.create(target.kind, target.namespace, value)

    def delete(self, target: Target) -> Object:
        """Takes an object away, and whatever it owns."""
        gone = self.get(target)
        del self.objects[Key(target.kind.name, target.namespace, target.name)]
        if at(gone, "spec.persistentVolumeClaimRetentionPolicy.whenDeleted") == "Delete":
            for claim in _claims(gone):
                self.objects.pop(Key("PersistentVolumeClaim", target.namespace, claim["metadata"]["name"]), None)
        for key, value in list(self.objects.items()):
            owners = value["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self.objects.pop(key, None)
        return gone

    def _keep(self, key: Key, kind: Kind, value: Object, identity: Object) -> Object:
        metadata = {**value["metadata"], **identity, "resourceVersion": str(next(self._revision))}
        if kind.namespaced:
            metadata["namespace"] = key.namespace
        self.objects[key] = {**value, "apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
        return self.objects[key]


def _claims(value: Object) -> Iterator[Object]:
    """The claims that a StatefulSet makes for its pods; of anything else none."""
    for template in at(value, "spec.volumeClaimTemplates") or []:
        for number in range(value["spec"]["replicas"]):
            name = f"{template['metadata']['name']}-{value['metadata']['name']}-{number}"
            yield {"metadata": {"name": name}, "spec": template["spec"]}


def _refuse_changes(there: Object, value: Object) -> None:
    for path in IMMUTABLE.get(there["kind"], []):
        before, after = at(there, path), at(value, path)
        if before != after and not (path == "spec.clusterIP" and after is None):
            raise RefusalError(
                422, "Invalid", f'{there["kind"]} "{there["metadata"]["name"]}" is invalid: {path}: immutable'
            )


def at(value: Any, path: str) -> Any:
    """The part of an object at a dotted path, or None."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def selects(selector: str, labels: Labels) -> bool:
    """Whether a label selector, as a query holds it, picks these labels."""
    for term in re.split(r",(?![^(]*\))", selector) if selector else []:
        if match := re.fullmatch(r"\s*(\S+) (in|notin) \(([^)]*)\)\s*", term):
            chosen = labels.get(match[1]) in [name.strip() for name in match[3].split(",")]
            if chosen != (match[2] == "in"):
                return False
        elif match := re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term):
            if (labels.get(match[1].strip()) == match[3].strip()) != (match[2] != "!="):
                return False
        elif (term.removeprefix("!") in labels) == term.startswith("!"):
            return False
    return True


class HelmApi:
    """An API server over HTTP in this process. Each cluster has a path of its own, so that what a client has cached of
    one is never taken for another.
    """

    def __init__(self) -> None:
        self.clusters: dict[str, Cluster] = {}
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def add(self, cluster: Cluster) -> str:
        """Serves ``cluster`` from now on; the kubeconfig that leads there."""
        path = f"c{next(_NUMBERS)}-{uuid.uuid4().hex[:8]}"
        self.clusters[path] = cluster
        url = f"http://127.0.0.1:{self._server.server_port}/{path}"
        return yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
        })  # fmt: skip

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(_Handler):
            clusters = api.clusters

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a client that asks for everything at once would be refused at five


class _Handler(BaseHTTPRequestHandler):
    clusters: Mapping[str, Cluster]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        prefix, _, path = self.path.lstrip("/").partition("/")
        try:
            cluster = self.clusters[prefix]
            with cluster.lock:
                cluster.requests.append((self.command, path))
                answer = _serve(cluster, self.command, f"/{path}", self.headers.get("Content-Type", ""), body)
                text = json.dumps(answer).encode()
            form = AGGREGATED if answer.get("kind") == "APIGroupDiscoveryList" else "application/json"
            self._send(200 if self.command != "POST" else 201, text, form)
        except RefusalError as refusal:
            self._send(refusal.code, json.dumps(refusal.status).encode(), "application/json")

    def _send(self, code: int, text: bytes, form: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


def _serve(cluster: Cluster, method: str, path: str, content_type: str, body: bytes) -> Object:
    url = urlsplit(path)
    if method == "GET" and (answer := _discovery(cluster, url.path)) is not None:
        return answer
    target = cluster.target(url.path)
    query = parse_qs(url.query)
    if method == "GET":
        return cluster.get(target) if target.name else cluster.list(target, query.get("labelSelector", [""])[0])
    if method == "DELETE":
        return cluster.delete(target)
    value = _object(content_type, body)
    if method == "POST":
        return cluster.create(target.kind, target.namespace, value)
    return cluster.replace(target, value) if method == "PUT" else cluster.apply(target, value)


def _object(content_type: str, body: bytes) -> Object:
    if body.startswith(MAGIC):
        return read_secret(body)
    if content_type not in ("application/json", "application/apply-patch+yaml"):
        raise RefusalError(415, "UnsupportedMediaType", f"{content_type} is not understood")
    value: Object = yaml.load(body, Loader=yaml.CSafeLoader)
    return value


def _discovery(cluster: Cluster, path: str) -> Object | None:
    """What Kubernetes says of itself; all kinds at once, as it does since 1.30, and before where it is asked to."""
    if path == "/version":
        major, minor = cluster.version.split(".")[:2]
        return {"major": major, "minor": minor, "gitVersion": f"v{cluster.version}.0", "platform": "linux/amd64"}
    if path in ("/api", "/apis"):
        versions = dict.fromkeys(kind.api_version for kind in cluster.kinds)
        wanted = [version for version in versions if ("/" in version) == (path == "/apis")]
        groups = [
            _group(version, [kind for kind in cluster.kinds if kind.api_version == version]) for version in wanted
        ]
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": groups,
        }
    api_version = path.removeprefix("/apis/").removeprefix("/api/")
    kinds = [kind.listed for kind in cluster.kinds if kind.api_version == api_version]
    if not kinds:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": kinds}


def _group(api_version: str, kinds: Sequence[Kind]) -> Object:
    group, _, version = api_version.rpartition("/")
    resources = [kind.resource(group, version) for kind in kinds]
    entry = {"version": version, "resources": resources, "freshness": "Current"}
    return {"metadata": {"name": group}, "versions": [entry]}
