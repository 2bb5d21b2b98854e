"""The registry of go-containerregistry, built from ``registry/``, behind a relay that asks for credentials and cuts
connections.
"""

import base64
import hashlib
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.support.file_server import FileHandler, FileServer, serve_files

PROGRAM = Path(__file__).parent / "registry"
# As it was before any test gave programs a cache of their own: Go's has what takes a minute to compile.
ENVIRONMENT = dict(os.environ)
USER, PASSWORD, TOKEN = "somebody", "secret", "token-of-somebody"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"


class Registry(FileServer):
    """``host`` is for names. ``sent``, ``cut`` and ``pause`` go by digest. ``auth`` is what the registry asks for:
    None, ``basic`` or ``bearer``; ``tokens`` counts those that were given, of which the first ``expired`` are over:
    a request for a digest in ``expiring`` ends all. ``ranges`` says whether ranges are heeded.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.host = urlsplit(url).netloc
        self.behind = ""
        self.auth: str | None = None
        self.tokens = self.expired = 0
        self.expiring: set[str] = set()
        self.ranges = True
        self.changed: dict[str, bytes] = {}

    def blob(self, content: bytes, repository: str = "team/small") -> str:
        """Pushes a blob; its digest."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        begun = httpx.post(f"http://{self.behind}/v2/{repository}/blobs/uploads/", timeout=60)
        place = begun.headers["Location"]
        done = httpx.put(f"http://{self.behind}{urlsplit(place).path}", params={"digest": digest}, content=content)
        assert done.status_code == 201, done.text
        return digest

    def push(self, files: Mapping[str, bytes], tag: str = "1", *, key: str = TITLE, kind: str = "text/plain") -> str:
        """Pushes an artifact with a layer for each file, which ``key`` names; its digest."""
        layers = [
            {"mediaType": kind, "digest": self.blob(each), "size": len(each), "annotations": {key: name}}
            for name, each in files.items()
        ]
        return self.push_manifest({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers}, tag)

    def push_manifest(self, manifest: dict[str, object], tag: str, repository: str = "team/small") -> str:
        config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": self.blob(b"{}"), "size": 2}
        body = json.dumps({"config": config, **manifest}).encode()
        headers = {"Content-Type": str(manifest.get("mediaType", MANIFEST))}
        done = httpx.put(f"http://{self.behind}/v2/{repository}/manifests/{tag}", content=body, headers=headers)
        assert done.status_code == 201, done.text
        return f"sha256:{hashlib.sha256(body).hexdigest()}"


def build_registry(folder: Path) -> Path | str:
    """The program, or why it cannot be had."""
    if shutil.which("go") is None:
        return "there is no Go here"
    path, command = folder / "registry", ["go", "build", "-o", folder / "registry", "."]
    done = subprocess.run(
        command, cwd=PROGRAM, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    return path if done.returncode == 0 else f"the registry cannot be built here: {done.stderr[-300:]}"


@contextmanager
def registry_server(program: Path) -> Iterator[Registry]:
    with (
        subprocess.Popen([program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process,
        serve_files(Registry, _Relay) as registry,
    ):
        assert process.stdout is not None
        registry.behind = process.stdout.readline().strip()
        try:
            yield registry
        finally:
            process.kill()


class _Relay(FileHandler):
    @property
    def registry(self) -> Registry:
        assert isinstance(self.files, Registry)
        return self.files

    def answer(self, *, head: bool) -> None:
        path = urlsplit(self.path).path
        if path.rpartition("/")[2] in self.registry.expiring:
            self.registry.expiring.remove(path.rpartition("/")[2])
            self.registry.expired = self.registry.tokens
        given = self.headers.get("Authorization", "")
        basic = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
        valid = [f"Bearer {TOKEN}-{number}" for number in range(self.registry.expired + 1, self.registry.tokens + 1)]
        wanted = {None: [given], "basic": [basic], "bearer": valid}[self.registry.auth]
        if self.registry.status is not None:
            self._reply(self.registry.status, {})
        elif path == "/token":
            self.registry.tokens += given == basic
            token = {"token": f"{TOKEN}-{self.registry.tokens}"}
            self._reply(200 if given == basic else 401, {}, json.dumps(token).encode())
        elif given not in wanted:
            realm = f'realm="{self.registry.url}/token",service="registry",scope="repository:team/small:pull"'
            challenge = f"Bearer {realm}" if self.registry.auth == "bearer" else 'Basic realm="registry"'
            self._reply(401, {"WWW-Authenticate": challenge})
        else:
            self._relay(path.rpartition("/")[2])

    def _relay(self, name: str) -> None:
        connection = http.client.HTTPConnection(self.registry.behind, timeout=30)
        taken = ("Accept", "Range") if self.registry.ranges else ("Accept",)
        headers = {key: self.headers[key] for key in taken if key in self.headers}
        connection.request(self.command, self.path, headers=headers)
        answer = connection.getresponse()
        content = self.registry.changed.get(name) or answer.read()
        connection.close()
        kept = ("Content-Type", "Content-Range", "Docker-Content-Digest")
        self._reply(answer.status, {key: answer.headers[key] for key in kept if key in answer.headers}, content, name)

    def _reply(self, status: int, headers: Mapping[str, str], content: bytes = b"", name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self._send(content, 0, name)
