"""Runs ``client.py`` in a pod while a row's trouble is made, and reads what it saw."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster.client import Seen
from tests.cluster.cluster import Cluster, ClusterError, Release, eventually

SCRIPT = Path(__file__).with_name("client.py")
MODEL = "quire-demo"
WORKERS = 3
BEGINNINGS = (
    "Once upon a time", "The old house at the end of the road", "In the morning the children", "A small bird sat on",
    "Nobody in the village knew why", "The boat was",
)  # fmt: skip
REQUESTS = tuple(
    {"prompt": prompt, "max_tokens": 250, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    for seed, prompt in enumerate(BEGINNINGS)
)
"""Sampled, as a token that was sampled a second time must be the same."""
Known = dict[str, Any]
ENOUGH = {"requests": {"cpu": "200m", "memory": "128Mi"}}
"""Pods that request no processor get what others leave: a client would wait for itself while an engine starts."""


@dataclass
class Load:
    """A client of a release, from the beginning of a block to its end; then ``seen`` is what it saw. Without ``known``
    answers it asks everything once. ``key`` is the API key that the release made, unless there is another.
    """

    release: Release
    known: Known | None
    node: str
    model: str = MODEL
    key: str = ""
    seen: Seen = field(default_factory=Seen)
    name: str = field(default_factory=lambda: f"load-{uuid.uuid4().hex[:6]}")

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self.release.cluster

    def __enter__(self) -> Self:
        plan = {
            "url": self.release.url(), "key": self.key or made_key(self.release), "model": self.model,
            "workers": WORKERS, "requests": REQUESTS, "known": self.known,
        }  # fmt: skip
        files = {"client.py": SCRIPT.read_text(), "plan.json": json.dumps(plan)}
        self.cluster.apply(self._of("ConfigMap", data=files), self._of("Pod", spec=self._pod()))
        if self.known is not None:
            self.answers(WORKERS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.seen = self._end()
        finally:
            self._kubectl("delete", f"pod/{self.name}", f"configmap/{self.name}", "--grace-period=0", "--force")

    def answers(self, more: int) -> None:
        """Waits until there are so many more than now."""
        (before,) = eventually("the client runs", lambda: (self._count(),))
        eventually(f"{more} more answers", lambda: self._count() >= before + more, seconds=240)

    def _count(self) -> int:
        lines = self._kubectl("logs", self.name, "--tail=1").split()
        return int(lines[1]) if lines[:1] == ["answered"] else 0

    def _end(self) -> Seen:
        if self.known is not None:
            self._kubectl("exec", self.name, "--", "python", "-c", "import os; os.kill(1, 15)")
        eventually("the client ends", self._ended, seconds=300)
        return Seen(**json.loads(self._kubectl("logs", self.name, "--tail=1")))

    def _ended(self) -> bool:
        phase = self._kubectl("get", "pod", self.name, "--output", "jsonpath={.status.phase}")
        if phase == "Failed":
            raise AssertionError(self._kubectl("logs", self.name, "--tail=30"))
        return phase == "Succeeded"

    def _kubectl(self, *words: str) -> str:
        return self.release.kubectl(*words)

    def _of(self, kind: str, **fields: Any) -> dict[str, Any]:
        metadata = {"name": self.name, "namespace": self.release.namespace}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields}

    def _pod(self) -> dict[str, Any]:
        return {
            "nodeName": self.node, "restartPolicy": "Never", "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False, "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "client", "image": router_image(self.release), "imagePullPolicy": "IfNotPresent",
                "command": ["python", "/client/client.py", "/client/plan.json"],
                "resources": ENOUGH,
                "volumeMounts": [{"name": "client", "mountPath": "/client"}],
            }],
            "volumes": [{"name": "client", "configMap": {"name": self.name}}],
        }  # fmt: skip


def made_key(release: Release) -> str:
    """The API key that the release made."""
    return release.secret("api-keys", "api-keys").split(",")[0]


def router_image(release: Release) -> str:
    """The image of the release's routers, which has Python and what the client imports."""
    found = json.loads(release.kubectl("get", release.workload("router"), "--output", "json"))
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def undisturbed(release: Release, node: str, model: str = MODEL) -> Known:
    """What the requests are answered with while nothing happens."""
    with Load(release, None, node, model) as load:
        pass
    if load.seen.lost or load.seen.errors:
        raise ClusterError(f"an undisturbed client saw {load.seen.lost} and {load.seen.errors}")
    return load.seen.texts


SIGNAL = """
import os, pathlib, signal, sys
container, name = sys.argv[1:]
groups = pathlib.Path("/proc").glob("[0-9]*/cgroup")
inside = [int(group.parent.name) for group in groups if container in group.read_text()]
assert inside, "no process of the container is here"
for process in (sorted(inside)[:1] if name == "SIGKILL" else inside):
    os.kill(process, signal.Signals[name])
"""
"""A container's first process is its init, which no signal from inside of it ends: this is run among the node's own."""


@dataclass
class Agents:
    """A pod on each node that sends signals to processes of containers there. It may do anything there: close it."""

    release: Release
    _there: dict[str, str] = field(default_factory=dict)

    def signal(self, pod: dict[str, Any], name: str) -> None:
        """Sends ``SIGKILL`` to the first process of a pod's container, or another signal to all of them."""
        node = pod["spec"]["nodeName"]
        container = pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        self.release.kubectl("exec", self.on(node), "--", "python", "-c", SIGNAL, container, name)

    def on(self, node: str) -> str:
        """The name of the pod on a node, which is made if it is not there."""
        if node not in self._there:
            name = f"agent-{uuid.uuid4().hex[:6]}"
            container = {
                "name": "agent", "image": router_image(self.release), "command": ["sleep", "infinity"],
                "securityContext": {"privileged": True, "runAsUser": 0}, "resources": ENOUGH,
            }  # fmt: skip
            spec = {
                "nodeName": node, "hostPID": True, "terminationGracePeriodSeconds": 0, "containers": [container],
                "tolerations": [{"operator": "Exists"}], "automountServiceAccountToken": False,
            }  # fmt: skip
            metadata = {"name": name, "namespace": self.release.namespace}
            self.release.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
            self.release.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
            self._there[node] = name
        return self._there[node]

    def close(self) -> None:
        """Takes the pods away."""
        for name in self._there.values():
            self.release.kubectl("delete", "pod", name, "--grace-period=0", "--force")


def named(pods: Sequence[dict[str, Any]]) -> list[str]:
    """Names of pods."""
    return [pod["metadata"]["name"] for pod in pods]
