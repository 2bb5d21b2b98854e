"""Helm for tests: its own library, in a process with an environment of its own, against an API server of the tests."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import yaml

from tests.kube.helm_api import Cluster, HelmApi

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "quire"
ENVIRONMENT = Path(f"{sys.prefix}-helm")
"""Beside the tests' own environment; ``make test`` creates it."""
MISSING = f"there is no {ENVIRONMENT.name}: make test creates it where there is a Python 3.12 or later"

Manifest = dict[str, Any]
Values = Mapping[str, Any]


class HelmError(Exception):
    """Helm's own words for why it did not do something."""


@dataclass
class Release:
    """What Helm made of a chart and values."""

    name: str
    namespace: str
    values: Values
    manifests: list[Manifest]
    hooks: list[Manifest] = field(default_factory=list)
    notes: str = ""

    @property
    def everything(self) -> list[Manifest]:
        """The manifests, those of hooks included."""
        return [*self.manifests, *self.hooks]

    def of(self, *kinds: str) -> list[Manifest]:
        """The manifests of these kinds, in order, those of hooks included."""
        return [manifest for manifest in self.everything if manifest["kind"] in kinds]


class Helm:
    """Helm's library, and Kubernetes' schemas. One process does everything, one call after the other."""

    def __init__(self, api: HelmApi) -> None:
        self._api = api

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-helm-")
        home = self._folder.name
        self._process = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("helm_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=Path(home, "log").open("ab"),
            text=True,
            # A quarter of the library's time is the collection of garbage; memory is not what these tests lack.
            env={"PATH": "/usr/bin:/bin", "HOME": home, "KUBECACHEDIR": f"{home}/cache", "GOGC": "400"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._answers = self._process.stdin, self._process.stdout
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._folder.cleanup()

    def cluster(self, cluster: Cluster, release: str = "quire", namespace: str = "default") -> "Releases":
        """A release of that name on a cluster, which may not exist yet."""
        return Releases(self, self._api.add(cluster), release, namespace)

    def render(self, values: Values, version: str = "1.37", chart: Path = CHART, release: str = "quire") -> Release:
        """What installing the chart on a new cluster makes of ``values``."""
        return self.cluster(Cluster(version), release).install(values, chart)

    def validate(self, manifests: Sequence[Manifest], version: str) -> list[str | None]:
        """For each manifest why it is not valid for that version of Kubernetes, or None; "unknown" for a kind that
        Kubernetes itself does not have.
        """
        problems: list[str | None] = self.call("validate", manifests=list(manifests), version=version)
        return problems

    def package(self, chart: Path, folder: Path) -> Path:
        """The archive that Helm makes of a chart, in a folder."""
        kubeconfig = self._api.add(Cluster())
        path: str = self.call(
            "package", kubeconfig=kubeconfig, namespace="default", chart=str(chart), folder=str(folder)
        )
        return Path(path)

    def lint(self, chart: Path) -> tuple[int, str]:
        """How severe the worst is that ``helm lint`` says of a chart (3: an error), and what it logs of it."""
        log = Path(self._folder.name, "log")
        before = len(log.read_text())
        kubeconfig = self._api.add(Cluster())
        found = self.call("lint", kubeconfig=kubeconfig, namespace="default", chart=str(chart))
        return max(message["Severity"] for message in found["Messages"]), log.read_text()[before:]

    def call(self, operation: str, **arguments: Any) -> Any:
        """What the library returned; raises a ``HelmError`` where it failed."""
        self._calls.write(json.dumps({"operation": operation, **arguments}) + "\n")
        self._calls.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"Helm's process has ended: {Path(self._folder.name, 'log').read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise HelmError(answer["error"])
        return answer["result"]


class Tool(Protocol):
    """What does Helm's work: its library or its command."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """What came of an operation; raises a ``HelmError`` where it failed."""


@dataclass
class Releases:
    """One release on one cluster, and what one can do to it."""

    helm: Tool
    kubeconfig: str
    release: str
    namespace: str

    def install(self, values: Values, chart: Path = CHART) -> Release:
        """The first revision."""
        return self._run("install", values, chart)

    def upgrade(self, values: Values, chart: Path = CHART) -> Release:
        """The next revision."""
        return self._run("upgrade", values, chart)

    def uninstall(self) -> None:
        """Takes the release away."""
        self._call("uninstall")

    def test(self) -> None:
        """Runs what the chart has for ``helm test``; a test that fails is a ``HelmError``."""
        self._call("test")

    def _run(self, operation: str, values: Values, chart: Path) -> Release:
        result = self._call(operation, chart=str(chart), values=values)
        hooks = [manifest for hook in result.get("hooks") or [] for manifest in documents(hook["manifest"])]
        notes = result["info"].get("notes", "")
        return Release(self.release, self.namespace, values, documents(result["manifest"]), hooks, notes)

    def _call(self, operation: str, **arguments: Any) -> Any:
        return self.helm.call(
            operation, kubeconfig=self.kubeconfig, namespace=self.namespace, release=self.release, **arguments
        )


def documents(text: str) -> list[Manifest]:
    """The manifests of a YAML text."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]
