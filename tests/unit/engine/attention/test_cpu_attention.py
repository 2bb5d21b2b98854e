"""Paged attention on the CPU: the kernel and its torch form against the formula, and how the kernel is built."""

import ctypes
import functools
import logging
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.attention import cpu
from quire_engine.attention.base import AttentionBatch, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_rows import decode_rows, encode_rows, row_size
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.kernels import bindings as kernels
from quire_engine.kernels import build
from quire_engine.kernels import ops as fused
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

KERNEL_IS_THERE = kernels.library() is not None
needs_kernel = pytest.mark.skipif(not KERNEL_IS_THERE, reason="the kernels cannot be compiled here")
FORMS = [pytest.param(True, id="kernel", marks=needs_kernel), pytest.param(False, id="torch")]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass
class Sequence:
    """A sequence of which the last ``tokens`` are computed now; the tokens before them are in its pages already."""

    query: torch.Tensor  # [tokens, heads, head_dim]
    keys: torch.Tensor  # [context, kv_heads, head_dim]
    values: torch.Tensor

    @property
    def tokens(self) -> int:
        return len(self.query)

    @property
    def context(self) -> int:
        return len(self.keys)


@dataclass
class Case:
    """A step: its sequences in order, the batch's plan, and KV memory in which everything unused is NaN, or in int8
    rows of -1 whose scale is NaN.
    """

    shape: AttentionShape
    sequences: list[Sequence]
    batch: AttentionBatch
    kv: torch.Tensor
    window: int | None = None
    sinks: torch.Tensor | None = None

    def run(self, backend) -> torch.Tensor:
        backend.prepare(self.batch)
        query = torch.cat([s.query for s in self.sequences])
        key, value = (
            torch.cat([getattr(s, n)[s.context - s.tokens :] for s in self.sequences]) for n in ("keys", "values")
        )
        return backend.forward(query, key, value, self.kv[:, 1], self.window, sinks=self.sinks)

    def expected(self) -> torch.Tensor:
        stored = [self._as_stored(sequence) for sequence in self.sequences]
        return torch.cat([by_the_formula(one, self.shape, self.window, self.sinks) for one in stored])

    def _as_stored(self, sequence: Sequence) -> Sequence:
        keys, values = (
            decode_rows(encode_rows(rows, self.kv.dtype), self.shape.head_dim)
            for rows in (sequence.keys, sequence.values)
        )
        return Sequence(sequence.query, keys, values)


def by_the_formula(
    sequence: Sequence, shape: AttentionShape, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax attention, one token and one head at a time, in float64."""
    rows = []
    past = sequence.context - sequence.tokens
    for i, token in enumerate(sequence.query.double()):
        last = past + i
        first = 0 if window is None else max(0, last + 1 - window)
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            keys = sequence.keys[first : last + 1, kv_head].double()
            scores = keys @ token[head] * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = torch.softmax(scores, 0)[: len(keys)]
            rows.append(weights @ sequence.values[first : last + 1, kv_head].double())
    return torch.stack(rows).view(sequence.tokens, shape.num_heads, shape.head_dim)


def random_sequence(shape: AttentionShape, tokens: int, context: int, dtype: torch.dtype, seed: int) -> Sequence:
    noise = torch.Generator().manual_seed(seed)

    def rows(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, shape.head_dim, generator=noise).to(dtype)

    return Sequence(rows(tokens, shape.num_heads), *(rows(context, shape.num_kv_heads) for _ in range(2)))


def place(
    shape: AttentionShape,
    sequences: list[Sequence],
    seed: int,
    window: int | None = None,
    *,
    int8: bool = False,
    sinks: torch.Tensor | None = None,
) -> Case:
    """Lays sequences out on random pages of a KV tensor with three layers; the layer in the middle is used."""
    dtype = torch.int8 if int8 else sequences[0].keys.dtype
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-s.context // shape.block_size) for s in sequences]
    ids = torch.randperm(sum(counts) + 3, generator=noise)[: sum(counts)]
    size = (sum(counts) + 3, 3, 2, shape.num_kv_heads, shape.block_size, row_size(shape.head_dim, dtype))
    kv = torch.full(size, -1 if int8 else torch.nan, dtype=dtype)
    for sequence, pages in zip(sequences, ids.split(counts), strict=True):
        for position in range(sequence.context - sequence.tokens):
            slot = kv[pages[position // shape.block_size], 1, :, :, position % shape.block_size]
            slot[0], slot[1] = (encode_rows(rows[position], dtype) for rows in (sequence.keys, sequence.values))
    return Case(shape, sequences, plan_of(shape, sequences, ids), kv, window, sinks)


def plan_of(shape: AttentionShape, sequences: list[Sequence], ids: torch.Tensor) -> AttentionBatch:
    contexts = torch.tensor([s.context for s in sequences])
    counts = (contexts + shape.block_size - 1) // shape.block_size
    return AttentionBatch(
        query_indptr=torch.tensor([0, *(s.tokens for s in sequences)]).cumsum(0).int(),
        page_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        page_ids=ids.int(),
        last_page_len=((contexts - 1) % shape.block_size + 1).int(),
        context_lens=contexts.int(),
        positions=torch.cat([torch.arange(s.context - s.tokens, s.context) for s in sequences]).int(),
    )


def shape_of(
    group: int, kv_heads: int, head_dim: int, block_size: int, soft_cap: float | None = None
) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, head_dim, block_size, head_dim**-0.5, soft_cap)


def sinks_of(shape: AttentionShape, size: float) -> torch.Tensor:
    """Sinks of all heads, some of them larger than any score, and some smaller."""
    return torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(1)) * size


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.builds(
    shape_of,
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([32, 64, 80, 128]),
    block_size=st.sampled_from([1, 5, 16, 32]),
    soft_cap=st.sampled_from([None, None, 0.7, 30.0]),
)
SINKS = st.sampled_from([0.0, 2.0, 40.0])
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4)
WINDOWS = st.none() | st.integers(1, 100)


@st.composite
def cases(draw: st.DrawFn, shapes: st.SearchStrategy[AttentionShape] = SHAPES, dtypes=DTYPES) -> Case:
    shape, dtype, seed = draw(shapes), draw(dtypes), draw(st.integers(0, 2**32))
    sequences = [
        random_sequence(shape, tokens, past + tokens, dtype, seed + i) for i, (tokens, past) in enumerate(draw(LENGTHS))
    ]
    size = draw(SINKS)
    sinks = sinks_of(shape, size) if size else None
    return place(shape, sequences, seed, draw(WINDOWS), int8=draw(st.booleans()), sinks=sinks)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("use_kernel", FORMS)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_any_ragged_batch_equals_the_reference(use_kernel, case):
    assert_close(case.run(CpuAttention(case.shape, use_kernel=use_kernel)), case.expected())


@pytest.mark.parametrize("use_kernel", FORMS)
@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_the_backends_agree_and_store_the_same(use_kernel, case):
    other = Case(case.shape, case.sequences, case.batch, case.kv.clone(), case.window, case.sinks)
    assert_close(case.run(CpuAttention(case.shape, use_kernel=use_kernel)), other.run(ReferenceAttention(case.shape)))
    assert torch.equal(case.kv.nan_to_num(7.0), other.kv.nan_to_num(7.0))


@pytest.mark.parametrize("use_kernel", FORMS)
@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_only_the_slots_of_the_steps_tokens_are_written(use_kernel, case):
    before = case.kv.clone()
    case.run(CpuAttention(case.shape, use_kernel=use_kernel))
    written = ~((case.kv == before) | (case.kv.isnan() & before.isnan()))
    tokens = sum(s.tokens for s in case.sequences)
    assert written.any(-1).sum() == tokens * 2 * case.shape.num_kv_heads


@pytest.mark.parametrize("use_kernel", FORMS)
@settings(max_examples=15, deadline=None)
@given(case=cases(), at=st.integers(0, 3))
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(use_kernel, case, at):
    needle = case.sequences[at % len(case.sequences)]
    backend = CpuAttention(case.shape, use_kernel=use_kernel)
    together = case.run(backend)
    start = int(case.batch.query_indptr[at % len(case.sequences)])
    int8 = case.kv.dtype == torch.int8
    alone = place(case.shape, [needle], seed=5, window=case.window, int8=int8, sinks=case.sinks).run(backend)
    assert torch.equal(together[start : start + needle.tokens], alone)


@needs_kernel
@settings(max_examples=15, deadline=None)
@given(
    shape=SHAPES,
    dtype=DTYPES,
    context=st.integers(2, 300),
    cut=st.integers(1, 299),
    window=WINDOWS,
    int8=st.booleans(),
    sink=SINKS,
)
def test_the_kernel_gives_the_same_bits_however_a_prompt_is_chunked(shape, dtype, context, cut, window, int8, sink):
    whole = random_sequence(shape, context, context, dtype, seed=context)
    options = {"window": window, "int8": int8, "sinks": sinks_of(shape, sink) if sink else None}
    first = place(shape, [whole], seed=1, **options)
    backend = CpuAttention(shape, use_kernel=True)
    expected = first.run(backend)
    cut = min(cut, context - 1)
    rest = Sequence(whole.query[cut:], whole.keys, whole.values)
    assert torch.equal(place(shape, [rest], seed=2, **options).run(backend), expected[cut:])


@needs_kernel
@settings(max_examples=30, deadline=None)
@given(
    shape=SHAPES,
    dtype=DTYPES,
    tokens=st.integers(1, 8),
    past=st.integers(16, 300),
    window=WINDOWS,
    int8=st.booleans(),
    sink=SINKS,
)
def test_a_decode_gets_the_same_bits_as_the_rows_of_a_prefill(shape, dtype, tokens, past, window, int8, sink):
    """Few rows take another way through the kernel than many."""
    whole = random_sequence(shape, past + tokens, past + tokens, dtype, seed=past)
    backend = CpuAttention(shape, use_kernel=True)
    options = {"window": window, "int8": int8, "sinks": sinks_of(shape, sink) if sink else None}
    expected = place(shape, [whole], seed=1, **options).run(backend)[past:]
    few = Sequence(whole.query[past:], whole.keys, whole.values)
    other = random_sequence(shape, 1, 70, dtype, seed=past + 1)
    made = place(shape, [other, few, other], seed=2, **options).run(backend)
    assert torch.equal(made[1 : 1 + tokens], expected)


@needs_kernel
def test_the_kernel_gives_the_same_bits_on_any_number_of_threads():
    shape = shape_of(group=3, kv_heads=3, head_dim=64, block_size=16)
    sequences = [random_sequence(shape, n, n + 40, torch.bfloat16, n) for n in (1, 200, 7, 1)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(place(shape, sequences, seed=count).run(CpuAttention(shape, use_kernel=True)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("use_kernel", FORMS)
def test_queries_keys_and_values_may_be_parts_of_one_projection(use_kernel):
    shape = shape_of(group=4, kv_heads=2, head_dim=64, block_size=16)
    sequences = [random_sequence(shape, 5, 25, torch.float32, 1), random_sequence(shape, 1, 70, torch.float32, 2)]
    case = place(shape, sequences, seed=3)
    expected = case.expected()
    projected = torch.cat(
        [
            torch.cat([s.query, s.keys[s.context - s.tokens :], s.values[s.context - s.tokens :]], dim=1)
            for s in sequences
        ]
    )
    query, key, value = projected.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    backend = CpuAttention(shape, use_kernel=use_kernel)
    backend.prepare(case.batch)
    assert_close(backend.forward(query, key, value, case.kv[:, 1], None), expected)


@pytest.mark.parametrize("use_kernel", FORMS)
def test_very_large_scores_neither_overflow_nor_vanish(use_kernel):
    shape = shape_of(group=2, kv_heads=1, head_dim=64, block_size=16)
    sequence = random_sequence(shape, 20, 90, torch.float32, 4)
    sequence.query *= 300
    case = place(shape, [sequence], seed=6)
    out = case.run(CpuAttention(shape, use_kernel=use_kernel))
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-3, rtol=2e-3)  # scores in the thousands


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("use_kernel", FORMS)
def test_a_sequence_with_non_finite_values_does_not_change_its_neighbours(use_kernel, int8):
    shape = shape_of(group=2, kv_heads=2, head_dim=64, block_size=16)
    broken, sound = (random_sequence(shape, 3, 40, torch.bfloat16, seed) for seed in (1, 2))
    broken.keys[:], broken.values[:], broken.query[:] = torch.nan, torch.inf, torch.nan
    case = place(shape, [broken, sound, broken], seed=7, int8=int8)
    out = case.run(CpuAttention(shape, use_kernel=use_kernel))
    assert_close(out[3:6], place(shape, [sound], seed=8, int8=int8).expected())
    assert out[:3].isnan().all()
    assert out[6:].isnan().all()


@pytest.fixture(scope="module")
def least_build(tmp_path_factory) -> ctypes.CDLL:
    """The kernel for a processor with no more than all of x86-64 have."""
    compiler = shutil.which("c++")
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("cannot be compiled here")
    source, output = Path(build.__file__).parent / "attention.cpp", tmp_path_factory.mktemp("build") / "attention.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-march=x86-64"]
    subprocess.run([compiler, *flags, source, "-o", output], check=True, capture_output=True, timeout=120)
    loaded = ctypes.CDLL(str(output))
    loaded.quire_attention.argtypes = kernels._SIGNATURES["quire_attention"]
    loaded.quire_attention.restype = None
    return loaded


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_the_baseline_build_equals_the_reference(least_build, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "library", lambda: least_build)
        assert_close(case.run(CpuAttention(case.shape)), case.expected())


@needs_kernel
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7F800001])
@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("native", [True, False])
def test_no_nan_becomes_a_number(least_build, monkeypatch, native, tokens, bits):
    if not native:
        monkeypatch.setattr(cpu, "library", lambda: least_build)
    shape = shape_of(group=2, kv_heads=1, head_dim=32, block_size=16)
    broken = random_sequence(shape, tokens, tokens + 20, torch.float32, 1)
    broken.keys.view(torch.int32)[-1, 0, 3] = bits
    assert place(shape, [broken], seed=2).run(CpuAttention(shape))[-1].isnan().all()


@pytest.mark.parametrize(("head_dim", "dtype"), [(33, torch.bfloat16), (64, torch.float16)])
def test_unsupported_shapes_fall_back_to_torch(head_dim, dtype):
    shape = shape_of(group=2, kv_heads=2, head_dim=head_dim, block_size=16)
    case = place(shape, [random_sequence(shape, 4, 30, dtype, 1)], seed=8)
    torch.testing.assert_close(case.run(CpuAttention(shape)).double(), case.expected(), atol=3e-2, rtol=3e-2)


def test_an_odd_head_size_is_no_trouble_in_fp32():
    shape = shape_of(group=3, kv_heads=2, head_dim=33, block_size=16)
    case = place(shape, [random_sequence(shape, 4, 100, torch.float32, 1)], seed=8)
    assert_close(case.run(CpuAttention(shape)), case.expected())


def test_a_step_without_tokens_is_no_trouble():
    shape = shape_of(group=2, kv_heads=2, head_dim=64, block_size=16)
    empty = torch.zeros(0, dtype=torch.int32)
    nothing = torch.zeros(1, dtype=torch.int32)
    backend = CpuAttention(shape)
    backend.prepare(AttentionBatch(nothing, nothing, empty, empty, empty, empty))
    rows = torch.zeros(0, 2, 64)
    assert backend.forward(torch.zeros(0, 4, 64), rows, rows, torch.zeros(1, 2, 2, 16, 64), None).shape == (0, 4, 64)


def sound_case() -> Case:
    shape = shape_of(group=2, kv_heads=2, head_dim=64, block_size=16)
    return place(shape, [random_sequence(shape, 4, 30, torch.float32, i) for i in range(2)], seed=9)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("query_indptr", torch.tensor([0, 4, 8]), "int32"),
        ("query_indptr", torch.tensor([0, 40, 44], dtype=torch.int32), "shorter than its chunk"),
        ("query_indptr", torch.tensor([0, 4], dtype=torch.int32), "indptr"),
        ("query_indptr", torch.tensor([0, 5, 4], dtype=torch.int32), "falls"),
        ("query_indptr", torch.tensor([-1, 4, 8], dtype=torch.int32), "from 0"),
        ("page_indptr", torch.tensor([0, 2, 9], dtype=torch.int32), "page_ids is shorter"),
        ("page_indptr", torch.tensor([0, 1, 4], dtype=torch.int32), "longer than its pages"),
        ("context_lens", torch.tensor([33, 30], dtype=torch.int32), "longer than its pages"),
        ("page_ids", torch.tensor([1, -1, 2, 3], dtype=torch.int32), "negative"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(field, value, complaint):
    case = sound_case()
    setattr(case.batch, field, value)
    backend = CpuAttention(case.shape)
    with pytest.raises(ValueError, match=complaint):
        backend.prepare(case.batch)
    with pytest.raises(ValueError, match="prepare comes before forward"):
        backend.forward(*(torch.zeros(0),) * 4, None)


MISFITS = [
    (lambda q, k, v, kv: (q[:-1], k, v, kv), "query has another shape"),
    (lambda q, k, v, kv: (q, k[:, :1], v, kv), "key or value has another shape"),
    (lambda q, k, v, kv: (q, k, v[:-1], kv), "key or value has another shape"),
    (lambda q, k, v, kv: (q, k, v, kv[:2]), "has no page"),
    (lambda q, k, v, kv: (q, k, v, kv[..., :32]), "kv has another shape"),
    (lambda q, k, v, kv: (q, k, v, kv.transpose(3, 4).contiguous().transpose(3, 4)), "gaps in a page"),
    (lambda q, k, v, kv: (q, k, v.bfloat16(), kv), "dtypes differ"),
    (lambda q, k, v, kv: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, kv), "rows have gaps"),
]


@pytest.mark.parametrize(("change", "complaint"), MISFITS)
def test_tensors_that_do_not_fit_the_plan_are_refused_and_nothing_is_written(change, complaint):
    case = sound_case()
    case.batch.page_ids = torch.arange(4, dtype=torch.int32)
    before = case.kv.clone()
    backend = CpuAttention(case.shape)
    backend.prepare(case.batch)
    query, rows = torch.zeros(8, 4, 64), torch.zeros(8, 2, 64)
    with pytest.raises(ValueError, match=complaint):
        backend.forward(*change(query, rows, rows, case.kv[:, 1]), None)
    assert torch.equal(case.kv.isnan(), before.isnan())


@pytest.mark.parametrize(("change", "complaint"), MISFITS)
def test_a_layer_that_does_not_fit_is_refused_after_others_that_did(change, complaint):
    case = sound_case()
    case.batch.page_ids = torch.arange(4, dtype=torch.int32)
    backend = CpuAttention(case.shape)
    backend.prepare(case.batch)
    query, rows = torch.zeros(8, 4, 64), torch.zeros(8, 2, 64)
    for layer in (0, 2):
        backend.forward(query, rows, rows, case.kv[:, layer], None)
    with pytest.raises(ValueError, match=complaint):
        backend.forward(*change(query, rows, rows, case.kv[:, 1]), None)
    with pytest.raises(ValueError, match="a window of 0"):
        backend.forward(query, rows, rows, case.kv[:, 1], 0)
    assert case.kv[:, 1].isnan().sum() > 0


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(4, 1)])
def test_sinks_of_another_number_of_heads_are_refused(sinks):
    case = sound_case()
    case.sinks = sinks
    with pytest.raises(ValueError, match="sinks have another shape"):
        case.run(CpuAttention(case.shape))


@needs_kernel
def test_layers_of_different_forms_and_windows_share_a_plan():
    shape = shape_of(group=3, kv_heads=2, head_dim=64, block_size=16)
    sequences = [random_sequence(shape, n, n + 90, torch.float32, n) for n in (1, 20)]
    case = place(shape, sequences, seed=3)
    backend = CpuAttention(shape, use_kernel=True)
    backend.prepare(case.batch)
    query = torch.cat([s.query for s in sequences])
    key, value = (torch.cat([getattr(s, n)[90:] for s in sequences]) for n in ("keys", "values"))
    apart = torch.zeros(21, 12, 64)[:, ::2].copy_(query)
    kv = case.kv[:, 1]
    for window, rows, pages in [(None, query, kv), (7, apart, kv), (7, query, kv.clone()), (None, apart, kv)]:
        expected = torch.cat([by_the_formula(s, shape, window) for s in sequences])
        assert_close(backend.forward(rows, key, value, pages, window), expected)


# The operations between the products.


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 40), heads=st.integers(1, 5), dim=st.integers(1, 80), seed=st.integers(0, 999))
@example(tokens=35, heads=2, dim=54, seed=87)  # a rotation in which two products nearly cancel
def test_the_fused_operations_equal_their_torch_forms(dtype, tokens, heads, dim, seed):
    noise = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=noise) * 3).to(dtype)

    wide, weight, residual = draw(tokens, heads, 2 * dim), draw(2 * dim), draw(tokens, 2 * dim)
    angles = torch.rand(2, tokens, dim, generator=noise) * 6
    cos, sin = angles[0].cos(), angles[0].sin()

    def results() -> list[torch.Tensor]:
        added = residual.clone()
        turned, normed, offset_normed = wide.clone(), wide.clone(), wide.clone()
        fused.rotate(turned[:, : heads - 1], cos, sin)
        fused.norm_rotate(normed[:, 1:], fused.HeadNorms(weight, weight * 2, heads // 2, 1e-5), cos, sin)
        offset = fused.HeadNorms(weight, weight * 2, heads // 2, 1e-5, offset=1.0)
        fused.norm_rotate(offset_normed[:, 1:], offset, cos, sin)
        first = wide[:, 0]
        summed, own, squares = residual.clone(), first.clone(), torch.empty(tokens, 2)
        fused.add(own, summed)
        fused.square_sums(first, squares[:, 1])
        fused.norm_by_sums(own, squares[:, 1], weight, 1e-5, width=3 * dim)
        return [
            summed,
            own,
            squares[:, 1],
            fused.rms_norm(first, weight, 1e-5),
            fused.rms_norm(wide[:, 1:], weight, 1e-5),
            fused.rms_norm(wide[:, 1:], weight, 1e-5, offset=1.0),
            fused.add_rms_norm(first, added, weight, 1e-5),
            added,
            fused.silu_mul(first),
            fused.gelu_mul(first),
            turned,
            normed,
            offset_normed,
        ]

    compiled = results()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "library", lambda: None)
        plain = results()
    rtol = 2e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(compiled[:-3], plain[:-3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=2e-5)
    for mine, theirs in zip(compiled[-3:], plain[-3:], strict=True):
        # A rotated number is a difference of products, which may nearly cancel: what it may be off by is a part of its
        # pair's length, which a rotation keeps.
        pairs, lengths = ((t.float().unflatten(-1, (2, dim)).norm(dim=-2)) for t in (mine.float() - theirs, theirs))
        assert (pairs <= rtol * lengths + 2e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_in_parts_is_normed_like_a_whole_one(dtype):
    x, weight = torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    expected = fused.rms_norm(x, weight, 1e-5)
    parts, squares = x.split((40, 56), dim=1), torch.empty(7, 2)
    for part, out in zip(parts, squares.unbind(1), strict=True):
        fused.square_sums(part, out)
    for part, of_part in zip(parts, weight.split((40, 56)), strict=True):
        fused.norm_by_sums(part, squares.sum(1), of_part, 1e-5, width=96)
    torch.testing.assert_close(x, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_with_an_offset_is_rounded_once_as_gemma_rounds(dtype):
    norm = Gemma3RMSNorm(96, eps=1e-6)
    norm.weight.data = torch.randn(96).to(dtype) * 0.1
    x, residual = (torch.randn(5, 96).to(dtype) for _ in range(2))
    assert_near = functools.partial(
        torch.testing.assert_close, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6
    )
    assert_near(fused.rms_norm(x, norm.weight.data, 1e-6, offset=1.0), norm(x).detach())
    expected = norm(x + residual).detach()
    assert_near(fused.add_rms_norm(x, residual, norm.weight.data, 1e-6, offset=1.0), expected)


def test_a_rotation_keeps_lengths_and_the_numbers_beyond_it():
    heads = torch.randn(6, 3, 64)
    before = heads.clone()
    angles = torch.rand(6, 16) * 6
    fused.rotate(heads, angles.cos(), angles.sin())
    torch.testing.assert_close(heads.norm(dim=-1), before.norm(dim=-1))
    assert torch.equal(heads[..., 32:], before[..., 32:])
    assert not torch.equal(heads[..., :32], before[..., :32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_and_rotated_at_once_as_one_after_the_other(dtype):
    heads = torch.randn(6, 5, 64).to(dtype)
    weights = [torch.rand(64).to(dtype) + 0.5 for _ in range(2)]
    angles = torch.rand(6, 32) * 6
    cos, sin = angles.cos(), angles.sin()
    expected = [
        fused.rms_norm(part, weight, 1e-6) for part, weight in zip((heads[:, :3], heads[:, 3:]), weights, strict=True)
    ]
    for part in expected:
        fused.rotate(part, cos, sin)
    fused.norm_rotate(heads, fused.HeadNorms(*weights, 3, 1e-6), cos, sin)
    assert torch.equal(heads, torch.cat(expected, dim=1))


def test_an_operation_refuses_what_would_read_out_of_bounds():
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match="weight"):
        fused.rms_norm(x, torch.ones(31), 1e-5) if KERNEL_IS_THERE else pytest.skip("torch broadcasts")
    with pytest.raises(ValueError, match="sums") if KERNEL_IS_THERE else pytest.raises(RuntimeError):
        fused.norm_by_sums(x, torch.ones(3), torch.ones(32), 1e-5, width=32)
    with pytest.raises(ValueError, match="out") if KERNEL_IS_THERE else pytest.raises(RuntimeError):
        fused.square_sums(x, torch.ones(3))
    with pytest.raises(ValueError, match="one shape") if KERNEL_IS_THERE else pytest.raises(RuntimeError):
        fused.add(x, torch.ones(3, 32))
    with pytest.raises(ValueError, match="cos and sin"):
        fused.rotate(x.view(4, 1, 32), torch.ones(3, 16), torch.ones(3, 16))
    with pytest.raises(ValueError, match="cos and sin"):
        fused.rotate(x.view(4, 1, 32), torch.ones(4, 17), torch.ones(4, 17))
    norms = fused.HeadNorms(torch.ones(31), torch.ones(31), 1, 1e-5)
    with pytest.raises(ValueError, match="norm must be") if KERNEL_IS_THERE else pytest.raises(RuntimeError):
        fused.norm_rotate(x.view(4, 1, 32), norms, torch.ones(4, 16), torch.ones(4, 16))


# Building.


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"


@pytest.fixture
def small_sources(tmp_path, monkeypatch) -> None:
    """What is built compiles in no time: how it is kept does not depend on what it is."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", [source])


@needs_kernel
@pytest.mark.usefixtures("small_sources")
def test_engines_that_start_at_once_share_one_build(cache, tmp_path, monkeypatch):
    """Their compilers wait for each other, so that none finds what another has built."""
    running, compiler = tmp_path / "running", tmp_path / "compiler"
    running.mkdir()
    compiler.write_text(
        f"#!/bin/sh\ntouch {running}/$$\nwhile [ $(ls {running} | wc -l) -lt 3 ]; do sleep 0.01; done\n"
        f'exec {shlex.join(build.find_compiler())} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(3) as engines:
        builds = [each.result(timeout=60) for each in [engines.submit(build.shared_object) for _ in range(3)]]
    assert {each.name for each in builds} == {path.name for path in cache.iterdir()}
    assert len(set(builds)) == 1


@needs_kernel
@pytest.mark.usefixtures("small_sources")
def test_a_build_is_logged_once_and_found_again_without_a_compiler(cache, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger=build.__name__):
        first = build.shared_object()
        monkeypatch.setenv("CXX", "/nonexistent/compiler")
        assert build.shared_object() == first
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert cache in first.parents


@needs_kernel
@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("kept", [0, 1000])
def test_a_damaged_build_is_not_loaded_but_made_again(cache, kept):
    first = build.shared_object()
    whole = first.read_bytes()
    first.write_bytes(whole[:kept])
    assert build.shared_object().read_bytes() == whole


@needs_kernel
@pytest.mark.usefixtures("small_sources")
def test_a_cache_that_others_may_write_to_is_not_trusted(cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert cache not in build.shared_object().parents


@pytest.mark.parametrize(
    ("compiler", "complaint"),
    [("/nonexistent/compiler", "did not run"), ("/bin/false", "failed"), ("g++ 'x", "not a command")],
)
def test_without_a_working_compiler_torch_stands_in_after_one_warning(cache, monkeypatch, caplog, compiler, complaint):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(kernels, "_load", functools.cache(kernels._load.__wrapped__))
    kernels.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            case = sound_case()
            assert_close(case.run(CpuAttention(case.shape)), case.expected())
            CpuAttention(case.shape)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert complaint in caplog.text
        with pytest.raises(RuntimeError, match="not available"):
            CpuAttention(case.shape, use_kernel=True)
    finally:
        kernels.library.cache_clear()
    assert list(cache.iterdir()) == []


def test_a_compiler_error_in_another_encoding_is_shown(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'error: d\\351faut' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match=r"error: d.faut"):
        build.shared_object()


def test_a_blank_name_of_a_compiler_is_none(monkeypatch):
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.find_compiler()


def test_the_kernels_can_be_refused_by_the_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_ENGINE_CPU_KERNELS", "off")
    kernels.library.cache_clear()
    try:
        assert kernels.library() is None
    finally:
        kernels.library.cache_clear()
