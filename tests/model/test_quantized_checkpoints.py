"""Checkpoints that libraries quantised (``quantized/make.py`` says what each of them did): the layers hold their
numbers, and the engine gives the tokens that transformers gives with the same weights in plain float32.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.config import quantization_of, read_config_json
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.config import ExecutorConfig, Quantization
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, SingleRankCommunicator
from quire_engine.errors import ModelError
from quire_engine.models.loader import load_model, read_model_config
from quire_engine.quantization.base import LayerSpec, LinearMethod
from quire_engine.quantization.int8 import Int8Linear
from quire_engine.quantization.quantized_linear import GroupedLinear
from quire_engine.quantization.schemes import make_quantization
from quire_engine.quantization.stored import PermutedLinear, Stored, StoredWeight, as_groups
from quire_engine.quantization.unquantized import PackedLinear
from quire_proto.sampling import SamplingParams
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.model.engine import load, run
from tests.model.quantized.make import FOLDERS, HERE, SHOWN

PLAIN = LoadOptions(ExecutorConfig(dtype="float32"))
NORM = "model.layers.0.input_layernorm.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj"
FOUR_BITS = ("awq", "gptq", "gptq-asymmetric", "gptq-desc-act", "w4a16", "w4a16-asymmetric", "w4a16-awq")
FORMATS_IN_FLOAT8 = [name for name in FOLDERS if name.startswith("fp8")]


def method_of(folder: Path, quantization: Quantization | None = None) -> LinearMethod[Stored]:
    options = LoadOptions(ExecutorConfig(quantization=quantization))
    return make_quantization(options, torch.float32, quantization_of(folder, read_config_json(folder))).linear


@dataclass
class Rank(SingleRankCommunicator):
    """One of several ranks, while it reads its shard: nothing is sent."""

    rank: int
    size: int


def spec(folder: Path, *names: str, dim: int = 0, communicator: Communicator = SINGLE_RANK) -> LayerSpec:
    outputs = [64 if name == Q_PROJ else 32 for name in names]
    return LayerSpec(names, outputs, 64, dim, communicator)


def read(folder: Path, *names: str) -> StoredWeight:
    weight = method_of(folder).read(Checkpoint(folder), spec(folder, *names))
    assert isinstance(weight, StoredWeight)
    return weight


@pytest.mark.parametrize("name", FOLDERS)
def test_a_layer_has_the_numbers_that_its_publisher_makes_of_it(name: str) -> None:
    expected = load_file(HERE / name / "expected.safetensors")[SHOWN]
    weight = read(HERE / name, SHOWN).dequantize(torch.float32)
    # GPTQModel multiplies in float16.
    assert torch.equal(weight.half().float() if "gptq" in name else weight, expected)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tokens_are_those_of_transformers_with_plain_weights(name: str) -> None:
    facts = load_file(HERE / name / "expected.safetensors")
    tokens = facts["tokens"].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
    made = run(load(HERE / name, 64, 0), [facts["prompt"].tolist()], [params])
    assert made.outputs == [tokens]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_shards_of_four_ranks_are_the_layer(name: str, dim: int) -> None:
    folder, whole = HERE / name, read(HERE / name, Q_PROJ).dequantize(torch.float32)
    parts = []
    for rank in range(4):
        part = method_of(folder).read(Checkpoint(folder), spec(folder, Q_PROJ, dim=dim, communicator=Rank(rank, 4)))
        assert isinstance(part, StoredWeight)
        parts.append(part.dequantize(torch.float32))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("name", FOLDERS)
def test_fused_layers_have_the_rows_of_each(name: str) -> None:
    folder, names = HERE / name, (Q_PROJ, SHOWN)
    fused = method_of(folder).read(Checkpoint(folder), spec(folder, *names))
    rows = fused.dequantize(torch.float32) if isinstance(fused, StoredWeight) else fused
    assert torch.equal(rows, torch.cat([read(folder, each).dequantize(torch.float32) for each in names]))


def test_the_kept_folders_have_what_they_are_named_for() -> None:
    assert read(HERE / "gptq-desc-act", SHOWN).group_index is not None
    assert read(HERE / "gptq", SHOWN).group_index is None
    for name, several in (("gptq", False), ("gptq-asymmetric", True), ("w4a16", False), ("w4a16-asymmetric", True)):
        zeros = read(HERE / name, SHOWN).zeros
        assert zeros is not None
        assert (len(zeros.unique()) > 1) == several
    norms = [load_file(HERE / name / "model.safetensors")[NORM] for name in ("w4a16-asymmetric", "w4a16-awq")]
    assert [len(norm.unique()) > 1 for norm in norms] == [False, True], "the scales that were searched divide the norm"


@pytest.mark.parametrize(
    ("name", "quantization"), [("w8a8", None), ("w8a16", None), *((name, "int8") for name in FORMATS_IN_FLOAT8)]
)
def test_layers_are_held_in_eight_bits_where_they_are_stored_so_or_that_is_asked_for(
    name: str, quantization: Quantization | None
) -> None:
    weight, x = read(HERE / name, SHOWN), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    layer = method_of(HERE / name, quantization).pack(weight, None)
    assert isinstance(layer, Int8Linear)
    expected = x @ weight.dequantize(torch.float32).T
    # What is stored in eight bits is rounded no more; activations are.
    assert (layer(x) - expected).norm() < (0.015 if quantization else 0.01) * expected.norm()


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_layers_that_are_stored_in_four_bits_stay_so(name: str, quantization: Quantization | None) -> None:
    weight, x = read(HERE / name, Q_PROJ), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    layer = method_of(HERE / name, quantization).pack(weight, None)
    assert isinstance(layer, PermutedLinear if name == "gptq-desc-act" else GroupedLinear)
    expected = x @ weight.dequantize(torch.float32).T
    assert (layer(x) - expected).norm() < 0.01 * expected.norm()
    gate, up = layer(x).chunk(2, dim=1)
    torch.testing.assert_close(layer.forward_silu_mul(x), F.silu(gate) * up, atol=1e-4, rtol=1e-4)


def test_eight_bits_by_group_stay_so() -> None:
    weight, x = read(HERE / "gptq-8-bits", SHOWN), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    layer = method_of(HERE / "gptq-8-bits").pack(weight, None)
    assert isinstance(layer, GroupedLinear)
    assert layer.bits == 8
    expected = x @ weight.dequantize(torch.float32).T
    assert (layer(x) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", FORMATS_IN_FLOAT8)
def test_other_layers_are_held_in_plain_numbers(name: str) -> None:
    weight = read(HERE / name, SHOWN)
    assert isinstance(method_of(HERE / name).pack(weight, None), PackedLinear)


@pytest.mark.parametrize(("name", "quantization"), [("fp8", "int4"), ("fp8-tensor", "int4")])
def test_float8_is_rounded_to_four_bits_where_that_is_asked_for(name: str, quantization: Quantization) -> None:
    assert isinstance(method_of(HERE / name, quantization).pack(read(HERE / name, SHOWN), None), GroupedLinear)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 20),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([8, 16, 32, 48, 64, 96, 128, 256, 384]),
    bits=st.sampled_from([4, 8]),
    signed=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_whole_numbers_are_the_same_in_the_kernels_groups(
    outputs: int, groups: int, group_size: int, bits: int, signed: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    size = (outputs, groups * group_size)
    values = torch.randint(0, 1 << bits, size, generator=random, dtype=torch.uint8)
    scales, zeros = torch.rand(2, outputs, groups, generator=random)
    if bits == 8:
        values, zeros = (values.view(torch.int8), None) if signed else (values, torch.full_like(scales, 128))
    else:
        zeros *= 15
    whole = StoredWeight(values, scales, zeros, bits, group_size)
    made = as_groups(whole)
    assert (made is not None) == (groups == 1 or group_size % (32 if bits == 4 else 16) == 0)
    assert made is None or torch.equal(made.dequantize(), whole.dequantize(torch.float32))


def test_eight_bits_with_other_zeros_are_held_in_plain_numbers() -> None:
    values, scales = torch.full((3, 32), 7, dtype=torch.uint8), torch.ones(3, 1)
    assert as_groups(StoredWeight(values, scales, torch.full((3, 1), 127.0), 8, 32)) is None


@pytest.mark.parametrize(("quantization", "held"), [(None, PackedLinear), ("int8", Int8Linear)])
def test_the_head_is_held_as_the_flag_says(quantization: Quantization | None, held: type) -> None:
    folder, options = HERE / "fp8", LoadOptions(ExecutorConfig(quantization=quantization))
    head = make_quantization(options, torch.float32, quantization_of(folder, read_config_json(folder))).head
    table = head.read(Checkpoint(folder), LayerSpec(["lm_head"], [64], 64))
    assert isinstance(head.pack(table, None), held)
    assert isinstance(head.pack_tied(table)[1], held)


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16"])
def test_another_quantization_than_the_checkpoints_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"quantised already, in 4 bits, which --quantization int8 is not\.$"):
        read_model_config(HERE / name, ExecutorConfig(quantization="int8"))


def edited(target: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a kept folder whose tensors ``change`` has changed."""
    folder = Path(shutil.copytree(HERE / name, target / name))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    key = f"{SHOWN}.{name}"
    return lambda tensors: tensors.update({key: make(tensors[key]).contiguous()})


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("awq", replaced("qweight", lambda words: words[:, 1:]), "asks for"),
        ("awq", replaced("qweight", lambda words: words.float()), "as F32, and it must be I32"),
        ("awq", replaced("scales", lambda scales: scales[:, 1:]), "asks for"),
        ("awq", replaced("scales", lambda scales: scales[:0]), "scales for 0 groups"),
        ("awq", replaced("qzeros", lambda zeros: zeros[1:]), "asks for"),
        ("awq", lambda tensors: tensors.pop(f"{SHOWN}.qzeros"), "has no tensor"),
        ("gptq", replaced("qweight", lambda words: words[1:]), "7 words"),
        ("gptq", replaced("g_idx", lambda index: index + 1), "names groups that have no scales"),
        ("gptq", replaced("g_idx", lambda index: index - 1), "names groups that have no scales"),
        ("gptq", replaced("scales", lambda scales: scales[:1]), "asks for"),
        ("w4a16", replaced("weight_packed", lambda words: words[:, 1:]), "7 words"),
        ("w4a16", replaced("weight_scale", lambda scales: scales[1:]), "does not divide"),
        ("w4a16", replaced("weight_scale", lambda scales: scales[:, :0]), "does not divide"),
        ("w4a16-asymmetric", replaced("weight_zero_point", lambda zeros: zeros[1:]), "asks for"),
        ("w8a8", replaced("weight", lambda values: values.float()), "as F32, and it must be"),
        ("w8a8", replaced("weight_scale", lambda scales: scales[1:]), "does not divide"),
        ("fp8", replaced("weight_scale_inv", lambda scales: torch.cat((scales, scales))), "does not divide"),
        ("fp8", lambda tensors: tensors.pop(f"{SHOWN}.weight_scale_inv"), "F8_E4M3, which is not supported"),
    ],
)
def test_layers_that_are_not_whole_are_refused(
    tmp_path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object], complaint: str
) -> None:
    folder = edited(tmp_path, name, change)
    with pytest.raises(ModelError, match=complaint) as caught:
        load_model(read_model_config(folder), folder, PLAIN)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "nvfp4-pack-quantized"}, "the compressed-tensors format 'nvfp4-pack-quantized', and read are"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "have a sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "have a transform_config"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}, "have 3 bits"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": "8"}}}}, "size '8'"),
        ({"config_groups": ["Linear"]}, "not an object of objects"),
    ],
)
def test_compressed_tensors_of_other_kinds_are_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    shutil.copy(HERE / "w4a16" / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=complaint):
        read_model_config(tmp_path)
