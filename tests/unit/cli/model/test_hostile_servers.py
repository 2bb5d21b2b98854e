"""Servers that mean harm: nothing is written outside of a model's copy, no file is larger than it was listed, and what
is read into memory is bounded.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_cli.model.copies import RemoteFile
from quire_engine.checkpoint.weight_files import INDEX_FILE

from tests.support.file_server import FileHandler, FileServer, serve_files
from tests.support.s3_server import s3_server
from tests.unit.cli.model.conftest import User, model_files

TITLE = "org.opencontainers.image.title"
SHARD = "model-00001-of-00001.safetensors"
NAMES = [
    "../../../../../../../../{outside}/evil.safetensors",
    "{outside}/evil.safetensors",
    "a/../../../evil.safetensors",
    "./../evil.safetensors",
    "evil\n.safetensors",
    "evil\x1b[2J.safetensors",
    "x" * 5000,
]


class HostileRegistry(FileServer):
    """A registry of containers: ``layers`` by title, of which one may be listed with another size than it has."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.blobs: dict[str, bytes | int] = {}
        self.manifest: bytes | int | None = b""
        self.tags = b"{}"

    @property
    def name(self) -> str:
        return f"oci://{urlsplit(self.url).netloc}/team/small:1"

    def push(self, files: dict[str, bytes], **sizes: int) -> None:
        layers = []
        for name, content in files.items():
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.blobs[digest] = content
            notes = {"annotations": {TITLE: name}}
            layers.append({"mediaType": "text/plain", "digest": digest, "size": sizes.get(name, len(content)), **notes})
        self.manifest = json.dumps({"schemaVersion": 2, "layers": layers}).encode()


class _Hostile(FileHandler):
    @property
    def registry(self) -> HostileRegistry:
        assert isinstance(self.files, HostileRegistry)
        return self.files

    def answer(self, *, head: bool) -> None:
        path = urlsplit(self.path).path
        content: bytes | int | None = b"{}"
        if "/manifests/" in path:
            content = self.registry.manifest
        elif path.endswith("/tags/list"):
            content = self.registry.tags
        elif "/blobs/" in path:
            content = self.registry.blobs[path.rpartition("/")[2]]
        status, content = (404, b"") if content is None else (200, content)
        size = content if isinstance(content, int) else len(content)
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        try:
            if isinstance(content, bytes):
                self.wfile.write(content)
                return
            for _ in range(0, content, 1 << 20):
                self.wfile.write(b"[" * (1 << 20))
                self.files.sent["endless"] += 1 << 20
        except OSError:
            self.close_connection = True


@contextmanager
def hostile_registry() -> Iterator[HostileRegistry]:
    with serve_files(HostileRegistry, _Hostile) as registry:
        yield registry


def with_shard(name: str) -> dict[str, bytes]:
    """A model whose one shard has this name in its index and where it is kept."""
    files = model_files()
    weights = files.pop("model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": {"w": name}}).encode()
    return {**files, INDEX_FILE: index, name: weights}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_title_of_a_layer_leads_out_of_the_copy(user: User, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    name = name.format(outside=str(outside).lstrip("/") if name.startswith("..") else outside)
    with hostile_registry() as registry:
        registry.push(with_shard(name))
        told = user.refused(registry.name)
    assert f"its {INDEX_FILE} names files that it has not" in told
    assert [*outside.iterdir(), *tmp_path.rglob("*evil*"), *tmp_path.rglob("x" * 200 + "*")] == []


@pytest.mark.parametrize("name", ["/config.json", "../config.json", "//config.json", "1_Pooling/../../config.json"])
def test_a_module_of_another_folder_is_not_read(user: User, name: str) -> None:
    with hostile_registry() as registry:
        registry.push({**model_files(), "modules.json": b"[]", name: b'{"evil": 1}'})
        folder, _, _ = user.find(registry.name)
    assert not Path("/config.json").exists()
    assert all(each.resolve().is_relative_to(user.home.resolve()) for each in folder.rglob("*"))


@pytest.mark.parametrize("listed", [100, 0])
def test_a_layer_stops_at_the_size_of_the_manifest(user: User, listed: int) -> None:
    with hostile_registry() as registry:
        registry.push(model_files(), **{"config.json": listed or 1})
        digest = f"sha256:{hashlib.sha256(model_files()['config.json']).hexdigest()}"
        registry.blobs[digest] = 300 << 20
        assert "config.json" in user.refused(registry.name)
        assert registry.sent["endless"] < 32 << 20
    assert sum(each.stat().st_size for each in user.home.rglob("*") if each.is_file()) < 1 << 20


def test_a_manifest_that_does_not_end_is_not_read(user: User) -> None:
    with hostile_registry() as registry:
        registry.manifest = 400 << 20
        told = user.refused(registry.name)
        assert "more than 4 MiB" in told
        assert registry.sent["endless"] < 32 << 20


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("manifest", "tags"),
    [(NESTED, b"{}"), (b'{"layers": [{"mediaType": "", "digest": "", "size": 1e999}]}', b"{}"), (None, NESTED)]
    + [(None, b'{"tags": %s}' % tags) for tags in (b"[1]", b'["a", 2]', b'{"a": 1}', b'["\\u001b[2J\\u009b"]')],
    ids=range(7),
)
def test_what_is_no_manifest_and_no_list_of_tags_is_refused_in_a_sentence(
    user: User, manifest: bytes | None, tags: bytes
) -> None:
    with hostile_registry() as registry:
        registry.manifest, registry.tags = manifest, tags
        assert user.refused(registry.name).isprintable()


@pytest.mark.parametrize("index", [NESTED, b"[]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": []}}'])
def test_what_is_no_index_is_refused_in_a_sentence(user: User, index: bytes) -> None:
    with hostile_registry() as registry:
        registry.push({**with_shard(SHARD), INDEX_FILE: index})
        assert f"its {INDEX_FILE} names files that it has not" in user.refused(registry.name)


def test_what_an_earlier_release_downloaded_beyond_a_file_is_downloaded_again(user: User) -> None:
    with hostile_registry() as registry:
        registry.push(model_files())
        folder, _, _ = user.find(registry.name)
        blob = (folder / "model.safetensors").resolve()
        whole = blob.read_bytes()
        blob.rename(f"{blob}.incomplete").write_bytes(whole + b"more")
        user.find(registry.name)
    assert blob.read_bytes() == whole


def test_a_config_that_no_model_has_is_not_downloaded(user: User) -> None:
    with hostile_registry() as registry:
        registry.push(model_files(), **{"config.json": 1 << 40})
        assert "config.json" in user.refused(registry.name)
        assert "are read" in user.refused(registry.name)


@pytest.mark.parametrize("name", ["evil ü.safetensors", "evil|.safetensors"], ids=range(2))
def test_a_key_of_a_bucket_has_the_name_of_a_file_or_is_not_read(user: User, name: str) -> None:
    with s3_server() as server:
        server.public.add("models")
        server.add("models", "small", with_shard(name))
        user.variables |= {"AWS_ENDPOINT_URL": server.url, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "x"}
        assert f"its {INDEX_FILE} names files that it has not" in user.refused("s3://models/small")


def test_a_key_that_is_no_path_is_refused(user: User) -> None:
    with s3_server() as server:
        server.public.add("models")
        server.add("models", "small", with_shard("evil\x1b.safetensors"))
        user.variables |= {"AWS_ENDPOINT_URL": server.url, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "x"}
        assert "has a file whose name cannot be read" in user.refused("s3://models/small")


def test_a_bucket_with_more_files_than_a_model_is_not_read(user: User) -> None:
    with s3_server() as server:
        server.public.add("models")
        server.page = 5000
        server.add("models", "small", {f"file-{number}": b"" for number in range(10_001)})
        user.variables |= {"AWS_ENDPOINT_URL": server.url, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "x"}
        assert "more than 10000 files" in user.refused("s3://models/small")


@pytest.mark.parametrize("name", ["../../evil.safetensors", "evil\x1b.safetensors", "*"])
def test_a_file_of_the_hub_has_the_name_of_a_file_or_is_not_read(user: User, name: str) -> None:
    user.hub.add("org/small", with_shard(name))
    assert f"its {INDEX_FILE} names files that it has not" in user.refused("org/small")
    assert not [*user.home.rglob("evil*")]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_of_the_hub_stops_at_the_size_that_was_listed(
    user: User, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.hub.add("org/small", model_files())
    real, long = model_files()[file], model_files()[file].ljust(64 << 20, b" ")
    answers: Callable[..., Any] = FileHandler.send_file

    def send_more(self: Any, content: bytes, *rest: Any) -> None:
        answers(self, long if content == real and self.command == "GET" else content, *rest)

    monkeypatch.setattr(FileHandler, "send_file", send_more)
    assert "could not be downloaded" in user.refused("org/small")
    assert sum(each.stat().st_size for each in user.home.rglob("*") if each.is_file()) < 32 << 20


@given(st.text(alphabet="./ab-\n\x00é", min_size=1, max_size=12))
def test_a_name_that_is_taken_leads_below_its_folder(name: str) -> None:
    folder = Path("/a/b")
    try:
        file = RemoteFile(name, 1, "0" * 64, "")
    except ValueError:
        return
    parts = Path(file.name).parts
    assert Path(*folder.parts, *parts).is_relative_to(folder)
    assert ".." not in parts
    assert name.isascii()
    assert name.isprintable()


def test_a_listing_of_the_last_time_is_checked_as_a_server_is(user: User) -> None:
    with hostile_registry() as registry:
        registry.push(model_files())
        user.find(registry.name)
        name = registry.name
    (listing,) = user.home.glob("assets/quire/oci/*/listing.json")
    files = json.loads(listing.read_bytes())
    files[0]["name"] = "../../../evil.json"
    listing.write_text(json.dumps(files))
    assert "cannot be reached" in user.refused(name)
