"""A Kubernetes API server that knows just what Helm asks of one: discovery, objects that are created, read, listed,
watched, applied, replaced and deleted, and the immutable fields that make an upgrade fail. Nothing runs in it but
single pods, where a test says how, and there are no controllers but the one for the claims of a StatefulSet.
"""

import itertools
import json
import re
import select
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.kube.custom_kinds import CUSTOM_KINDS
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


class Event(NamedTuple):
    """What happened to an object, and its version since."""

    version: int
    happened: str
    key: Key
    value: Object


class Target(NamedTuple):
    """What a path means: a kind, a namespace ("" is all of them or none) and a name ("" is a list)."""

    kind: Kind
    namespace: str
    name: str


def kinds_of(table: Mapping[str, str]) -> Iterator[Kind]:
    """The kinds of a table such as ``KINDS``."""
    for api_version, names in table.items():
        for name in names.split():
            yield Kind(api_version, name.rstrip("!"), not name.endswith("!"))


@dataclass
class Cluster:
    """The objects of one cluster, and what it says of itself.

    ``custom_kinds`` are those of ``CUSTOM_KINDS`` that are installed, by API version. ``play`` runs each Pod that is
    made: given the Pod, it returns the status with which its container ends; without it no Pod ever starts.
    """

    version: str = "1.37"
    custom_kinds: Mapping[str, str] = field(default_factory=lambda: CUSTOM_KINDS)
    objects: dict[Key, Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    play: Callable[[Object], int] | None = None

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.events: list[Event] = []
        self.kinds = [*kinds_of(KINDS), *kinds_of(self.custom_kinds)]
        self._last = 0
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
            "metadata": {"resourceVersion": str(self._last)}, "items": items,
        }  # fmt: skip

    def create(self, kind: Kind, namespace: str, value: Object) -> Object:
        """Adds an object that is not there yet."""
        key = Key(kind.name, namespace if kind.namespaced else "", value["metadata"]["name"])
        if key in self.objects:
            raise RefusalError(409, "AlreadyExists", f'{kind.plural} "{key.name}" already exists')
        if kind.namespaced and Key("Namespace", "", namespace) not in self.objects:
            raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
        if kind.name == "CustomResourceDefinition":
            self.kinds += _defined(value)
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

    def merge(self, target: Target, changes: Object) -> Object:
        """A merge patch (RFC 7396) of an object that is there."""
        return self.replace(target, _merged(self.get(target), changes))

    def delete(self, target: Target) -> Object:
        """Takes an object away, and whatever it owns."""
        gone = self.get(target)
        self._remove(Key(target.kind.name, target.namespace, target.name))
        if at(gone, "spec.persistentVolumeClaimRetentionPolicy.whenDeleted") == "Delete":
            for claim in _claims(gone):
                self._remove(Key("PersistentVolumeClaim", target.namespace, claim["metadata"]["name"]))
        for key, value in list(self.objects.items()):
            owners = value["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self._remove(key)
        return gone

    def _keep(self, key: Key, kind: Kind, value: Object, identity: Object) -> Object:
        metadata = {**value["metadata"], **identity}
        if kind.namespaced:
            metadata["namespace"] = key.namespace
        happened = "MODIFIED" if key in self.objects else "ADDED"
        kept = {**value, "apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
        self.objects[key] = self._tell(happened, key, kept)
        if happened == "ADDED" and key.kind == "Pod" and self.play is not None:
            threading.Thread(target=self._run, args=(key, self.play), daemon=True).start()
        return self.objects[key]

    def _remove(self, key: Key) -> None:
        gone = self.objects.pop(key, None)
        if gone is not None:
            self._tell("DELETED", key, gone)

    def _tell(self, happened: str, key: Key, value: Object) -> Object:
        """The object with a new version, of which those who watch hear."""
        with self.changed:
            self._last += 1
            value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(self._last)}}
            self.events.append(Event(self._last, happened, key, value))
            self.changed.notify_all()
        return value

    def _run(self, key: Key, play: Callable[[Object], int]) -> None:
        """Runs a Pod to its end, as a node does, and says how it went."""
        with self.lock:
            pod = self.objects[key]
        self._report(key, {"phase": "Running"})
        code = play(pod)
        ended = {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": {"exitCode": code}}}
        self._report(key, {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]})

    def _report(self, key: Key, status: Object) -> None:
        with self.lock:
            if key in self.objects:
                self.objects[key] = self._tell("MODIFIED", key, {**self.objects[key], "status": status})


def _defined(value: Object) -> Iterator[Kind]:
    """The kinds of a CustomResourceDefinition."""
    spec = value["spec"]
    for version in spec["versions"]:
        yield Kind(f"{spec['group']}/{version['name']}", spec["names"]["kind"], spec["scope"] == "Namespaced")


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
    """An API server over HTTP in this process, with ``tls`` over HTTPS. Each cluster has a path of its own, so that
    what a client has cached of one is never taken for another; the cluster of the path "" has all other paths.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.clusters: dict[str, Cluster] = {}
        self._server = _Server(("127.0.0.1", port), self._handler())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
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
        if prefix not in self.clusters:
            prefix, path = "", self.path.lstrip("/")
        try:
            cluster = self.clusters[prefix]
            query = parse_qs(urlsplit(path).query)
            if query.get("watch") == ["true"]:
                cluster.requests.append((self.command, path))
                self._watch(cluster, cluster.target(urlsplit(path).path), query)
                return
            with cluster.lock:
                cluster.requests.append((self.command, path))
                answer = _serve(cluster, self.command, f"/{path}", self.headers.get("Content-Type", ""), body)
                text = json.dumps(answer).encode()
            form = AGGREGATED if answer.get("kind") == "APIGroupDiscoveryList" else "application/json"
            self._send(200 if self.command != "POST" else 201, text, form)
        except RefusalError as refusal:
            self._send(refusal.code, json.dumps(refusal.status).encode(), "application/json")

    def _watch(self, cluster: Cluster, target: Target, query: Mapping[str, list[str]]) -> None:
        """What happens to objects, a line for each, until the client has gone or its time is over."""
        if "sendInitialEvents" in query:
            raise RefusalError(422, "Invalid", "sendInitialEvents: forbidden: this server has no watches that list")
        since = int(query["resourceVersion"][0])
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        deadline = time.monotonic() + float(query.get("timeoutSeconds", ["300"])[0])
        while time.monotonic() < deadline and not select.select([self.connection], [], [], 0)[0]:
            with cluster.changed:
                news = [event for event in cluster.events if event.version > since and _watched(target, query, event)]
                since = cluster.events[-1].version if cluster.events else since
                if not news:
                    cluster.changed.wait(0.1)
            for event in news:
                self.wfile.write(json.dumps({"type": event.happened, "object": event.value}).encode() + b"\n")
            self.wfile.flush()

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
    if method == "PATCH" and content_type == "application/merge-patch+json":
        return cluster.merge(target, json.loads(body))
    value = _object(content_type, body)
    if method == "POST":
        return cluster.create(target.kind, target.namespace, value)
    return cluster.replace(target, value) if method == "PUT" else cluster.apply(target, value)


def _merged(value: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    merged = dict(value) if isinstance(value, dict) else {}
    for name, change in changes.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), change)
    return merged


def _watched(target: Target, query: Mapping[str, list[str]], event: Event) -> bool:
    return (
        event.key.kind == target.kind.name
        and target.namespace in ("", event.key.namespace)
        and selects(query.get("labelSelector", [""])[0], event.value["metadata"].get("labels", {}))
    )


def _object(content_type: str, body: bytes) -> Object:
    if body.startswith(MAGIC):
        return read_secret(body)
    if content_type not in ("application/json", "application/apply-patch+yaml"):
        raise RefusalError(415, "UnsupportedMediaType", f"{content_type} is not understood")
    # What is called YAML is JSON nearly always, and much sooner read as such.
    value: Object = json.loads(body) if body.startswith(b"{") else yaml.load(body, Loader=yaml.CSafeLoader)
    return value


def _discovery(cluster: Cluster, path: str) -> Object | None:
    """What Kubernetes says of itself; all kinds at once, as it does since 1.30, and before where it is asked to."""
    if path == "/readyz":
        return {}
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
    if path.startswith("/openapi/v3"):
        return _openapi(cluster, path)
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


def _openapi(cluster: Cluster, path: str) -> Object | None:
    """No schemas, but for each kind that the server itself refuses unknown fields, so that no client looks for them."""
    versions = {("apis/" if "/" in kind.api_version else "api/") + kind.api_version for kind in cluster.kinds}
    if path == "/openapi/v3":
        return {"paths": {version: {"serverRelativeURL": f"/openapi/v3/{version}"} for version in sorted(versions)}}
    where = path.removeprefix("/openapi/v3/")
    if where not in versions:
        return None
    api_version = where.partition("/")[2]
    kinds = [kind for kind in cluster.kinds if kind.api_version == api_version]
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": cluster.version},
        "paths": {f"/{where}/{kind.plural}/{{name}}": {"patch": _patch(kind)} for kind in kinds},
    }


def _patch(kind: Kind) -> Object:
    group, _, version = kind.api_version.rpartition("/")
    return {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind.name},
    }
