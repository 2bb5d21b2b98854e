"""GGUF files: every type of blocks has the numbers that llama.cpp's library makes of it, the engine gives the tokens of
transformers and llama.cpp, and no file does more than be refused.
"""

import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.gguf import BLOCKS, GGUF_ARCHITECTURES, GgufFile
from quire_engine.checkpoint.gguf_blocks import DEQUANTIZE, WHOLE_NUMBERS
from quire_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig, Quantization
from quire_engine.errors import ModelError
from quire_engine.models.loader import decoder_class, read_decoder_config, read_model_config
from quire_engine.quantization.base import LayerSpec, Linear
from quire_engine.quantization.int8 import Int8Linear
from quire_engine.quantization.quantized_linear import GroupedLinear
from quire_engine.quantization.schemes import make_quantization
from quire_engine.quantization.stored import StoredWeight
from quire_proto.sampling import SamplingParams
from safetensors.torch import load_file

from tests.model.engine import run
from tests.support.executors import load_executor

HERE = Path(__file__).parent / "quantized"
MODELS = ("llama", "llama-q4_k_m", "qwen2", "qwen3")
QUANTISED = [kind for kind in BLOCKS if "Q" in kind]
CPU = torch.device("cpu")


def gguf(name: str) -> Path:
    return HERE / f"{name}.gguf"


def opened(path: Path) -> GgufCheckpoint:
    """The tensors of a file, by the names that its architecture gives them."""
    return GgufCheckpoint(path, decoder_class(GGUF_ARCHITECTURES[GgufFile.read(path).architecture]).gguf)


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_have_the_numbers_that_llama_cpps_library_makes_of_them(kind: str) -> None:
    facts = load_file(HERE / "blocks.safetensors")
    numbers = DEQUANTIZE[kind](facts[f"{kind}.blocks"])
    torch.testing.assert_close(numbers, facts[f"{kind}.numbers"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", WHOLE_NUMBERS)
def test_whole_numbers_are_the_same_numbers_before_they_are_multiplied(kind: str) -> None:
    blocks = load_file(HERE / "blocks.safetensors")[f"{kind}.blocks"]
    if kind == "Q4_K":
        blocks[0, :2] = 0  # a block without scales has its minima
        blocks[1, 4:16] = 0
    bits, read = WHOLE_NUMBERS[kind]
    whole = read(blocks)
    values, scales = (part.reshape(len(blocks), -1) for part in (whole.values, whole.scales))
    zeros = None if whole.zeros is None else whole.zeros.reshape(len(blocks), -1)
    weight = StoredWeight(values, scales, zeros, bits, whole.values.shape[2]).dequantize(torch.float32)
    torch.testing.assert_close(weight, DEQUANTIZE[kind](blocks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "bits"),
    [
        *(("llama", "self_attn.k_proj", 4), ("llama-q4_k_m", "mlp.down_proj", 4), ("llama", "self_attn.q_proj", 8)),
        *(("llama", "self_attn.v_proj", 8), ("qwen3", "mlp.down_proj", 8)),
    ],
)
def test_tensors_of_whole_numbers_stay_so_and_are_rounded_where_asked(name: str, layer: str, bits: int) -> None:
    checkpoint, layer = opened(gguf(name)), f"model.layers.0.{layer}"
    shape = checkpoint.shape(f"{layer}.weight")
    spec, x = LayerSpec([layer], [shape[0]], shape[1]), torch.randn(5, shape[1])
    expected = x @ checkpoint.load_fused([f"{layer}.weight"], [shape], torch.float32, CPU).T

    def made(quantization: Quantization | None) -> Linear:
        options = LoadOptions(ExecutorConfig(quantization=quantization))
        method = make_quantization(options, torch.float32, {"quant_method": "gguf"}).linear
        return method.pack(method.read(checkpoint, spec), None)

    for quantization, limit in ((None, 0.01), ("int4", 0.01 if bits == 4 else 0.1), ("int8", 0.02)):
        linear = made(quantization)
        assert isinstance(linear, Int8Linear if quantization == "int8" else GroupedLinear)
        assert linear.bits == (bits if quantization is None else int(quantization[3:]))
        assert (linear(x) - expected).norm() < limit * expected.norm()


def outputs_of(model: Path, name: str, **settings: object) -> tuple[list[int], list[int]]:
    """What the engine makes, and what transformers makes."""
    facts = load_file(HERE / f"{name}.expected.safetensors")
    prompt, tokens = facts["prompt"].tolist(), facts["tokens"].tolist()
    executor = load_executor(model, **{"dtype": "float32", "kv_cache_memory": 1 << 20, "swap_bytes": 0, **settings})
    made = run(executor, [prompt], [SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)])
    return made.outputs[0], tokens


def test_the_files_that_llama_cpp_quantised_mix_the_types_that_their_names_stand_for() -> None:
    kinds = {name: {key: each.kind for key, each in GgufFile.read(gguf(name)).tensors.items()} for name in MODELS}
    mixed = kinds["llama-q4_k_m"]
    for part in ("attn_v", "ffn_down"):
        assert [mixed[f"blk.{layer}.{part}.weight"] for layer in (0, 1)] == ["Q4_K", "Q6_K"]
    assert mixed["blk.1.attn_q.weight"] == "Q4_K"
    assert mixed["output.weight"] == "Q6_K"
    assert {"Q5_K", "Q6_K"} <= set(kinds["qwen2"].values())
    assert {"Q6_K", "Q8_0"} <= set(kinds["qwen3"].values())


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_transformers(name: str) -> None:
    made, expected = outputs_of(gguf(name), name)
    assert made == expected


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_a_model_make_the_same_tokens(name: str) -> None:
    made, expected = outputs_of(gguf(name), name, tensor_parallel_size=2)
    assert made == expected


def test_a_folder_with_one_file_is_that_file_and_with_two_is_refused(tmp_path: Path) -> None:
    shutil.copy(gguf("llama"), tmp_path)
    made, expected = outputs_of(tmp_path, "llama")
    assert made == expected
    shutil.copy(gguf("qwen2"), tmp_path)
    with pytest.raises(ModelError, match=r"has 2 GGUF files: --model has to name one of them\.$"):
        read_model_config(tmp_path)


def test_files_of_other_contents_have_other_revisions(tmp_path: Path) -> None:
    first = read_model_config(gguf("llama")).model_revision
    assert read_model_config(Path(shutil.copy(gguf("llama"), tmp_path / "same.gguf"))).model_revision == first
    changed = bytearray(gguf("llama").read_bytes())
    changed[-40] ^= 1
    (tmp_path / "other.gguf").write_bytes(changed)
    assert read_model_config(tmp_path / "other.gguf").model_revision != first


def test_the_configuration_is_that_of_the_metadata() -> None:
    llama, qwen3 = read_decoder_config(gguf("llama")), read_decoder_config(gguf("qwen3"))
    assert (llama.head_dim, llama.num_kv_heads, llama.max_length, llama.eos_token_ids) == (16, 2, 128, (1,))
    assert (llama.tie_word_embeddings, qwen3.tie_word_embeddings) == (False, True)
    # The lowest frequency is divided by Llama 3's factor, the highest stays.
    assert llama.rope_frequencies[0] == 1
    assert llama.rope_frequencies[-1] == pytest.approx(10000 ** -(14 / 16) / 8)


def test_the_dtype_is_that_of_the_embedding_or_bfloat16() -> None:
    name = "model.embed_tokens.weight"
    dtypes = [opened(gguf(each)).dtype(name) for each in MODELS]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16]
    assert [GgufFile.read(gguf(each)).tensors["token_embd.weight"].kind for each in ("llama", "qwen3")] == [
        "Q8_0",
        "BF16",
    ]


# Refusals


def refusal(path: Path, contents: bytes) -> str:
    path.write_bytes(contents)
    with pytest.raises(ModelError) as caught:
        read_model_config(path)
    return str(caught.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text("a.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def llama(values: int) -> bytes:
    return header(values=values + 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama")


HUGE = (1 << 64) - 1
MALFORMED = [
    (b"", "is not a GGUF file"),
    (b"GGML" + bytes(40), "is not a GGUF file"),
    (b"GGUF", "ends too early"),
    (header(version=1), "of version 1"),
    (header(version=3 << 24), "of version 50331648"),
    (header(tensors=HUGE), "it asks for 18446744073709551615"),
    (header(values=1 << 20), "it asks for 1048576"),
    (header(values=1), "ends too early"),
    (header(values=1) + struct.pack("<Q", HUGE), "it asks for"),
    (header(values=1) + text("a") + struct.pack("<I", 99), "a value of type 99"),
    (header(values=1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "a value of type 9"),
    (header(values=1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 22), "ends too early"),
    (header(values=1) + text("a") + struct.pack("<IIQ", 9, 8, 3), "ends too early"),
    (header(values=2) + 2 * (text("a") + struct.pack("<IB", 0, 1)), "names a twice"),
    (header(values=1) + text("general.alignment") + struct.pack("<II", 4, 0), "the alignment 0"),
    (header(values=1) + text("general.alignment") + struct.pack("<II", 4, 24), "the alignment 24"),
    (header(tensors=1) + tensor((1,) * 5), "a tensor of 5 dimensions"),
    (header(tensors=1) + tensor(()), "a tensor of 0 dimensions"),
    (header(tensors=1) + tensor((0, 4)), "ends before a.weight does"),
    (header(tensors=1) + tensor((HUGE, HUGE)), "ends before a.weight does"),
    (header(tensors=1) + tensor((4, 4)), "ends before a.weight does"),
    (header(tensors=1) + tensor((4, 4), offset=HUGE), "ends before a.weight does"),
    (header(tensors=1) + tensor((33, 4), kind=8), "rows of 33 numbers in a.weight, which Q8_0 cannot hold"),
    (header(tensors=1) + tensor((256, 4), kind=10), "stores a.weight as type number 10, and read are F32"),
    (header(values=1) + text("general.architecture") + struct.pack("<I", 8) + text("rwkv"), "architecture 'rwkv'"),
    (header(), "architecture None"),
    (llama(1) + text("llama.expert_count") + struct.pack("<II", 4, 8), "a mixture of experts"),
    (llama(1) + text("split.count") + struct.pack("<IH", 2, 3), "a part of a split file"),
    (llama(1) + text("llama.rope.scaling.type") + struct.pack("<I", 8) + text("longrope"), "rope of type 'longrope'"),
    (llama(0), "has no hidden_size"),
]


@pytest.mark.parametrize(("contents", "complaint"), MALFORMED)
def test_a_file_that_is_malformed_is_refused(tmp_path: Path, contents: bytes, complaint: str) -> None:
    said = refusal(tmp_path / "model.gguf", contents)
    assert complaint in said
    assert said.endswith(".")
    assert str(tmp_path / "model.gguf") in said


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_with_wrong_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    contents = bytearray(gguf(data.draw(st.sampled_from(MODELS))).read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        contents[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(contents)), st.integers(0, len(contents))))
    path = tmp_path_factory.mktemp("wrong") / "model.gguf"
    path.write_bytes(contents[:end])
    with suppress(ModelError):
        read_model_config(path)
    with suppress(ModelError):
        opened(path)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(contents: bytes) -> bytes:
        assert contents.count(old) == 1
        return contents.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (replaced(text("llama.attention.head_count"), text("llama.attention.head_counx")), "no num_attention_heads"),
        (replaced(text("blk.0.attn_q.weight"), text("blk.0.attn_x.weight")), "no tensor model.layers.0.self_attn.q"),
        (replaced(text("blk.0.ffn_up.weight"), text("blk.0.ffn_xx.weight")), "no tensor model.layers.0.mlp.up_proj"),
    ],
)
def test_a_file_without_what_the_model_needs_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], complaint: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(gguf("llama").read_bytes()))
    with pytest.raises(ModelError, match=complaint):
        load_executor(path, dtype="float32", kv_cache_memory=1 << 20, swap_bytes=0)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf("llama"), tmp_path))
    checkpoint = opened(path)
    last = max(GgufFile.read(path).tensors.values(), key=lambda tensor: tensor.start)
    path.write_bytes(path.read_bytes()[: last.start - 8])
    name = "rope_freqs.weight"
    assert GgufFile.read(gguf("llama")).tensors[name] == last
    with pytest.raises(ModelError, match="it has become shorter"):
        checkpoint.load_fused([name], [checkpoint.shape(name)], torch.float32, CPU)
