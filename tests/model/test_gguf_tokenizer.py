"""A GGUF file that lies alone has its tokenizer made of its metadata: text has the tokens of the tokenizer that the
metadata was written from, and what cannot be made is refused.
"""

import json
import shutil
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint import gguf_tokenizer
from quire_engine.checkpoint.gguf import GgufFile
from quire_engine.checkpoint.gguf_tokenizer import (
    MAX_PIECE_LENGTH,
    make_tokenizer,
    tokenizer_folder,
    tokenizer_folder_if_any,
)
from quire_engine.errors import ModelError
from quire_engine.llm import LLM, SamplingParams
from quire_proto.text.model_folder import folder_vocabulary_digest
from quire_proto.text.tokenizer import ModelTokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.support.gguf_files import PIECES, pieces_metadata, with_metadata

# Its own scores are of no use to tokenizers that are written over its own.
LLAMA = (Path(__file__).parent / "quantized" / "llama.gguf").read_bytes().replace(b"ggml.scores", b"ggml.unused")
CORPUS = Path(__file__).parents[2] / "docs" / "scheduling.md"
BEGIN, END, THINK = "<｜begin｜>", "<|end|>", "<think>"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
TEXTS = [
    "It's 12345 tokens!\n\n  Two  spaces, WE'LL see\r\n\t HTMLParser/iPhone  ",
    "e\u0301tude\u00e9 \U0001f98a\U0001f469\u200d\U0001f4bb \u4e2d\u6587 \u0905\u0928\u0941 \u00bd\u0663 \u212b",
    f"a{END}b {THINK} c</think>{BEGIN}",
    "",
]
KINDS = ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]
TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.lists(st.sampled_from([" ", "  ", "\n", "'s", "12", "Ab", "fox", END, THINK, "\u00e9", "e\u0301", "."])).map(
        "".join
    ),
)


@cache
def original(kind: str) -> Tokenizer:
    """A tokenizer as Hugging Face's files of such models have it, learned from a page."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "tekken")))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in GGUF_PRE_TOKENIZER_SPLITS:
        parts = [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[kind]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    else:
        tokenizer.pre_tokenizer = plain
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(CORPUS)], trainer)
    if kind == "llama-bpe":  # a word that no merges make, as Llama 3's vocabulary has some
        made = json.loads(tokenizer.to_str())
        made["model"]["vocab"]["\u0120WordOfNoMerges"] = len(made["model"]["vocab"])
        tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.add_tokens([THINK])
    return tokenizer


def metadata(kind: str) -> dict[str, Any]:
    tokenizer = original(kind)
    made = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [*tokens, "[PAD901]", "[PAD902]"],
        "tokenizer.ggml.token_type": [*({BEGIN: 3, END: 3, THINK: 4}.get(token, 1) for token in tokens), 5, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in made["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id(BEGIN),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(END),
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_bytes(with_metadata(LLAMA, values))
    return path


@cache
def made(kind: str, folder: Path) -> ModelTokenizer:
    values = metadata(kind) if kind in KINDS else pieces_metadata()
    return ModelTokenizer.load(make_tokenizer(write(folder / f"{kind}.gguf", values)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_tokens_of_the_original(kind: str, folder: Path) -> None:
    tokenizer = made(kind, folder)
    for text in [*TEXTS, "a WordOfNoMerges", CORPUS.read_text()[:20000]]:
        expected = original(kind).encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_plain(text) == expected
        assert tokenizer.decode(expected) == original(kind).decode(expected, skip_special_tokens=False)
    assert tokenizer.vocab_size == original(kind).get_vocab_size()  # without rows that only fill the embedding
    path = folder / "original"
    path.mkdir(exist_ok=True)
    original(kind).save(str(path / "tokenizer.json"))
    assert folder_vocabulary_digest(path) == tokenizer.vocabulary_digest


@settings(max_examples=50)
@given(text=TEXT)
def test_any_text_has_the_tokens_of_the_original(folder: Path, text: str) -> None:
    for kind in KINDS:
        assert made(kind, folder).encode_plain(text) == original(kind).encode(text, add_special_tokens=False).ids


def sentencepiece(text: str) -> list[int]:
    """Of two neighbours that make a token, those with the best score become it, the first ones of equals; until there
    are none. A character without a token is its bytes.
    """
    scores = {piece: -float(number) for number, piece in enumerate(PIECES)}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while pairs := [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [PIECES.index(piece) if piece in scores else 2 for pieces in found for piece in pieces]


LETTERS = st.text(st.sampled_from("thefoxwla "), max_size=30)


@given(text=LETTERS)
def test_pieces_are_joined_by_their_scores_and_begin_with_a_space(folder: Path, text: str) -> None:
    tokenizer = made("pieces", folder)
    tokens = tokenizer.encode(text)
    assert tokens == [0, *(sentencepiece(text) if text else [])]
    assert tokenizer.decode(tokens[1:]) == text


def test_bytes_stand_for_characters_without_a_piece(folder: Path) -> None:
    tokens = made("pieces", folder).encode_plain("ox\n\t")
    assert tokens == sentencepiece("ox\n\t")
    assert tokens[-2:] == [PIECES.index("<0x0A>"), PIECES.index("<0x09>")]


@pytest.mark.parametrize(
    ("kind", "flags", "begins", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_eos_token": True}, False, True),
    ],
)
def test_the_tokens_that_begin_and_end_a_text_are_added_as_the_file_says(
    tmp_path: Path, kind: str, flags: dict[str, bool], begins: bool, ends: bool
) -> None:
    values = metadata(kind) | {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = ModelTokenizer.load(make_tokenizer(write(tmp_path / "model.gguf", values)))
    begin, end = (original(kind).token_to_id(token) for token in (BEGIN, END))
    plain = tokenizer.encode_plain("a fox")
    assert tokenizer.encode("a fox") == [*[begin] * begins, *plain, *[end] * ends]


def test_templates_with_names_are_the_files(folder: Path) -> None:
    named = {"tokenizer.chat_template.tool_use": "T{{ tools | length }}", "tokenizer.chat_template.../x": "never"}
    made_folder = make_tokenizer(write(folder / "named.gguf", pieces_metadata() | named))
    assert [path.name for path in (made_folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ModelTokenizer.load(made_folder).render_chat_text([{"role": "user", "content": "x"}], tools) == "T1"


def test_the_chat_template_and_its_tokens_are_the_files(folder: Path) -> None:
    tokenizer = made("qwen2", folder)
    chat = [{"role": "user", "content": f"Hi{END}"}]
    assert tokenizer.render_chat_text(chat) == f"{BEGIN}Hi{END}{END}"
    begin, *_, end = tokens = tokenizer.encode_chat(chat)
    assert (tokenizer.name_of(begin), tokenizer.name_of(end)) == (BEGIN, END)
    assert tokens.count(end) == 1  # what a message has is text


def test_a_space_before_the_text_can_be_turned_off(tmp_path: Path) -> None:
    values = pieces_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = ModelTokenizer.load(make_tokenizer(write(tmp_path / "model.gguf", values)))
    tokens = tokenizer.encode_plain("the fox")
    assert [tokenizer.name_of(token) for token in tokens] == ["the", "\u2581fox"]
    assert tokenizer.decode(tokens) == "the fox"


def test_the_offline_api_runs_a_lone_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # compiled kernels are in the cache too
    monkeypatch.setattr(gguf_tokenizer, "_cache_folder", lambda: tmp_path)
    path = write(folder / "lone.gguf", pieces_metadata() | {"tokenizer.chat_template": TEMPLATE})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, dtype="float32", kv_cache_memory=1 << 20, swap_space=0) as llm:
        text = llm.generate(["the fox"], params, use_tqdm=False)[0]
        chat = llm.chat([{"role": "user", "content": "the fox"}], params, use_tqdm=False)[0]
    assert [PIECES[token] for token in text.prompt_token_ids] == ["<s>", "\u2581the", "\u2581fox"]
    assert [PIECES[token] for token in chat.prompt_token_ids] == ["<s>", "\u2581the", "\u2581fox", "</s>"]
    assert len(text.outputs[0].token_ids) == 8
    assert not list(folder.glob("tokenizer*"))  # nothing is written beside the file


def test_it_is_made_once_and_again_for_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder / "once.gguf", pieces_metadata())
    first = make_tokenizer(path)
    assert {file.name for file in first.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "_texts", lambda _: pytest.fail("it was made again"))
        assert make_tokenizer(path) == first
        assert tokenizer_folder(Path(shutil.copy(path, folder / "copy.gguf"))) == first
    assert make_tokenizer(write(folder / "other.gguf", pieces_metadata() | {"tokenizer.chat_template": "a"})) != first
    assert not list((folder / "cache" / "quire").glob("tokenizer-*.*"))  # nothing half-written is left


def test_one_that_another_process_has_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, real, made = write(tmp_path / "model.gguf", pieces_metadata()), gguf_tokenizer._texts, []

    def overtaken(file: GgufFile) -> dict[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(gguf_tokenizer, "_texts", real)
            made.append(make_tokenizer(path))
        return real(file)

    monkeypatch.setattr(gguf_tokenizer, "_texts", overtaken)
    assert [make_tokenizer(path)] == made == list((tmp_path / "quire").iterdir())


def test_a_tokenizer_beside_the_file_is_preferred(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", pieces_metadata())
    assert tokenizer_folder(path) == tokenizer_folder(tmp_path) == make_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(path) == tokenizer_folder(tmp_path) == tmp_path


def with_pieces(*pieces: str, kind: int = 1) -> dict[str, Any]:
    """The metadata with these pieces for the last ones."""
    values = pieces_metadata()
    keep = len(PIECES) - len(pieces)
    values["tokenizer.ggml.tokens"] = [*PIECES[:keep], *pieces]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"][:keep], *[kind] * len(pieces)]
    return values


def test_a_long_piece_is_merged_from_its_halves(tmp_path: Path) -> None:
    halves = "a" * (MAX_PIECE_LENGTH - 1), "b"
    folder = make_tokenizer(write(tmp_path / "model.gguf", with_pieces("".join(halves), halves[0])))
    assert list(halves) in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]


def test_a_special_token_may_be_longer(tmp_path: Path) -> None:
    token = "x" * (MAX_PIECE_LENGTH + 1)
    tokenizer = ModelTokenizer.load(make_tokenizer(write(tmp_path / "model.gguf", with_pieces(token, kind=4))))
    assert tokenizer.encode_plain(token)[-1] == len(PIECES) - 1


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in pieces_metadata().items() if key != f"tokenizer.ggml.{name}"}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "it splits text as None, and known are gpt-2, smollm, llama-bpe"),
        (metadata("gpt-2") | {"tokenizer.ggml.pre": "of-tomorrow"}, "it splits text as 'of-tomorrow', and known are"),
        (metadata("gpt-2") | {"tokenizer.ggml.pre": 7}, "it splits text as 7"),
        (metadata("gpt-2") | {"tokenizer.ggml.merges": ["no such"]}, "it is not whole: "),
        (pieces_metadata() | {"tokenizer.ggml.model": "rwkv"}, "its kind is 'rwkv', and read are 'gpt2' and 'llama'"),
        (without("scores"), "it has no scores"),
        (pieces_metadata() | {"tokenizer.ggml.scores": [1.0]}, "it has not one score for each token"),
        (pieces_metadata() | {"tokenizer.ggml.tokens": [1, 2]}, "it has no tokens"),
        (with_pieces("x" * (MAX_PIECE_LENGTH + 1)), "token 63 has 513 characters, at most 512"),
        (with_pieces("x" * 65536), "token 63 has 65536 characters, at most 512"),
        (pieces_metadata() | {"tokenizer.ggml.token_type": [1]}, "it has not one type for each token"),
        (pieces_metadata() | {"tokenizer.ggml.bos_token_id": 64}, "its bos_token_id is 64, which is not a token"),
    ],
)
def test_one_that_cannot_be_made_is_not_guessed(folder: Path, tmp_path: Path, values: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "model.gguf", values)
    with pytest.raises(ModelError) as caught:
        tokenizer_folder(path)
    said = str(caught.value)
    assert said.startswith(f"The tokenizer in {path} cannot be used ({why}")
    assert said.endswith("): put the original model's tokenizer.json next to it.")
    assert tokenizer_folder_if_any(path) == tmp_path  # where tokens are served without it
    with pytest.raises(ModelError):
        LLM(path, dtype="float32", kv_cache_memory=1 << 20, swap_space=0)
    assert not list((folder / "cache" / "quire").glob("tokenizer-*.*"))


VALUES = st.one_of(
    st.booleans(), st.integers(0, 80), st.text(max_size=3), st.lists(st.integers(0, 6), min_size=1, max_size=70)
)


@given(changes=st.dictionaries(st.sampled_from([*metadata("gpt-2"), *pieces_metadata()]), VALUES, max_size=2))
def test_strange_metadata_makes_a_tokenizer_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.mktemp("strange") / "model.gguf", pieces_metadata() | changes)
    with suppress(ModelError):
        assert ModelTokenizer.load(make_tokenizer(path)).encode("the fox") is not None


def test_a_cache_that_cannot_be_written_makes_it_for_this_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write(folder / "apart.gguf", pieces_metadata())
    assert ModelTokenizer.load(make_tokenizer(path)).vocab_size == len(PIECES)
    assert make_tokenizer(path) == make_tokenizer(path)


def test_strings_of_all_arrays_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.gguf"
    path.write_bytes(with_metadata(LLAMA, {f"skipped.{number}": ["x"] * 50 for number in range(5)}))
    GgufFile.read(path)
    monkeypatch.setattr("quire_engine.checkpoint.gguf.MAX_STRINGS", 249)
    with pytest.raises(ModelError, match="more than 249 strings in arrays"):
        GgufFile.read(path)
    with pytest.raises(ModelError, match="more than 249 strings in arrays"):
        GgufFile.read(path, ["skipped.1"])


def test_the_digest_is_of_all_metadata_and_read_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for number, extra in enumerate([{}, {"a": 1}, {"skipped": ["x"]}, {"skipped": ["y"]}, {"floats": [1.0]}]):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(with_metadata(LLAMA, extra))
        found = GgufFile.read(path, [], b"salt")
        assert found.digest == GgufFile.read(path, ["skipped"], b"salt").digest
        assert found.tensors == GgufFile.read(path).tensors
        digests |= {found.digest, GgufFile.read(path, [], b"other").digest}
    assert len(digests) == 10


def test_a_cached_tokenizer_of_another_user_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = folder / "alone.gguf"
    path.write_bytes(with_metadata(LLAMA, pieces_metadata()))
    made = make_tokenizer(path)
    assert made.is_relative_to(tmp_path)
    made.chmod(0o777)
    with pytest.raises(ModelError, match="others may write there"):
        make_tokenizer(path)
