"""The helm command, as a person uses it, for the same tests as its library."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kube.helm import ENVIRONMENT, HelmError, Values

SECONDS = 120


def found() -> Path | None:
    """The helm on the ``PATH``."""
    path = shutil.which("helm")
    return Path(path) if path else None


def stand_in(folder: Path) -> Path:
    """A helm that takes the command line and leaves the work to Helm's library."""
    program = folder / "helm"
    script = Path(__file__).with_name("helm_stand_in.py")
    program.write_text(f'#!/bin/sh\nexec "{ENVIRONMENT}/bin/python" "{script}" "$@"\n')
    program.chmod(0o755)
    return program


@dataclass
class HelmBinary:
    """Runs ``program``, each time anew, with caches and settings of its own. Close it."""

    program: Path
    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="quire-helm-")
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def call(self, operation: str, **arguments: Any) -> Any:
        """What the command has printed, where that is a release; raises a ``HelmError`` with its complaint."""
        call = arguments
        shared = ["--namespace", call["namespace"], "--kubeconfig", self._file("kubeconfig", call["kubeconfig"])]
        match operation:
            case "install" | "upgrade":
                chosen = ["--values", self._values(call["values"]), "--output", "json", "--timeout", "30s"]
                return json.loads(self._run(operation, call["release"], call["chart"], *chosen, *shared))
            case "uninstall":
                return self._run(operation, call["release"], "--timeout", "30s", *shared)
            case "test":
                return self._run(operation, call["release"], "--timeout", "60s", *shared)
        raise ValueError(operation)

    def template(self, release: str, chart: Path, values: Values, version: str, groups: Sequence[str]) -> str:
        """The manifests, those of hooks included, without a cluster: one of that version with these custom kinds."""
        known = [word for group in groups for word in ("--api-versions", group)]
        chosen = ["--values", self._values(values), "--kube-version", version, *known]
        return self._run("template", release, str(chart), *chosen)

    def _values(self, values: Values) -> str:
        return self._file("values.yaml", json.dumps(values))

    def _file(self, name: str, text: str) -> str:
        path = Path(self._folder.name, name)
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [self.program, *words],
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode:
            raise HelmError(done.stderr.strip())
        return done.stdout

    def _environment(self) -> Mapping[str, str]:
        homes = {f"HELM_{name}_HOME": f"{self._folder.name}/{name.lower()}" for name in ("CACHE", "CONFIG", "DATA")}
        return {**os.environ, **homes}
