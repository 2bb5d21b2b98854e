"""What a user types is a path, a name of the Hub or an address; folders and files that are here are looked at."""

import json
from pathlib import Path

import pytest
from quire_cli.model.find import find_model
from quire_cli.model.name import HubName, ModelNotFoundError, OciName, S3Name, read_name
from quire_proto.folders import no_such_path

from tests.unit.cli.model.conftest import WEIGHT_FILE, model_files

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1", HubName("org/name", "v1")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/n.a-me_1@v1:Q4_K_M", HubName("org/n.a-me_1", "v1", "Q4_K_M")),
        ("hf://org/name", HubName("org/name")),
        ("https://huggingface.co/org/name/", HubName("org/name")),
        ("s3://bucket/models/x/", S3Name("bucket", "models/x")),
        ("s3://bucket", S3Name("bucket")),
        ("oci://host:5000/team/model", OciName("host:5000", "team/model")),
        (f"oci://ghcr.io/m:v1@{DIGEST}", OciName("ghcr.io", "m", "v1", DIGEST)),
    ],
)
def test_names_are_read(text: str, name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_name(text) == name


@pytest.mark.parametrize("text", ["name", "./org/name", "/org/name", "~/name", "a/b/c", "org/", "org/model.gguf", "@"])
def test_what_is_nothing_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"on the Hugging Face Hub are ORG/NAME, such as Qwen/Qwen3-0\.6B\.$"):
        read_name(text)


@pytest.mark.parametrize("text", ["m" * 5000, "/" + "m" * 300, "~nobody-of-this-name/model"])
def test_what_cannot_be_looked_up_is_one_short_sentence(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"cannot be looked up: [A-Z][^.]+\.$") as caught:
        read_name(text)
    assert len(str(caught.value)) < 300


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert read_name("org/name") == Path("org/name")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "chat", model_files())
    assert find_model(str(folder)) == find_model(str(tmp_path / "chat/."))
    assert find_model(str(folder)).name == "chat"


def test_a_name_that_clients_could_not_ask_for_is_changed(tmp_path: Path) -> None:
    folder = write(tmp_path / "My model (2)", model_files())
    assert find_model(str(folder)).name == "My-model-2"
    assert S3Name("bucket", "models/My model").served == "My-model"


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, missing: str) -> None:
    files = {name: each for name, each in model_files().items() if name not in (missing, "pytorch_model.bin")}
    folder = write(tmp_path, files)
    with pytest.raises(ModelNotFoundError, match=f"not a model folder that can be served.*{missing}"):
        find_model(str(folder))


@pytest.mark.parametrize("inside", ["model", "snapshots/1f2e3d"])
def test_a_folder_around_a_model_names_the_model(tmp_path: Path, inside: str) -> None:
    write(tmp_path / inside, model_files())
    with pytest.raises(ModelNotFoundError, match=rf"has no config.json \(did you mean {tmp_path / inside}\?\)\.$"):
        find_model(str(tmp_path))


def test_a_folder_in_another_form_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    pickled = {**model_files(), "pytorch_model.bin": b""}
    del pickled["model.safetensors"]
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin is a pickle.* run python -c .* to convert it\."):
        find_model(str(write(tmp_path / "pickle", pickled)))
    slow = {**model_files(), "vocab.json": b"{}"}
    del slow["tokenizer.json"]
    with pytest.raises(ModelNotFoundError, match=r"vocab\.json is another form.* run python -c .* to convert it\."):
        find_model(str(write(tmp_path / "slow", slow)))


def test_a_folder_without_a_shard_is_refused(tmp_path: Path) -> None:
    files = model_files()
    del files["model.safetensors"]
    index = {"weight_map": {"a": "here.safetensors", "b": "gone.safetensors"}}
    files |= {"here.safetensors": b"1", "model.safetensors.index.json": json.dumps(index).encode()}
    with pytest.raises(ModelNotFoundError, match=r"gone\.safetensors"):
        find_model(str(write(tmp_path, files)))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (WEIGHT_FILE[:-1], r"model\.safetensors is not a whole safetensors file .*: copy or download it again"),
        (b"", "is not a whole safetensors file"),
        (POINTER, "is a pointer of Git LFS, not the weights: run git lfs pull in "),
    ],
)
def test_truncated_safetensors_and_git_lfs_pointers_are_refused(weights: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=told):
        find_model(str(write(tmp_path, model_files(weights))))


@pytest.mark.parametrize("config", [b'{"architectures": [', b"", b"[]"])
def test_a_broken_copy_of_a_config_is_to_be_copied_again(config: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json .*: copy or download it again\."):
        find_model(str(write(tmp_path, model_files() | {"config.json": config})))


@pytest.mark.parametrize("index", [b"{", b'{"weight_map": {"a": "gone.safetensors"}}'])
def test_an_index_beside_a_single_file_is_not_read(index: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, {**model_files(), "model.safetensors.index.json": index})
    assert find_model(str(folder)).path == folder


def test_a_folder_with_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, model_files(architectures=["BertForMaskedLM"], model_type="bert"))
    with pytest.raises(
        ModelNotFoundError, match=r"names BertForMaskedLM, which makes no text .*: take a causal language model"
    ):
        find_model(str(folder))


def test_gguf_files(tmp_path: Path) -> None:
    folder = write(tmp_path, {"small-Q8_0.gguf": b"GGUF"})
    assert find_model(str(folder / "small-Q8_0.gguf")).name == "small-Q8_0"
    assert find_model(str(folder)).path == folder
    write(tmp_path, {"other.gguf": b"GGUF", "notes.txt": b""})
    with pytest.raises(ModelNotFoundError, match="has 2 GGUF files: name one of them, such as "):
        find_model(str(folder))
    with pytest.raises(ModelNotFoundError, match=r"notes\.txt is not a GGUF file"):
        find_model(str(folder / "notes.txt"))


@pytest.mark.parametrize("address", ["s3://", "s3:///x", "s3://b u/x", "s3://bucket/a//b", "s3://bucket/../x"])
def test_addresses_of_no_folder_are_refused(address: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"names no folder of a bucket: write s3://BUCKET/PREFIX\.$"):
        find_model(address)


@pytest.mark.parametrize("address", ["oci://", "oci://host", "oci://host/Model", "oci://h/m@sha256:1", "oci://h/../m"])
def test_addresses_of_no_artifact_are_refused(address: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"names nothing in a registry: write oci://REGISTRY/REPOSITORY:TAG\.$"
    ):
        find_model(address)


def test_gguf_files_in_a_bucket_are_refused() -> None:
    with pytest.raises(ModelNotFoundError, match=r"is a GGUF file, which is read from a disk only: copy it here"):
        find_model("s3://bucket/models/small.gguf")


@pytest.mark.parametrize("address", ["gs://bucket/model", "https://host/model"])
def test_addresses_that_are_not_read_are_refused(address: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"^(gs|https):// is not read: copy the model here"):
        find_model(address)


@pytest.mark.parametrize("typed", ["demo/modle", "dmeo/model", "./demo/modell", "demos/model.gguf"])
def test_the_folder_that_was_probably_meant_is_named(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo" / "model").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert no_such_path(typed) == f"no folder {typed} is in {tmp_path} (did you mean demo/model?)"
    assert no_such_path(str(tmp_path / "demo" / "modle")).endswith(f"(did you mean {tmp_path}/demo/model?)")


def test_nothing_is_guessed_where_nothing_is_similar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert no_such_path("Qwen/Qwen3-0.6B") == f"no folder Qwen/Qwen3-0.6B is in {tmp_path}"
    assert no_such_path("demo/Qwen3") == f"no folder demo/Qwen3 is in {tmp_path}"
    assert no_such_path("/nowhere/model") == "no folder /nowhere/model is here"
