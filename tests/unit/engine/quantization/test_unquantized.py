"""Linear layers with a packed weight: the same product, the same bits for a row in any company, one copy of the weight,
and a way out.
"""

import ctypes
import platform
import shutil
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.kernels import bindings
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_linear import PackedWeight
from quire_engine.quantization import unquantized
from quire_engine.quantization.schemes import make_linear
from quire_engine.quantization.unquantized import PackedLinear
from torch.nn import functional as F

from tests.support.processors import on_threads

OWN = [torch.float32, torch.bfloat16]
# Of the processors that there may be: what this one has, without its widest vectors, and the least.
BUILDS = ["native", "x86-64-v3", "x86-64"]
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", params=BUILDS)
def build(request, tmp_path_factory) -> ctypes.CDLL:
    """The kernels, compiled for a processor."""
    compiler = shutil.which("c++")
    native = bindings.library()
    if native is None or compiler is None:
        pytest.skip("the kernels cannot be compiled here")
    if request.param == "native":
        return native
    if platform.machine() != "x86_64":
        pytest.skip("not for this processor")
    source = Path(bindings.__file__).parent / "linear.cpp"
    output = tmp_path_factory.mktemp(request.param) / "linear.so"
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", f"-march={request.param}"]
    subprocess.run([compiler, *flags, source, "-o", output], check=True, capture_output=True, timeout=120)
    loaded = ctypes.CDLL(str(output))
    for name in ("quire_linear", "quire_linear_pack", "quire_linear_describe"):
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = bindings._SIGNATURES[name], None
    return loaded


def draw(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_layer(outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool):
    return draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype, seed=2) if has_bias else None


def draw_rows(rows: int, inputs: int, dtype: torch.dtype, gap: float = torch.nan) -> torch.Tensor:
    """Rows with gaps between them, in which nothing may be read."""
    wide = draw(rows, inputs + 3, dtype=dtype, seed=1)
    wide[:, 0] = wide[:, -2:] = gap
    return wide[:, 1:-2]


def assert_is_the_product(result, x, weight, bias) -> None:
    """One rounding of a sum in fp32, whose own error is small beside the sum of what is added."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    added = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    limit = ROUNDING[x.dtype] * expected.abs() * 1.01 + 1e-6 * added
    assert result.dtype == x.dtype
    assert result.shape == expected.shape
    assert bool(((result.double() - expected).abs() <= limit).all())


shapes = {
    "dtype": st.sampled_from(OWN),
    "rows": st.integers(0, 80),
    "inputs": st.integers(1, 200),
    "outputs": st.integers(1, 200),
    "has_bias": st.booleans(),
}
DEEP = {"dtype": torch.bfloat16, "rows": 31, "inputs": 4101, "outputs": 64, "has_bias": True}
TALL = {"dtype": torch.float32, "rows": 500, "inputs": 36, "outputs": 96, "has_bias": False}
LARGE = {"dtype": torch.bfloat16, "rows": 3, "inputs": 1000, "outputs": 1100, "has_bias": True}  # more than a huge page


@settings(max_examples=30, deadline=None)
@given(**shapes)
@example(**DEEP)
@example(**TALL)
@example(**LARGE)
def test_the_kernel_rounds_an_exact_product_once(build, dtype, rows, inputs, outputs, has_bias):
    weight, bias = draw_layer(outputs, inputs, dtype, has_bias)
    x = draw_rows(rows, inputs, dtype)
    assert_is_the_product(PackedWeight(build, weight, bias).matmul(x), x, weight, bias)


@settings(max_examples=25, deadline=None)
@given(**shapes, threads=st.integers(1, 3), data=st.data())
@example(**DEEP, threads=2, data=None)
@example(**TALL, threads=3, data=None)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(build, dtype, rows, inputs, outputs, has_bias, threads, data):
    layer = PackedWeight(build, *draw_layer(outputs, inputs, dtype, has_bias))
    x = draw_rows(rows, inputs, dtype)
    first, last = (0, rows) if data is None else sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2)))
    with on_threads(1):
        alone = [layer.matmul(row.clone()) for row in x.split(1)] if rows else []
    with on_threads(threads):
        together = layer.matmul(x[first:last])
    assert all(torch.equal(row, one[0]) for row, one in zip(together, alone[first:last], strict=True))


@settings(max_examples=25, deadline=None)
@given(**shapes | {"outputs": st.integers(1, 70).map(lambda half: 2 * half)})
@example(**DEEP)
@example(**TALL)
def test_gate_and_up_meet_as_they_would_one_operation_after_the_other(build, dtype, rows, inputs, outputs, has_bias):
    weight, bias = draw_layer(outputs, inputs, dtype, has_bias)
    layer = PackedWeight(build, weight, bias)
    x = draw_rows(rows, inputs, dtype)
    together, apart = layer.matmul_silu_mul(x), silu_mul(layer.matmul(x))
    if build is bindings.library():
        assert torch.equal(together, apart)
    torch.testing.assert_close(together, apart, rtol=32 * ROUNDING[dtype], atol=1e-30)


def test_a_packed_weight_takes_no_more_memory_than_the_plain_one(build):
    for dtype in OWN:
        weight = draw(96, 50, dtype=dtype)
        assert PackedWeight(build, weight, None).nbytes == weight.nbytes


def test_numbers_that_are_not_finite_stay_in_their_row_and_output(build):
    weight, x = draw(40, 33, dtype=torch.bfloat16), draw(20, 33, dtype=torch.bfloat16)
    weight[7, 32], x[11, 3] = torch.inf, torch.nan
    finite = PackedWeight(build, weight, None).matmul(x).isfinite()
    expected = torch.ones(20, 40, dtype=torch.bool)
    expected[:, 7] = expected[11] = False
    assert torch.equal(finite, expected)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(2, 9), id="too wide"),
        pytest.param(torch.ones(2, 7), id="too narrow"),
        pytest.param(torch.ones(8), id="a vector"),
        pytest.param(torch.ones(2, 8, dtype=torch.bfloat16), id="of another dtype"),
        pytest.param(torch.ones(2, 8, device="meta"), id="elsewhere"),
    ],
)
def test_the_kernel_reads_only_what_fits_its_weight(build, x):
    layer = PackedWeight(build, torch.ones(4, 8), None)
    with pytest.raises(ValueError, match=r"\[T, 8\]"):
        layer.matmul(x)


WAYS = ["own kernel", "oneDNN", "plain", "row by row"]


def go(way: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Takes away what would be better than ``way``. Whether layers are to be deterministic then."""
    if way != "own kernel":
        monkeypatch.setattr(unquantized, "pack_weight", lambda *_: None)
    if way == "plain":
        monkeypatch.setattr(unquantized, "_onednn_packed_matmul", lambda *_: None)
    return way == "row by row"


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(**shapes | {"dtype": st.sampled_from(list(ROUNDING))})
def test_each_way_gives_the_product_of_the_plain_layer(way, dtype, rows, inputs, outputs, has_bias):
    with pytest.MonkeyPatch.context() as monkeypatch:
        deterministic = go(way, monkeypatch)
        weight, bias = draw_layer(outputs, inputs, dtype, has_bias)
        layer = PackedLinear(weight, bias, deterministic=deterministic)
        # oneDNN multiplies what is behind an odd row by 0 where the processor has AMX.
        x = draw_rows(rows, inputs, dtype, gap=1.0 if way == "plain" else torch.nan)
        limit = 1e-2 * F.linear(x.float().abs(), weight.float().abs()).amax().item() if rows else 0
        assert (layer.in_features, layer.out_features) == (inputs, outputs)
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
        torch.testing.assert_close(layer(x), expected, atol=max(limit, 1e-2), rtol=1e-2)
        if outputs % 2 == 0:
            assert torch.equal(layer.forward_silu_mul(x), silu_mul(layer(x)))


@pytest.mark.parametrize("way", ["own kernel", "row by row"])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_deterministic_layer_gives_a_row_the_same_bits_in_any_batch(way, dtype, monkeypatch):
    go(way, monkeypatch)
    layer = make_linear(*draw_layer(144, 576, dtype, True), LoadOptions(ExecutorConfig(deterministic=True)))
    x = draw(65, 576, dtype=dtype, seed=1)
    alone = [layer(row)[0] for row in x.split(1)]
    for rows in (1, 2, 7, 33, 65):
        with on_threads(1 + rows % 3):
            assert all(torch.equal(row, one) for row, one in zip(layer(x[:rows]), alone, strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_weight_is_freed_once_it_is_packed(dtype):
    weight = draw(64, 32, dtype=dtype)
    storage = weakref.ref(weight.untyped_storage())
    layer = PackedLinear(weight)
    if not layer.is_packed:
        pytest.skip("this torch cannot pack weights")
    expected = layer(torch.ones(1, 32, dtype=dtype))
    gone = weakref.ref(weight)
    del weight
    assert gone() is None
    assert storage() is None
    assert torch.equal(layer(torch.ones(1, 32, dtype=dtype)), expected)


def test_a_packed_layer_no_longer_follows_the_weight_it_was_made_from():
    weight = draw(8, 8, dtype=torch.float32)
    layer = PackedLinear(weight)
    before = layer(torch.ones(1, 8))
    weight.zero_()
    assert torch.equal(layer(torch.ones(1, 8)), before) == layer.is_packed


class _Operators:
    """Stands where torch's operators are, with packing that goes wrong in one way."""

    def __init__(self, reorder, product):
        self.mkldnn = self
        self._reorder_linear_weight, self._linear_pointwise = reorder, product


def _refuse(*_):
    raise RuntimeError("not on this processor")


@pytest.mark.parametrize(
    "operators",
    [
        pytest.param(object(), id="missing"),
        pytest.param(_Operators(_refuse, _refuse), id="failing at packing"),
        pytest.param(_Operators(lambda w, _: w, _refuse), id="failing at the product"),
        pytest.param(_Operators(lambda w, _: w, lambda x, w, b, *_: F.linear(x, w, b) * 1.01), id="wrong"),
        pytest.param(_Operators(lambda w, _: w, lambda x, w, b, *_: F.linear(x, w, b) * torch.nan), id="NaN"),
        pytest.param(_Operators(lambda w, _: w, F.relu), id="of another signature"),
    ],
)
def test_packing_that_cannot_be_trusted_is_done_without(monkeypatch, operators):
    monkeypatch.setattr(unquantized, "is_fast", lambda _: False)
    monkeypatch.setattr(unquantized.torch, "ops", operators)
    weight, bias, x = draw(16, 24, dtype=torch.float32), draw(16, dtype=torch.float32), draw(3, 24, dtype=torch.float32)
    layer = PackedLinear(weight, bias)
    assert not layer.is_packed
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_a_weight_off_the_cpu_is_left_plain():
    weight = torch.empty(4, 8, device="meta")
    layer = PackedLinear(weight)
    assert not layer.is_packed
    assert layer(torch.empty(3, 8, device="meta")).shape == (3, 4)
