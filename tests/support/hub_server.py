"""A server that speaks the Hugging Face Hub's HTTP API, as far as ``huggingface_hub`` needs it for downloads.

Repositories are dictionaries of files; a commit is the hash of one. Large files redirect to ``/cdn``, as the Hub does
with files of LFS. What was asked for and how many bytes of each file were sent is counted.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.file_server import FileHandler, FileServer, serve_files

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
GRANTED = "hf_granted"


@dataclass
class Repository:
    """Files of each revision. ``gated``: files need the token ``GRANTED``, listings do not, as at the Hub."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit."""
        commits = {name: _commit(files) for name, files in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for files in self.revisions.values() if _commit(files) == commit)


class HubServer(FileServer):
    """``url`` is for ``HF_ENDPOINT``."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.cdn = url.replace("127.0.0.1", "localhost")
        self.repositories: dict[str, Repository] = {}

    def add(self, name: str, files: dict[str, bytes], **other: Any) -> Repository:
        self.repositories[name] = Repository({"main": files}, **other)
        return self.repositories[name]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with serve_files(HubServer, _Handler) as hub:
        yield hub


def _commit(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(FileHandler):
    @property
    def hub(self) -> HubServer:
        assert isinstance(self.files, HubServer)
        return self.files

    def answer(self, *, head: bool) -> None:
        path = urlsplit(self.path).path
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if self.hub.status is not None:
            self._error(self.hub.status, "Busy", "try later")
        elif parts == ["api", "models"]:
            wanted = parse_qs(urlsplit(self.path).query)["search"][0]
            self._json([{"id": name} for name in self.hub.repositories if wanted.lower() in name.lower()])
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "cdn":
            self.send_file(self._repository("/".join(parts[1:3])).files(parts[3])["/".join(parts[4:])], parts[-1], head)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), head)
        else:
            self._error(404, "EntryNotFound", "no such route")

    def _repository(self, name: str) -> Repository:
        return self.hub.repositories[name]

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {GRANTED}"

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._has_token()):
            self._error(401 if "Authorization" not in self.headers else 404, "RepoNotFound", "Repository not found")
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def _api(self, name: str, rest: list[str]) -> None:
        kind, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        files = repository.files(commit)
        if kind == "refs":
            branches = [
                {"name": each, "ref": f"refs/heads/{each}", "targetCommit": repository.commit(each)}
                for each in repository.revisions
            ]
            self._json({"branches": branches, "converts": [], "tags": []})
        elif kind == "tree":
            self._json([{"type": "file", "path": path, "oid": _blob(each), "size": len(each), **_lfs(path, each)}
                        for path, each in files.items()])  # fmt: skip
        else:
            siblings = [
                {"rfilename": path, "size": len(each), "blobId": _blob(each), **_lfs(path, each)}
                for path, each in files.items()
            ]
            self._json(
                {
                    "id": name,
                    "sha": commit,
                    "siblings": siblings,
                    "gated": "manual" if repository.gated else False,
                    "cardData": repository.card or None,
                    **repository.facts,
                }
            )

    def _resolve(self, name: str, revision: str, path: str, head: bool) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        if repository.gated and not self._has_token():
            self._error(403 if "Authorization" in self.headers else 401, "GatedRepo", "Access is restricted")
            return
        content = repository.files(commit).get(path)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found")
        elif path.endswith(LFS_SUFFIXES):
            self.send_response(302)
            self.send_header("Location", f"{self.hub.cdn}/cdn/{name}/{commit}/{path}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_file(content, path, head, {"X-Repo-Commit": commit, "ETag": f'"{_blob(content)}"'})

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _lfs(path: str, content: bytes) -> dict[str, Any]:
    if not path.endswith(LFS_SUFFIXES):
        return {}
    digest = hashlib.sha256(content).hexdigest()
    return {"lfs": {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}}
