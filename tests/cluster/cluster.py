"""A person's cluster, by the commands that a person has: ``kubectl`` and ``helm``."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONSENT = "QUIRE_CLUSTER"
"""Must name the context of ``KUBECONFIG`` before the cluster is touched: a KUBECONFIG alone may lead to anything."""
HOOKS = "QUIRE_CLUSTER_HOOKS"
"""A program that does what no API of Kubernetes does; ``hooks/README.md`` has its words."""
SPARE_NODE = "QUIRE_CLUSTER_NODE"
"""The node that rows may drain, end and cut off: one without the API server."""
MODEL_FOLDER = "QUIRE_CLUSTER_MODEL"
"""Where the nodes have the demo model."""
HOW = (
    "A cluster on one machine is in k8s/README.md (k8s/kind); then KUBECONFIG=… "
    f"{CONSENT}=$(kubectl config current-context) make cluster-test"
)
SECONDS = 180.0
Manifest = dict[str, Any]


class ClusterError(Exception):
    """What a command said when it failed."""


def missing(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why there is no cluster for these tests, and how to get one; None where there is."""
    absent = [program for program in ("kubectl", "helm") if not shutil.which(program)]
    if not environment.get("KUBECONFIG"):
        why = "KUBECONFIG is not set"
    elif not environment.get(CONSENT):
        why = f"{CONSENT} does not name a context: the cluster of KUBECONFIG is left alone"
    elif absent:
        why = f"{' and '.join(absent)} are not on the PATH"
    elif (context := run(["kubectl", "config", "current-context"]).strip()) != environment[CONSENT]:
        why = f"{CONSENT} is {environment[CONSENT]}, and KUBECONFIG leads to {context}"
    else:
        return None
    return f"needs a cluster, and {why}. {HOW}"


def run(words: Sequence[str], text: str | None = None, *, seconds: float = SECONDS) -> str:
    """What a command prints. Raises ``ClusterError`` with its complaint, also when it takes longer."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)} takes more than {seconds:.0f} s") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def eventually(what: str, happened: Callable[[], Any], *, seconds: float = SECONDS, every: float = 0.5) -> Any:
    """The first answer of ``happened`` that is true. Raises ``ClusterError`` when there is none in time; until then
    the cluster may as well not answer.
    """
    end, last = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            if answer := happened():
                return answer
        except ClusterError as error:
            last = f": {error}"
        time.sleep(every)
    raise ClusterError(f"not within {seconds:.0f} s: {what}{last}")


class Cluster:
    """The cluster of ``KUBECONFIG``. ``tag`` and ``registry`` are where its nodes find Quire's images."""

    def kubectl(self, *words: str, text: str | None = None, seconds: float = SECONDS) -> str:
        """What ``kubectl`` prints."""
        return run(["kubectl", *words], text, seconds=seconds)

    def get(self, *words: str) -> Manifest:
        """What ``kubectl get`` finds, as an object or a list of them."""
        found: Manifest = json.loads(self.kubectl("get", *words, "--output", "json"))
        return found

    def items(self, *words: str) -> list[Manifest]:
        """The objects of a list."""
        found: list[Manifest] = self.get(*words)["items"]
        return found

    def apply(self, *manifests: Manifest) -> None:
        """Makes objects, or changes them."""
        wrapped = {"apiVersion": "v1", "kind": "List", "items": manifests}
        self.kubectl("apply", "--filename", "-", text=json.dumps(wrapped))

    def serves(self, api_version: str) -> bool:
        """Whether it knows a group of kinds."""
        return api_version in self.kubectl("api-versions").split()

    def minor(self) -> int:
        """Of its version: 37 of 1.37.2."""
        return int(json.loads(self.kubectl("get", "--raw", "/version"))["minor"].rstrip("+"))

    def nodes(self) -> list[str]:
        """Names of nodes that pods may be put on, the spare one last."""
        nodes = self.items("nodes")
        usable = [node["metadata"]["name"] for node in nodes if not node["spec"].get("taints")]
        return sorted(usable, key=lambda name: (name == spare_node(), name))

    def ready(self, node: str) -> bool:
        """Whether a node's kubelet has said so lately."""
        conditions = {each["type"]: each["status"] for each in self.get("node", node)["status"]["conditions"]}
        return conditions["Ready"] == "True"

    def namespaced(self, name: str) -> None:
        """Makes a namespace, and in it a claim ``quire-demo`` on the folder with the model that each node has."""
        folder = os.environ.get(MODEL_FOLDER, "/models/quire-demo")
        size, volume = {"storage": "1Gi"}, f"{name}-quire-demo"
        shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        spec = {
            **shared, "capacity": size, "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": folder, "type": "Directory"}, "claimRef": {"namespace": name, "name": "quire-demo"},
        }  # fmt: skip
        claim = {**shared, "volumeName": volume, "resources": {"requests": size}}
        self.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec},
            {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": "quire-demo", "namespace": name}, "spec": claim,
            },
        )  # fmt: skip

    def forget(self, namespace: str) -> None:
        """Takes the namespace away, with all that is in it."""
        self.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout", "300s", seconds=330)
        self.kubectl("delete", "persistentvolume", f"{namespace}-quire-demo", "--ignore-not-found")


def spare_node() -> str | None:
    """The node that may be taken away, if there is one."""
    return os.environ.get(SPARE_NODE)


@dataclass(frozen=True)
class Hooks:
    """Calls the program of ``QUIRE_CLUSTER_HOOKS``: a verb, and what it is done to."""

    program: str | None = None

    @classmethod
    def here(cls) -> "Hooks":
        """Those of the environment, if there are any."""
        return cls(os.environ.get(HOOKS))

    def missing(self, *words: str) -> str | None:
        """Why this cannot be done here, or None: ``can VERB THING`` must succeed."""
        if self.program is None:
            return f"{HOOKS} is not set (tests/cluster/hooks has one for kind)"
        done = subprocess.run([self.program, "can", *words], capture_output=True, text=True, check=False)
        return f"{self.program} does not know {' '.join(words)}" if done.returncode else None

    def __call__(self, *words: str) -> None:
        """Does it. Raises ``ClusterError``."""
        assert self.program is not None, "a row asks first what is missing"
        run([self.program, *words])


class Release:
    """One release of the chart. ``values`` are those of its last upgrade."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, folder: Path) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.values: Manifest = {}
        self._folder = folder

    def helm(self, *words: str, seconds: float = 400.0) -> str:
        """What ``helm`` prints."""
        return run(["helm", *words, "--namespace", self.namespace], seconds=seconds)

    def set(self, chart: Path, values: Manifest, *words: str, wait: bool = True) -> None:
        """Installs the release, or upgrades it. Returns when all its pods are ready."""
        file = self._folder / f"{self.namespace}-{self.name}.json"
        file.write_text(json.dumps(values))
        waits = ("--wait", "--timeout", "300s") if wait else ()
        # From 4 on helm leaves alone what others have set, as ``kubectl scale`` and autoscalers set replicas.
        forces = () if self.helm("version", "--template", "{{.Version}}").startswith("v3") else ("--force-conflicts",)
        self.helm("upgrade", "--install", self.name, str(chart), "--values", str(file), *forces, *waits, *words)
        self.values = values

    def test(self) -> str:
        """``helm test``."""
        return self.helm("test", self.name, "--timeout", "300s")

    def uninstall(self) -> None:
        """Takes it away, and waits until all is gone."""
        self.helm("uninstall", self.name, "--wait", "--timeout", "300s")

    def kubectl(self, *words: str, text: str | None = None, seconds: float = SECONDS) -> str:
        """``kubectl`` in the release's namespace."""
        return self.cluster.kubectl("--namespace", self.namespace, *words, text=text, seconds=seconds)

    def pods(self, component: str, model: str = "") -> list[Manifest]:
        """Pods that are not on their way out, of ``router``, ``engine`` or ``redis``."""
        labels = [f"app.kubernetes.io/instance={self.name}", f"app.kubernetes.io/component={component}"]
        labels += [f"quire.dev/model={model}"] if model else []
        found = self.cluster.items("--namespace", self.namespace, "pods", "--selector", ",".join(labels))
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pods_of_all_kinds(self) -> list[Manifest]:
        """All pods of the release."""
        return [pod for component in ("redis", "router", "engine") for pod in self.pods(component)]

    def evict(self, pod: Manifest) -> None:
        """Asks that a pod goes, as who drains a node does. Raises ``ClusterError`` where its budget forbids it."""
        metadata = {key: pod["metadata"][key] for key in ("name", "namespace")}
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
        asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        self.kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(asked))

    def workload(self, component: str, model: str = "demo") -> str:
        """What runs the component's pods, as ``kubectl`` names it."""
        own = self.fullname
        names = {"router": f"deployment/{own}-router", "redis": f"statefulset/{own}-redis"}
        return names.get(component, f"deployment/{own}-engine-{model}")

    def settled(self, *components: str, seconds: float = 300.0) -> None:
        """Waits until all that there shall be is rolled out and ready."""
        for component in components or ("redis", "router", "engine"):
            what = self.workload(component)
            self.kubectl("rollout", "status", what, f"--timeout={seconds:.0f}s", seconds=seconds + 10)
            eventually(f"{what} is ready", lambda what=what: self._complete(what), seconds=seconds)

    def _complete(self, what: str) -> bool:
        found = json.loads(self.kubectl("get", what, "--output", "json"))
        wanted, status = found["spec"].get("replicas", 1), found["status"]
        return status.get("readyReplicas", 0) == wanted == status.get("replicas", 0)

    @property
    def fullname(self) -> str:
        """What names of its objects begin with."""
        return self.name if "quire" in self.name else f"{self.name}-quire"

    def url(self) -> str:
        """The routers' address in the cluster, as a number: a client that has it needs no DNS."""
        service = json.loads(self.kubectl("get", "service", f"{self.fullname}-router", "--output", "json"))
        return f"http://{service['spec']['clusterIP']}:8000"

    def secret(self, name: str, key: str) -> str:
        """What a Secret of the release holds."""
        path = "{.data." + key.replace(".", "\\.") + "}"
        coded = self.kubectl("get", "secret", f"{self.fullname}-{name}", "--output", f"jsonpath={path}")
        return base64.b64decode(coded).decode()
