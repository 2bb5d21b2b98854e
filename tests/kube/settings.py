"""Reads a container's environment and arguments with the very settings class of the service that runs in it."""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import OTHER_VARIABLES, EngineConfig
from quire_proto.cli import CliSettings, read_settings, reject_unknown_env
from quire_router.config import Settings

from tests.kube.helm import Release
from tests.kube.manifests import Pod

OURS = ("QUIRE_", "KUBERNETES_")


@dataclass(frozen=True)
class Service:
    """A service's settings: their class, and the variables that begin like one and are none."""

    kind: type[CliSettings]
    others: tuple[str, ...] = ()


SERVICES = {"router": Service(Settings), "engine": Service(EngineConfig, OTHER_VARIABLES)}
SECRETS = {"QUIRE_ROUTER_API_KEY": "k" * 40, "QUIRE_ROUTER_REDIS_URL": "rediss://redis.example.com:6379/0"}
"""What a variable of that name holds when it comes from a Secret."""
ELSEWHERE = base64.b64encode(b"from-elsewhere").decode()
"""What a key holds of a Secret that is not the release's own."""
EVERY_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
"""What Kubernetes adds to every container."""


@dataclass(frozen=True)
class Reader:
    """Reads pods' settings. ``spare`` is what Secrets hold that are not the release's own; ``folder`` is for files."""

    spare: Mapping[str, str]
    folder: Path
    patch: pytest.MonkeyPatch

    def read(self, release: Release, pod: Pod) -> Any:
        """The settings that the pod's service starts with. Ends the process, as that does, where they are wrong."""
        container = pod.containers[0]
        folders = self._mounts(release, pod)
        variables = {name: _moved(value, folders) for name, value in {**EVERY_POD, **environment(container)}.items()}
        service = SERVICES[pod.component]
        with self.patch.context() as only:
            for name in [name for name in os.environ if name.startswith(OURS)]:
                only.delenv(name)
            for name in [name for name in variables if name.startswith(OURS)]:
                only.setenv(name, variables[name])
            reject_unknown_env(service.kind, service.others)
            return read_settings(service.kind, [_expand(text, variables) for text in container.get("args", [])])

    def _mounts(self, release: Release, pod: Pod) -> dict[str, Path]:
        """Where the files of the container's Secrets are, by where they would be mounted."""
        volumes = {volume["name"]: volume["secret"] for volume in pod.volumes if "secret" in volume}
        folders = {}
        for mount in pod.containers[0].get("volumeMounts", []):
            if secret := volumes.get(mount["name"]):
                folder = self.folder / pod.name.replace("/", "-") / mount["name"]
                folder.mkdir(parents=True, exist_ok=True)
                for name, text in self._files(release, secret).items():
                    (folder / name).write_bytes(base64.b64decode(text))
                folders[mount["mountPath"]] = folder
        return folders

    def _files(self, release: Release, secret: Mapping[str, Any]) -> dict[str, str]:
        own = [item["data"] for item in release.of("Secret") if item["metadata"]["name"] == secret["secretName"]]
        data = {**(own[0] if own else self.spare)}
        if "items" in secret:
            return {item["path"]: data.get(item["key"], ELSEWHERE) for item in secret["items"]}
        return data


def _moved(value: str, folders: Mapping[str, Path]) -> str:
    for path, folder in folders.items():
        value = value.replace(f"{path}/", f"{folder}/")
    return value


FIELDS = {"metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "0", "status.podIP": "10.0.0.7"}
"""Fields of a pod that it is told as variables, with a value of their kind."""


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's variables as its process sees them; what is not written down has a value of its kind."""
    variables: dict[str, str] = {}
    for entry in container.get("env", []):
        if "value" in entry:
            variables[entry["name"]] = _expand(entry["value"], variables)
        elif "resourceFieldRef" in entry["valueFrom"]:
            variables[entry["name"]] = "1"
        elif (field := entry["valueFrom"].get("fieldRef", {}).get("fieldPath", "")) in FIELDS:
            variables[entry["name"]] = FIELDS[field]
        else:
            variables[entry["name"]] = SECRETS.get(entry["name"], "from-elsewhere")
    return variables


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes puts in only variables that stand further up; others stay as they are written."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: variables.get(match[1], match[0]), text)
