"""A model by its name: what is downloaded from the Hub, what is refused before, and what a cut or killed download
leaves.
"""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from quire_cli.model import check

from tests.support.hub_server import GRANTED
from tests.support.terminals import in_terminal
from tests.unit.cli.model.conftest import WEIGHT_FILE, User, model_files

BIG = 8 << 20
CLIENT_CHUNK = 10 << 20  # bytes that huggingface_hub writes at once
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")


def sharded_files() -> dict[str, bytes]:
    files = {name: each for name, each in model_files().items() if name != "model.safetensors"}
    index = json.dumps({"weight_map": SHARDS}).encode()
    return {
        **files,
        "model.safetensors.index.json": index,
        **{file: file.encode() * 20_000 for file in SHARDS.values()},
    }


def weights_sent(user: User) -> int:
    return sum(user.hub.sent[name] for name in (*WEIGHTS, *SHARDS.values()))


def test_a_name_is_downloaded_once_without_what_is_not_read(user: User) -> None:
    repository = user.hub.add("org/small", model_files())
    folder, name, revision = user.find("org/small")
    assert (name, revision) == ("org/small", repository.commit("main"))
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == model_files()["model.safetensors"]
    user.hub.sent.clear()
    assert user.find("https://huggingface.co/org/small")[0] == folder
    assert not user.hub.sent


def test_the_shards_of_the_index_are_the_weights(user: User) -> None:
    user.hub.add("org/shards", sharded_files())
    folder, _, _ = user.find("org/shards")
    assert {file.name for file in folder.glob("*.safetensors")} == set(SHARDS.values())


def test_a_revision_is_a_branch_or_a_commit(user: User) -> None:
    repository = user.hub.add("org/small", model_files())
    repository.revisions["v1/old"] = model_files(b"older")
    for revision in ("v1/old", repository.commit("v1/old")):
        folder, name, commit = user.find(f"org/small@{revision}")
        assert (folder / "model.safetensors").read_bytes() == b"older"
        assert (name, commit) == ("org/small", repository.commit("v1/old"))
    assert (
        user.refused("org/small@v2") == "org/small has no revision v2: take main, v1/old, or a commit by its 40 digits."
    )


def test_a_moved_branch_is_followed(user: User) -> None:
    repository = user.hub.add("org/small", model_files(b"first"))
    user.find("org/small")
    repository.revisions["main"] = model_files(b"second")
    assert (user.find("org/small")[0] / "model.safetensors").read_bytes() == b"second"


def test_unknown_and_private_names(user: User) -> None:
    user.hub.add("org/small", model_files())
    user.hub.add("org/private", model_files(), private=True)
    assert user.refused("orgg/small").endswith("or it is a private one, which needs HF_TOKEN: did you mean org/small?")
    assert "no folder org/other is in " in user.refused("org/other")
    assert "or it is a private one, which needs HF_TOKEN" in user.refused("org/private")
    user.variables["HF_TOKEN"] = GRANTED
    assert user.find("org/private")[1] == "org/private"


def test_a_gated_model_asks_for_the_licence(user: User) -> None:
    user.hub.add("org/gated", model_files(), gated=True)
    page = f"{user.hub.url}/org/gated"
    sentence = f"org/gated is gated: accept its licence at {page}, and set HF_TOKEN to a token of that account."
    assert user.refused("org/gated") == sentence
    user.variables["HF_TOKEN"] = "hf_other"
    assert "the account of your token has no access yet" in user.refused("org/gated")
    assert weights_sent(user) == 0
    user.variables["HF_TOKEN"] = GRANTED
    assert user.find("org/gated")[1] == "org/gated"


BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
VISION = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "vision_config": {}}
HYBRID = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "layer_types": ["mamba", "attention"]}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
BITSANDBYTES = {"quantization_config": {"quant_method": "bitsandbytes"}}
CODE = {"architectures": ["OwnLM"], "model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (BERT, "org/wrong/config.json names BertForMaskedLM, which makes no text"),
        (T5, "describes an encoder with a decoder"),
        (
            VISION,
            "describes a model of more than text (MllamaForConditionalGeneration), of whose text part nothing is known",
        ),
        (
            HYBRID,
            "has layers of type 'mamba', and supported are full_attention, sliding_attention, chunked_attention, ",
        ),
        pytest.param(  # only transformers knows, which takes long to import
            MAMBA, "org/wrong/config.json names MambaForCausalLM, which keeps a state", marks=pytest.mark.soak
        ),
        (BITSANDBYTES, "The weights are quantised by 'bitsandbytes', and read are awq, gptq"),
        (
            CODE,
            "has auto_map, but code from a model folder is never run, and no other class serves OwnLM",
        ),
        ({"hidden_size": None}, "org/wrong/config.json says that hidden_size is None"),
    ],
    ids=[
        "encoder",
        "encoder-decoder",
        "vision",
        "hybrid",
        "by transformers",
        "scheme",
        "code",
        "sizes",
    ],
)
def test_what_is_not_served_is_refused_before_its_weights(user: User, config: dict[str, object], part: str) -> None:
    user.hub.add("org/wrong", model_files(**config))
    assert part in user.refused("org/wrong")
    assert weights_sent(user) == 0


def test_quantisation_that_the_model_cannot_have_is_refused_before(user: User) -> None:
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    user.hub.add("org/gemma", model_files(**gemma))
    assert "The quantization int4 is for models with a native implementation" in user.refused(
        "org/gemma", quantization="int4"
    )
    assert weights_sent(user) == 0


def test_another_quantisation_than_the_checkpoints_is_refused_before(user: User) -> None:
    user.hub.add("org/awq", model_files(quantization_config={"quant_method": "awq", "bits": 4}))
    refused = user.refused("org/awq", quantization="int8")
    assert "quantised already, in 4 bits, which --quantization int8 is not: leave --quantization out." in refused
    assert weights_sent(user) == 0


@pytest.mark.parametrize(
    ("without", "others", "part"),
    [
        ("model.safetensors", {}, "has no safetensors (but pytorch_model.bin, a pickle, which could run code): take"),
        ("tokenizer.json", {}, "has no tokenizer.json: take a copy that has one, or run python -c"),
        ("config.json", {"adapter_config.json": b"{}"}, "is an adapter (LoRA), not a model: serve its base model"),
        ("config.json", {"model_index.json": b"{}"}, "is a pipeline of diffusers"),
        ("config.json", {}, "has no config.json"),
        (
            "model.safetensors",
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone"}}'},
            "org/part is not whole",
        ),
        ("model.safetensors", {"model.safetensors.index.json": b"[]"}, "org/part is not whole"),
    ],
)
def test_repositories_that_lack_something(user: User, without: str, others: dict[str, bytes], part: str) -> None:
    files = {name: each for name, each in model_files().items() if name != without}
    user.hub.add("org/part", files | others)
    assert part in user.refused("org/part")
    assert weights_sent(user) == 0


def test_too_large_for_memory_is_refused_before_the_download(user: User) -> None:
    weights = 10**15
    user.hub.add("org/huge", model_files(), facts={"safetensors": {"parameters": {"BF16": weights}, "total": weights}})
    sentence = user.refused("org/huge", engines=2)
    assert "2 engines with org/huge need about" in sentence
    assert "try --engines 1 or --quantization int8 or --quantization int4 or a smaller model" in sentence
    assert weights_sent(user) == 0
    user.find("org/huge")  # whose weights are small, to nobody who asks for memory


def test_experts_in_mxfp4_are_counted_as_the_numbers_that_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(check, "memory_shortage", lambda name, weights, *_: counted.append(weights))
    raw = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    check.check_fits_memory("org/oss", {"U8": 1000, "BF16": 10}, raw, check.MemoryNeed(dtype="bfloat16"))
    assert counted == [2 * (2 * 1000 + 10)]


def test_too_large_for_the_disk_is_refused_before_the_download(user: User, small_disk: Path) -> None:
    user.hub.add("org/large", model_files(b"w" * (64 << 20)))
    user.home = small_disk / "home"
    sentence = user.refused("org/large")
    assert sentence.startswith("org/large takes 64.0 MiB of disk, and ")
    assert sentence.endswith("make room there, or name a folder on a larger disk with HF_HOME.")
    assert weights_sent(user) == 0


def test_a_disk_that_fills_up_leaves_nothing_to_serve(user: User, small_disk: Path) -> None:
    user.hub.add("org/large", model_files(b"w" * BIG))
    user.home = small_disk / "home"
    user.hub.pause["model.safetensors"] = BIG // 2
    with user.start("org/large") as process:
        assert user.hub.paused.wait(60)
        with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        user.hub.resume.set()
        _, error = process.communicate(timeout=60)
    assert "is full: make room, or name another with HF_HOME." in error
    assert not [*user.home.glob("hub/**/model.safetensors")]
    (small_disk / "other").unlink()
    user.hub.pause.clear()
    assert (user.find("org/large")[0] / "model.safetensors").stat().st_size == BIG


def test_a_cut_connection_goes_on_where_it_was(user: User) -> None:
    user.hub.add("org/small", model_files(b"w" * (3 * CLIENT_CHUNK)))
    user.hub.cut["model.safetensors"] = 2 * CLIENT_CHUNK
    folder, _, _ = user.find("org/small")
    assert (folder / "model.safetensors").stat().st_size == 3 * CLIENT_CHUNK
    gets = [(path, wanted) for method, path, wanted in user.hub.requests if method == "GET"]
    ranges = [wanted for path, wanted in gets if path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={2 * CLIENT_CHUNK}-"]
    assert user.hub.sent["model.safetensors"] == 3 * CLIENT_CHUNK


def test_who_comes_during_a_download_waits_for_it_and_shares_it(user: User) -> None:
    weights = b"w" * BIG
    user.hub.add("org/small", model_files(weights))
    user.hub.pause["model.safetensors"] = BIG // 2
    with user.start("org/small") as first, user.start("org/small") as second:
        assert user.hub.paused.wait(60)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(2)
        user.hub.resume.set()
        (one, _), (other, _) = (process.communicate(timeout=60) for process in (first, second))
    assert one == other != ""
    assert user.hub.sent["model.safetensors"] == BIG
    assert len([path for path in user.home.rglob("*") if path.is_file() and path.stat().st_size == BIG]) == 2  # a link


def test_a_killed_download_is_never_served_and_keeps_whole_files(user: User) -> None:
    first, second = SHARDS.values()
    user.hub.add("org/shards", sharded_files())
    user.hub.pause[second] = 1 << 16
    with user.start("org/shards") as process:
        assert user.hub.paused.wait(60)
        while user.hub.sent[first] < len(first) * 20_000 or not [*user.home.glob(f"hub/*/snapshots/*/{first}")]:
            assert process.poll() is None
        process.kill()
    assert [*user.home.glob("hub/*/blobs/*.incomplete")]
    offline = {"HF_HUB_OFFLINE": "1"}
    user.variables |= offline
    assert "is not whole in" in user.refused("org/shards")
    user.variables.clear()
    user.hub.pause.clear()
    user.hub.resume.set()
    user.hub.sent.clear()
    folder, _, _ = user.find("org/shards")
    assert (folder / second).read_bytes() == second.encode() * 20_000
    assert user.hub.sent[first] == 0
    assert not [*user.home.glob("hub/*/blobs/*.incomplete")]


def test_without_a_network_the_cached_copy_is_taken(user: User) -> None:
    user.hub.add("org/small", model_files())
    folder, _, _ = user.find("org/small")
    user.variables["HF_HUB_OFFLINE"] = "1"
    user.hub.requests.clear()
    assert user.find("org/small")[0] == folder
    assert not user.hub.requests
    (user.home.parent / "demo/model").mkdir(parents=True)
    told = user.refused("demo/modle")
    assert told.startswith(f"no folder demo/modle is in {user.home.parent} (did you mean demo/model?), and demo/modle ")
    assert told.endswith(": unset HF_HUB_OFFLINE to download the model, or name a folder.")
    user.variables = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert user.find("org/small")[0] == folder
    told = user.refused("demo/modle")
    assert "(did you mean demo/model?)" in told
    assert "; http://127.0.0.1:9 cannot be reached (" in told


@pytest.mark.parametrize(("status", "part"), [(503, "cannot be reached"), (429, "limits your requests: wait")])
def test_a_hub_that_does_not_serve(user: User, status: int, part: str) -> None:
    user.hub.status = status
    assert part in user.refused("org/small")


def test_a_broken_cache_is_told(user: User) -> None:
    user.hub.add("org/small", model_files())
    folder, _, _ = user.find("org/small")
    blob = (folder / "model.safetensors").resolve()
    with blob.open("r+b") as file:
        file.truncate(1000)
    where = f"remove {folder.parent.parent} and start again."
    assert user.refused("org/small") == f"The copy of org/small in the cache is broken (model.safetensors): {where}"
    blob.unlink()  # the link to it is left: the file is missing, and downloaded
    assert (user.find("org/small")[0] / "model.safetensors").stat().st_size == len(WEIGHT_FILE)


DOWNLOAD = """
import os
from quire_cli.model.find import find_model
find_model("org/small")
os.write(1, b"engine-0 | a line of the log\\n")
"""


def test_what_is_printed_after_a_download_begins_a_line_of_its_own(user: User, tmp_path: Path) -> None:
    """In a terminal, where there are bars."""
    user.hub.add("org/small", model_files())
    environment = {"HF_ENDPOINT": user.hub.url, "HF_HOME": str(tmp_path)}
    shown = in_terminal([sys.executable, "-c", DOWNLOAD], columns=100, environment=environment)
    assert "org/small: 100%" in shown
    assert shown.endswith("\r\nengine-0 | a line of the log\r\n")
