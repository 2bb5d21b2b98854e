"""Models in object storage: what is downloaded, what is refused before, and what a cut or killed download leaves."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire_proto.extras import install_command

from tests.support.s3_server import ACCESS_KEY, S3Server, s3_server
from tests.unit.cli.model.conftest import User, model_files

BIG = 24 << 20
NAME = "s3://models/team/small"
WEIGHTS = "model.safetensors"
COPIES = "assets/quire/s3/*"


@dataclass
class S3User(User):
    s3: S3Server | None = None

    @property
    def server(self) -> S3Server:
        assert self.s3 is not None
        return self.s3

    def weights_gets(self) -> list[str | None]:
        """The range of each request for the weights."""
        return [
            wanted for method, path, wanted in self.server.requests if method == "GET" and path.endswith(f"/{WEIGHTS}")
        ]


@pytest.fixture
def s3(user: User) -> Iterator[S3User]:
    with s3_server() as server:
        variables = {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_METADATA_ENDPOINT": f"{server.url}/nobody",  # never that of the machine which runs the tests
        }
        yield S3User(user.hub, user.home, user.finders, variables, server)


def test_a_prefix_is_downloaded_once_without_what_is_not_read(s3: S3User) -> None:
    s3.server.add("models", "team/small", model_files())
    s3.server.page = 2
    folder, name, _ = s3.find(NAME)
    assert name == "small"
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        WEIGHTS,
    }
    assert (folder / WEIGHTS).read_bytes() == model_files()[WEIGHTS]
    s3.server.sent.clear()
    assert s3.find(f"{NAME}/")[0] == folder
    assert not s3.server.sent


def test_a_bucket_may_be_the_model(s3: S3User) -> None:
    s3.server.buckets["whole"] = model_files()
    assert s3.find("s3://whole")[1] == "whole"


def test_what_was_uploaded_anew_is_downloaded_and_the_rest_kept(s3: S3User) -> None:
    objects = s3.server.add("models", "team/small", model_files(b"first"))
    old, _, before = s3.find(NAME)
    objects["team/small/model.safetensors"] = b"second"
    s3.server.sent.clear()
    new, _, after = s3.find(NAME)
    assert ((old / WEIGHTS).read_bytes(), (new / WEIGHTS).read_bytes()) == (b"first", b"second")
    assert before != after
    assert dict(s3.server.sent) == {WEIGHTS: len(b"second")}


def test_what_changes_in_mid_download_is_refused(s3: S3User) -> None:
    objects = s3.server.add("models", "team/small", model_files(os.urandom(BIG)))
    s3.server.cut[WEIGHTS] = s3.server.pause[WEIGHTS] = BIG // 2
    with s3.start(NAME) as process:
        assert s3.server.paused.wait(60)
        objects["team/small/model.safetensors"] = os.urandom(BIG)
        s3.server.resume.set()
        _, error = process.communicate(timeout=60)
    assert f"refused: {NAME} has changed during the download: start again." in error
    assert not [*s3.home.glob(f"{COPIES}/snapshots/*/{WEIGHTS}")]
    s3.server.pause.clear()
    assert (s3.find(NAME)[0] / WEIGHTS).read_bytes() == objects["team/small/model.safetensors"]
    assert not [*s3.home.glob(f"{COPIES}/blobs/*.incomplete")]


def test_a_cut_connection_goes_on_where_it_was(s3: S3User) -> None:
    weights = os.urandom(BIG)
    s3.server.add("models", "team/small", model_files(weights))
    s3.server.cut[WEIGHTS] = BIG // 2
    folder, _, _ = s3.find(NAME)
    assert (folder / WEIGHTS).read_bytes() == weights
    first, second = s3.weights_gets()
    assert first in (None, "bytes=0-")
    assert second is not None
    assert not second.startswith("bytes=0-")


def test_a_killed_download_is_never_served_and_goes_on(s3: S3User) -> None:
    weights = os.urandom(BIG)
    s3.server.add("models", "team/small", model_files(weights))
    s3.server.pause[WEIGHTS] = BIG // 2
    with s3.start(NAME) as process:
        assert s3.server.paused.wait(60)
        while not (left := sum(file.stat().st_size for file in s3.home.glob(f"{COPIES}/blobs/*.incomplete"))):
            assert process.poll() is None
        process.kill()
    assert not [*s3.home.glob(f"{COPIES}/snapshots/*/{WEIGHTS}")]
    s3.server.resume.set()
    s3.server.pause.clear()
    s3.server.requests.clear()
    assert (s3.find(NAME)[0] / WEIGHTS).read_bytes() == weights
    (wanted,) = s3.weights_gets()
    assert wanted is not None
    assert int(wanted.removeprefix("bytes=").removesuffix("-")) >= left  # what was counted before the kill
    assert not [*s3.home.glob(f"{COPIES}/blobs/*.incomplete")]


def test_without_a_network_the_copy_of_the_last_time_is_taken(s3: S3User) -> None:
    s3.server.add("models", "team/small", model_files())
    folder, _, _ = s3.find(NAME)
    s3.server.fail = "SlowDown"
    assert s3.find(NAME)[0] == folder
    assert s3.refused("s3://models/other").startswith(f"{s3.server.url} cannot be reached (status 503): check the net")


def test_a_broken_copy_is_an_error_in_one_sentence(s3: S3User) -> None:
    s3.server.add("models", "team/small", model_files())
    folder, _, _ = s3.find(NAME)
    with (folder / WEIGHTS).resolve().open("r+b") as file:
        file.truncate(1000)
    where = f"remove {folder.parent.parent} and start again."
    assert s3.refused(NAME) == f"The copy of {NAME} in the cache is broken ({WEIGHTS}): {where}"


def test_what_cannot_be_served_is_refused_before_its_weights(s3: S3User) -> None:
    bert = model_files(architectures=["BertForMaskedLM"], model_type="bert")
    s3.server.add("models", "team/small", bert)
    assert f"{NAME}/config.json names BertForMaskedLM, which makes no text" in s3.refused(NAME)
    pickles = {name: each for name, each in model_files().items() if not name.endswith(".safetensors")}
    s3.server.add("models", "pickles", pickles)
    assert "has no safetensors (but pytorch_model.bin, a pickle" in s3.refused("s3://models/pickles")
    assert {name for name, count in s3.server.sent.items() if count} == {"config.json"}


def test_too_large_for_the_disk_is_refused_before_the_download(s3: S3User, small_disk: Path) -> None:
    s3.server.add("models", "team/small", model_files(bytes(64 << 20)))
    s3.home = small_disk / "home"
    sentence = s3.refused(NAME)
    assert sentence.startswith(f"{NAME} takes 64.0 MiB of disk, and ")
    assert not s3.weights_gets()


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("AccessDenied", f"allows your credentials no access to {NAME}: set AWS_ACCESS_KEY_ID and"),
        ("InvalidAccessKeyId", "does not know your access key: set AWS_ACCESS_KEY_ID and"),
        ("SignatureDoesNotMatch", "does not belong to your access key: set AWS_SECRET_ACCESS_KEY to the right one."),
        ("ExpiredToken", "Your AWS credentials have expired: log in again, and set AWS_SESSION_TOKEN"),
        ("PermanentRedirect", "The bucket models is in another region: set AWS_REGION to it."),
        ("AuthorizationHeaderMalformed", "The bucket models is in another region: set AWS_REGION to it."),
        ("SlowDown", "cannot be reached (status 503): check the network and AWS_ENDPOINT_URL"),
    ],
)
def test_errors_of_the_server_say_what_to_do(s3: S3User, code: str, part: str) -> None:
    s3.server.fail = code
    assert part in s3.refused(NAME)


def test_names_that_lead_nowhere(s3: S3User) -> None:
    s3.server.add("models", "team/small", model_files())
    url = s3.server.url
    assert s3.refused("s3://modls/x") == f"There is no bucket modls at {url}: check its name and AWS_ENDPOINT_URL."
    assert s3.refused("s3://models/x").startswith("There is nothing at s3://models/x: check bucket and prefix")
    assert (
        s3.refused("s3://models") == "s3://models has only folders (team): name one of them, such as s3://models/team."
    )
    assert "name one of them, such as s3://models/team/small." in s3.refused("s3://models/team")


def test_credentials(s3: S3User) -> None:
    s3.server.add("models", "team/small", model_files())
    s3.variables["AWS_ACCESS_KEY_ID"] = "AKIAOTHER"
    assert "does not know your access key" in s3.refused(NAME)
    del s3.variables["AWS_ACCESS_KEY_ID"], s3.variables["AWS_SECRET_ACCESS_KEY"]
    assert s3.refused(NAME).startswith(f"No AWS credentials were found for {NAME}: set AWS_ACCESS_KEY_ID and ")
    s3.variables["AWS_SKIP_SIGNATURE"] = "true"
    assert "allows your credentials no access" in s3.refused(NAME)
    s3.server.public.add("models")
    assert s3.find(NAME)[1] == "small"


@pytest.mark.parametrize("url", ["minio:9000", "http://", "not a url", "http://minio:port"])
def test_an_endpoint_that_is_none_is_told(s3: S3User, url: str) -> None:
    s3.variables["AWS_ENDPOINT_URL"] = url
    assert s3.refused(NAME).startswith(f"AWS_ENDPOINT_URL is {url!r}, which is not an address: write one such as ")


def test_the_library_is_asked_for_where_it_is_missing(s3: S3User, tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError")
    s3.variables["PYTHONPATH"] = str(tmp_path)
    with s3.start(NAME) as process:
        _, error = process.communicate(timeout=60)
    assert error == f"refused: {NAME} needs obstore: {install_command('quire-llm', 's3')}.\n"
