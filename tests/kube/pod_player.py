"""Plays a Pod as a process of this machine: its container's command, with the variables that it would have there."""

import base64
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kube.helm_api import Cluster, Key, Object

SECONDS = 60.0


@dataclass
class PodPlayer:
    """Runs the Pods of a cluster, whose Services are ports here: ``addresses`` has one for each host:port there.
    ``outputs`` are what the Pods have said, by their names.
    """

    cluster: Cluster
    addresses: Mapping[str, str]
    outputs: dict[str, str] = field(default_factory=dict)

    def __call__(self, pod: Object) -> int:
        """The status with which the Pod's only container ends. A Pod that cannot start ends with 128, as there."""
        (container,) = pod["spec"]["containers"]
        name = pod["metadata"]["name"]
        try:
            variables = {entry["name"]: self._value(pod, entry) for entry in container.get("env", [])}
        except LookupError as error:
            self.outputs[name] = f"no such Secret or key: {error}"
            return 128
        command = [sys.executable if word == "python" else word for word in container["command"]]
        done = subprocess.run(
            [*command, *container.get("args", [])], env={"PATH": os.environ["PATH"], **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        self.outputs[name] = done.stdout
        return done.returncode

    def _value(self, pod: Object, entry: Object) -> str:
        if "value" in entry:
            value: str = entry["value"]
            return self.addresses.get(value, value)
        reference = entry["valueFrom"]["secretKeyRef"]
        return secret(self.cluster, reference["name"], pod["metadata"]["namespace"])[reference["key"]]


def secret(cluster: Cluster, name: str, namespace: str = "default") -> dict[str, str]:
    """What a Secret of the cluster holds; a ``LookupError`` where there is none."""
    data = cluster.objects[Key("Secret", namespace, name)]["data"]
    return {key: base64.b64decode(text).decode() for key, text in data.items()}
