"""Models in a registry of containers: which artifacts are read, whose credentials count, and what a cut leaves."""

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire_proto.extras import install_command

from tests.support.registry_server import MANIFEST, PASSWORD, USER, Registry, registry_server
from tests.unit.cli.model.conftest import User, model_files

BIG = 24 << 20
WEIGHTS = "model.safetensors"
COPIES = "assets/quire/oci/*"
FILEPATH = "org.cncf.model.filepath"
RAW, TAR = "application/vnd.cncf.model.weight.v1.raw", "application/vnd.cncf.model.weight.v1.tar"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass
class OciUser(User):
    registry: Registry | None = None

    @property
    def server(self) -> Registry:
        assert self.registry is not None
        return self.registry

    @property
    def name(self) -> str:
        return f"oci://{self.server.host}/team/small:1"

    def logs_in(self, password: str = PASSWORD) -> None:
        """What docker login leaves."""
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        folder = self.home.parent / "docker"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"auths": {self.server.host: {"auth": auth}}}))
        self.variables["DOCKER_CONFIG"] = str(folder)


@pytest.fixture
def oci(user: User, registry_program: Path) -> Iterator[OciUser]:
    with registry_server(registry_program) as registry:
        yield OciUser(user.hub, user.home, user.finders, {"HOME": str(user.home)}, registry)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("org.opencontainers.image.title", "application/vnd.oci.image.layer.v1.tar"),  # as oras pushes a file
        (FILEPATH, RAW),
        ("org.cnai.model.filepath", "application/vnd.cnai.model.weight.v1.raw"),
    ],
)
def test_an_artifact_is_downloaded_once_without_what_is_not_read(oci: OciUser, key: str, kind: str) -> None:
    digest = oci.server.push(model_files(), key=key, kind=kind)
    folder, name, _ = oci.find(oci.name)
    assert name == "small"
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        WEIGHTS,
    }
    assert (folder / WEIGHTS).read_bytes() == model_files()[WEIGHTS]
    if kind != RAW:
        return
    oci.server.requests.clear()
    assert oci.find(oci.name)[0] == folder
    assert not [path for _, path, _ in oci.server.requests if "/blobs/" in path]
    assert oci.find(f"oci://{oci.server.host}/team/small@{digest}")[0].name == folder.name


def test_a_tag_that_moved_is_followed_and_what_is_the_same_kept(oci: OciUser) -> None:
    oci.server.push(model_files(b"first"))
    old, _, _ = oci.find(oci.name)
    oci.server.push(model_files(b"second"))
    oci.server.requests.clear()
    new, _, _ = oci.find(oci.name)
    assert ((old / WEIGHTS).read_bytes(), (new / WEIGHTS).read_bytes()) == (b"first", b"second")
    assert len([path for _, path, _ in oci.server.requests if "/blobs/" in path]) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_goes_on_where_it_was(oci: OciUser, ranges: bool) -> None:
    weights = os.urandom(BIG)
    oci.server.push(model_files(weights))
    oci.server.ranges = ranges
    oci.server.cut[oci.server.blob(weights)] = BIG // 2
    folder, _, _ = oci.find(oci.name)
    assert (folder / WEIGHTS).read_bytes() == weights
    gets = [wanted for _, path, wanted in oci.server.requests if path.endswith(oci.server.blob(weights))]
    assert len(gets) == 2
    assert gets[1] is not None


def test_a_killed_download_is_never_served_and_goes_on(oci: OciUser) -> None:
    weights = os.urandom(BIG)
    oci.server.push(model_files(weights))
    digest = oci.server.blob(weights)
    oci.server.pause[digest] = BIG // 2
    with oci.start(oci.name) as process:
        assert oci.server.paused.wait(60)
        while not (left := sum(file.stat().st_size for file in oci.home.glob(f"{COPIES}/blobs/*.incomplete"))):
            assert process.poll() is None
        process.kill()
    assert not [*oci.home.glob(f"{COPIES}/snapshots/*/{WEIGHTS}")]
    oci.server.resume.set()
    oci.server.pause.clear()
    oci.server.requests.clear()
    assert (oci.find(oci.name)[0] / WEIGHTS).read_bytes() == weights
    (wanted,) = [wanted for _, path, wanted in oci.server.requests if path.endswith(digest)]
    assert wanted is not None
    assert int(wanted.removeprefix("bytes=").partition("-")[0]) >= left


def test_what_has_not_its_digest_is_never_served(oci: OciUser) -> None:
    oci.server.push(model_files())
    digest = oci.server.blob(model_files()[WEIGHTS])
    oci.server.changed[digest] = b"x" * len(model_files()[WEIGHTS])
    assert f"{WEIGHTS} of {oci.name} has not its digest, and was removed: start again." in oci.refused(oci.name)
    assert not [*oci.home.glob(f"{COPIES}/snapshots/*/{WEIGHTS}")]
    oci.server.changed.clear()
    assert (oci.find(oci.name)[0] / WEIGHTS).read_bytes() == model_files()[WEIGHTS]


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_credentials_are_those_of_docker(oci: OciUser, auth: str) -> None:
    oci.server.push(model_files())
    oci.server.auth = auth
    advice = (
        f"{oci.server.host} allows no access to {oci.name}: docker login {oci.server.host} with an account that may"
    )
    assert oci.refused(oci.name).startswith(advice)
    oci.logs_in("wrong")
    assert oci.refused(oci.name).startswith(advice)
    oci.logs_in()
    assert oci.find(oci.name)[1] == "small"


def test_a_token_that_expires_in_mid_download_is_renewed(oci: OciUser) -> None:
    oci.server.push(model_files())
    oci.server.auth = "bearer"
    oci.server.expiring = {oci.server.blob(model_files()[WEIGHTS])}
    oci.logs_in()
    assert (oci.find(oci.name)[0] / WEIGHTS).read_bytes() == model_files()[WEIGHTS]
    assert not oci.server.expiring


def test_without_a_network_the_copy_of_the_last_time_is_taken(oci: OciUser) -> None:
    oci.server.push(model_files())
    folder, _, _ = oci.find(oci.name)
    oci.server.status = 503
    assert oci.find(oci.name)[0] == folder
    other = f"oci://{oci.server.host}/team/other:1"
    assert f"cannot serve {other} (status 503): start again later" in oci.refused(other)
    assert oci.refused("oci://127.0.0.1:9/x").startswith("127.0.0.1:9 cannot be reached (")


def test_names_that_lead_nowhere(oci: OciUser) -> None:
    oci.server.push(model_files(), "v1")
    oci.server.push(model_files(), "v2")
    assert oci.refused(oci.name) == f"There is no {oci.name}: take v1, v2."
    other = f"oci://{oci.server.host}/team/other"
    assert oci.refused(other) == f"There is no {other}:latest: check the name."


def test_what_cannot_be_served_is_refused_before_its_weights(oci: OciUser) -> None:
    oci.server.push(model_files(architectures=["BertForMaskedLM"], model_type="bert"))
    assert f"{oci.name}/config.json names BertForMaskedLM, which makes no text" in oci.refused(oci.name)
    weights = oci.server.blob(model_files()[WEIGHTS])
    assert not [path for _, path, _ in oci.server.requests if path.endswith(weights)]


def layer(oci: OciUser, kind: str, **notes: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": oci.server.blob(b"archive"), "size": 7, "annotations": notes}


@pytest.mark.parametrize(
    ("kind", "notes", "part"),
    [
        (IMAGE_LAYER, {}, "is an image of containers: read are artifacts of ORAS, one file a layer, and of ModelPack"),
        (TAR, {FILEPATH: "model.safetensors"}, "is a ModelPack artifact with packed layers: read are"),
        ("application/vnd.kitops.modelkit.model.v1.tar", {}, "is a ModelKit of KitOps: read are"),
        ("application/vnd.docker.ai.gguf.v3", {}, "is a model in GGUF for another server: read are"),
        (IMAGE_LAYER, {"org.opencontainers.image.title": "x", "io.deis.oras.content.unpack": "true"}, "is an image of"),
    ],
)
def test_other_artifacts_are_refused(oci: OciUser, kind: str, notes: dict[str, str], part: str) -> None:
    oci.server.push_manifest({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer(oci, kind, **notes)]}, "1")
    assert part in oci.refused(oci.name)


def test_an_index_is_refused(oci: OciUser) -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    oci.server.push_manifest({"schemaVersion": 2, "mediaType": kind, "manifests": []}, "1")
    assert f"{oci.name} is an index of several images, not a model: read are artifacts" in oci.refused(oci.name)


def test_a_file_cannot_leave_its_folder(oci: OciUser) -> None:
    oci.server.push({**model_files(), "../../evil.json": b"{}", "/tmp/evil.json": b"{}"})
    folder, _, _ = oci.find(oci.name)
    assert not [*oci.home.rglob("evil*")]
    assert "config.json" in {file.name for file in folder.iterdir()}


def test_the_library_is_asked_for_where_it_is_missing(user: User, tmp_path: Path) -> None:
    (tmp_path / "oras.py").write_text("raise ImportError")
    user.variables["PYTHONPATH"] = str(tmp_path)
    with user.start("oci://host/x:1") as process:
        _, error = process.communicate(timeout=60)
    assert error == f"refused: oci://host/x:1 needs oras: {install_command('quire-llm', 'oci')}.\n"
