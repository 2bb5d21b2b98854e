"""GGUF files of a repository of the Hub: which one is meant, and that it alone is downloaded."""

import pytest
from quire_cli.model.gguf import choose, has_only_gguf, tag_of
from quire_cli.model.name import ModelNotFoundError

from tests.unit.cli.model.conftest import User, model_files

SEVERAL = ["small-Q4_K_M.gguf", "small-Q8_0.gguf", "small-IQ4_XS.gguf", "mmproj-small-F16.gguf"]


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("Llama-3.2-1B-Instruct.Q8_0.gguf", "Q8_0"),
        ("gemma-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("folder/model-fp16.gguf", "fp16"),
        ("model-BF16-00001-of-00002.gguf", "BF16"),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("model-MXFP4.gguf", "MXFP4"),
        ("Qwen3-8B.gguf", None),
        ("Q4_0.gguf", "Q4_0"),
    ],
)
def test_the_quantisation_ends_the_name(file: str, tag: str | None) -> None:
    assert tag_of(file) == tag


def files(*names: str) -> dict[str, int]:
    return {"README.md": 1, "config.json": 1} | dict.fromkeys(names, 7)


@pytest.mark.parametrize(
    ("names", "wanted", "file"),
    [
        (SEVERAL, "Q4_K_M", "small-Q4_K_M.gguf"),
        (SEVERAL, "q8_0", "small-Q8_0.gguf"),
        (SEVERAL, "SMALL-Q8_0.gguf", "small-Q8_0.gguf"),
        (["a.gguf", "mmproj-a.gguf"], None, "a.gguf"),
        (["x/a-Q8_0.gguf", "b-Q4_0.gguf"], "Q8_0", "x/a-Q8_0.gguf"),
        (["x/a-Q8_0.gguf", "b-Q8_0.gguf"], "x/a-Q8_0.gguf", "x/a-Q8_0.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "Q4_K_M", "a-Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"], "Q4_K_M", "a-Q4_K_M.gguf"),
    ],
)
def test_one_is_chosen(names: list[str], wanted: str | None, file: str) -> None:
    assert choose("org/m", files(*names), wanted) == file


SPLIT = ["m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
NAMED = "take org/m:Q4_K_M (there are Q4_K_M, Q8_0)."
REFUSED = [
    (SEVERAL, None, f"org/m has 3 GGUF files: {NAMED}"),
    (SEVERAL, "Q5_K_M", f"org/m has no GGUF files for Q5_K_M: {NAMED}"),
    (SEVERAL, "iq4_xs", f"small-IQ4_XS.gguf of org/m has weights in IQ4_XS, not read: {NAMED}"),
    ([], "Q8_0", "org/m has no GGUF files: name it without what stands behind the colon."),
    (["m-IQ4_XS.gguf"], None, "m-IQ4_XS.gguf of org/m has weights in IQ4_XS, not read: take the original model, or "),
    (SPLIT, "Q8_0", f"{SPLIT[1]} of org/m is a part of a split file, which is not read: take org/m:Q4_0."),
    (SPLIT[1:], None, f"{SPLIT[1]} of org/m is a part of a split file, which is not read: take the original model, "),
    (SPLIT, None, "org/m has 3 GGUF files: take org/m:Q4_0."),
    (["a-Q8_0.gguf", "b-Q8_0.gguf", "c-Q4_0.gguf"], "Q8_0", "org/m has 2 GGUF files for Q8_0: take org/m:a-Q8_0.gguf "),
    (["a.gguf", "b.gguf"], None, "org/m has 2 GGUF files: take org/m:a.gguf (there are a.gguf, b.gguf)."),
]


@pytest.mark.parametrize(("names", "wanted", "told"), REFUSED)
def test_what_is_not_one_that_can_be_read_is_refused_with_what_can(
    names: list[str], wanted: str | None, told: str
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choose("org/m", files(*names), wanted)
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith(".")


def test_safetensors_are_preferred_to_gguf_files_that_are_not_named() -> None:
    assert has_only_gguf(["a.gguf", "config.json"])
    assert not has_only_gguf(["a.gguf", "model.safetensors"])
    assert not has_only_gguf(["a.gguf", "model.safetensors.index.json"])
    assert not has_only_gguf(["adapter.gguf", "adapter_config.json"])
    assert not has_only_gguf(["mmproj-a.gguf"])


def gguf_files() -> dict[str, bytes]:
    return {"m-Q4_K_M.gguf": b"4" * 100_000, "m-Q8_0.gguf": b"8" * 200_000, "config.json": b"{}", "README.md": b"m"}


def test_only_the_file_that_was_named_is_downloaded_and_once(user: User) -> None:
    repository = user.hub.add("org/m-GGUF", gguf_files())
    path, name, revision = user.find("org/m-GGUF:q4_k_m", engines=1)
    assert (path.name, name, revision) == ("m-Q4_K_M.gguf", "org/m-GGUF", repository.commit("main"))
    assert path.read_bytes() == gguf_files()["m-Q4_K_M.gguf"]
    assert [each.name for each in path.parent.iterdir()] == ["m-Q4_K_M.gguf"]
    user.hub.sent.clear()
    assert user.find("org/m-GGUF@main:m-Q4_K_M.gguf")[0] == path
    assert not user.hub.sent
    user.variables["HF_HUB_OFFLINE"] = "1"
    assert user.find("org/m-GGUF:Q4_K_M")[0] == path
    assert "is not whole in" in user.refused("org/m-GGUF:Q8_0")


def test_the_only_file_needs_no_name_and_a_tokenizer_beside_it_comes_along(user: User) -> None:
    files = {"m.gguf": b"g" * 1000, "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "x/tokenizer.json": b"{}"}
    user.hub.add("org/one", files)
    path, _, _ = user.find("org/one")
    assert {each.name for each in path.parent.iterdir()} == {"m.gguf", "tokenizer.json", "tokenizer_config.json"}


def test_a_repository_with_both_is_read_as_it_is_named(user: User) -> None:
    user.hub.add("org/both", model_files() | {"m-Q8_0.gguf": b"8"})
    folder, _, _ = user.find("org/both")
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "m-Q8_0.gguf").exists()
    assert user.find("org/both:Q8_0")[0] == folder / "m-Q8_0.gguf"


def test_what_is_not_read_or_does_not_fit_is_refused_before_the_download(user: User) -> None:
    user.hub.add("org/mamba", gguf_files(), facts={"gguf": {"architecture": "mamba", "total": 7}})
    said = user.refused("org/mamba:Q8_0")
    assert said.startswith(
        "org/mamba:Q8_0 has the architecture mamba, and of GGUF files read are llama, qwen2, qwen3: "
    )
    user.hub.add("org/m-GGUF", gguf_files(), facts={"gguf": {"architecture": "qwen3"}})
    assert "1000000 engines with org/m-GGUF:Q8_0 need about" in user.refused("org/m-GGUF:Q8_0", engines=10**6)
    assert not any(user.hub.sent[name] for name in gguf_files())


def test_a_broken_copy_is_an_error_in_one_sentence(user: User) -> None:
    user.hub.add("org/m-GGUF", gguf_files())
    path, _, _ = user.find("org/m-GGUF:Q8_0")
    with path.resolve().open("r+b") as file:
        file.truncate(10)
    told = "The copy of org/m-GGUF:Q8_0 in the cache is broken (m-Q8_0.gguf): remove "
    assert user.refused("org/m-GGUF:Q8_0").startswith(told)
