"""Attention through FlashInfer, on an emulation of it: the plans it is given say what the reference computes."""

import importlib.util
import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.attention import flashinfer
from quire_engine.attention.base import AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.flashinfer import FlashInferAttention, unsupported_reason, unsupported_shape_reason
from quire_engine.attention.kv_rows import FP8
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.errors import ModelError
from quire_engine.worker.attention_selector import make_attention, resolve_kv_cache_dtype

from tests.support import flashinfer_emulation
from tests.support.flashinfer_contract import CONTRACT, Call, breaches
from tests.support.flashinfer_emulation import STREAM, installed
from tests.support.ragged_steps import RaggedStep, make_step

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
SHAPE = AttentionShape(4, 2, 64, 16, 0.125)
TOLERANCES = {torch.float16: 4e-3, BF16: 3e-2}


def shape_of(
    group: int, kv_heads: int, head_dim: int, block_size: int, scale: float, soft_cap: float | None
) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, head_dim, block_size, scale, soft_cap)


SHAPES = st.builds(
    shape_of,
    group=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 128]),
    block_size=st.sampled_from([1, 5, 16, 32]),
    scale=st.sampled_from([0.125, 0.3]),
    soft_cap=st.sampled_from([None, None, 5.0]),
)
PASTS = st.integers(0, 90)
DECODES = st.lists(st.tuples(st.just(1), PASTS), min_size=1, max_size=5)
MIXED = st.lists(st.tuples(st.integers(1, 40), PASTS), min_size=1, max_size=4)
WINDOWS = st.lists(st.none() | st.integers(1, 70), min_size=1, max_size=3, unique=True)
DTYPES = st.sampled_from(sorted(TOLERANCES, key=str))


def backend_of(shape: AttentionShape, dtype: torch.dtype, *, deterministic: bool = False) -> FlashInferAttention:
    return FlashInferAttention(shape, CPU, dtype, deterministic=deterministic)


def assert_agrees(step: RaggedStep, results: list[torch.Tensor], *windows: int | None) -> None:
    expected = step.run(ReferenceAttention(step.shape), *windows)
    for mine, reference in zip(results, expected, strict=True):
        tolerance = TOLERANCES[mine.dtype]
        torch.testing.assert_close(mine, reference, atol=tolerance, rtol=tolerance, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.lists(DECODES | MIXED, min_size=1, max_size=3), WINDOWS, DTYPES, st.booleans(), st.integers(0, 999))
def test_steps_of_any_shape_equal_the_reference(shape, steps, windows, dtype, deterministic, seed):
    with installed():
        backend = backend_of(shape, dtype, deterministic=deterministic)
        for lengths in steps:
            step = make_step(shape, lengths, dtype, seed)
            assert_agrees(step, step.run(backend, *windows), *windows)


@settings(max_examples=15, deadline=None)
@given(SHAPES, DECODES, DECODES, WINDOWS, st.integers(0, 3), st.booleans())
def test_a_captured_graph_computes_whatever_was_prepared_last(shape, first, second, windows, spare, deterministic):
    size = min(8, max(len(first), len(second)) + spare)
    captured, replayed = (
        make_step(shape, lengths, BF16, seed=seed, pads=size - len(lengths))
        for seed, lengths in enumerate((first, second))
    )
    pages = max(len(step.batch.page_ids) for step in (captured, replayed))
    room = replace(captured, kv=torch.zeros(max(len(captured.kv), len(replayed.kv)), *captured.kv.shape[1:]).to(BF16))
    with installed() as module:
        backend = backend_of(shape, BF16, deterministic=deterministic).for_graph(size, pages + spare)
        room.run(backend, *windows)
        room.run(backend, *windows)
        STREAM.lazy = True
        results = [result for window in windows for result in room.forward(backend, window)]
        graph = STREAM.take()
        STREAM.lazy = False
        make_wrapper, module.BatchDecodeWithPagedKVCacheWrapper = module.BatchDecodeWithPagedKVCacheWrapper, None
        backend.prepare(replayed.batch)
        room.heads.copy_(replayed.heads)
        for kv in results[1::2]:
            kv[: len(replayed.kv)] = replayed.kv
        for work in graph:
            work()
        module.BatchDecodeWithPagedKVCacheWrapper = make_wrapper
    real = [result[: len(second)] for result in results[::2]]
    expected = replayed.run(ReferenceAttention(shape), *windows)
    for mine, reference in zip(real, expected[::2], strict=True):
        torch.testing.assert_close(mine, reference[: len(second)], atol=3e-2, rtol=3e-2)
    for mine, reference in zip(results[1::2], expected[1::2], strict=True):
        torch.testing.assert_close(mine[1 : len(reference)], reference[1:], equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.lists(DECODES | MIXED, min_size=1, max_size=2), WINDOWS, DTYPES, st.integers(0, 999))
def test_layers_with_sinks_and_without_equal_the_reference(shape, steps, windows, dtype, seed):
    shape = replace(shape, soft_cap=None)
    sinks = (torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    with installed():
        backend, reference = backend_of(shape, dtype), ReferenceAttention(shape)
        for lengths in steps:
            step = make_step(shape, lengths, dtype, seed)
            for each in (backend, reference):
                each.prepare(step.batch)
            for window in windows:
                for given_sinks in (sinks, None):
                    mine, _ = step.forward(backend, window, given_sinks)
                    expected, _ = step.forward(reference, window, given_sinks)
                    torch.testing.assert_close(mine, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


HOPPER = (9, 0)


def backends_made(module: object) -> list[str]:
    """The kernels of the wrappers for prompts that are made from now on."""
    made, wrapper = [], module.BatchPrefillWithPagedKVCacheWrapper

    def make(*args, backend, **others):
        made.append(backend)
        return wrapper(*args, backend=backend, **others)

    module.BatchPrefillWithPagedKVCacheWrapper = make
    return made


LONG_SHAPE = AttentionShape(4, 2, 128, 16, 0.125)


@pytest.mark.parametrize(
    ("lengths", "kernels"),
    [
        ([(1, 30), (1, 0), (900, 20), (140, 0)], ["fa3"]),  # the decodes have a kernel of their own
        ([(1, 30), (1, 0), (150, 20), (3, 0)], ["fa2"]),  # too little for two kernels
        ([(150, 20), (140, 0)], ["fa3"]),
        ([(300, 0), (1, 20)], ["fa3"]),
        ([(150, 20), (1, 30), (5, 7)], ["fa2"]),  # short on average
        ([(1, 30), (1000, 20), *[(20, 0)] * 12], ["fa2"]),
        ([(1, 30), (1, 2)], []),
    ],
    ids=str,
)
def test_fa3_computes_long_chunks_on_hopper_as_the_reference_does(lengths, kernels):
    with installed(capability=HOPPER) as module:
        made = backends_made(module)
        backend = backend_of(LONG_SHAPE, BF16)
        step = make_step(LONG_SHAPE, lengths, BF16, seed=1)
        assert_agrees(step, step.run(backend, None, 40), None, 40)
        # Layers with a window keep to FA2.
        assert sorted(made) == sorted([*kernels, *["fa2"] * len(kernels)])


@pytest.mark.parametrize(
    ("shape", "dtype", "deterministic"),
    [
        (LONG_SHAPE, torch.float16, False),
        (LONG_SHAPE, BF16, True),
        (SHAPE, BF16, False),
        (replace(LONG_SHAPE, soft_cap=5.0), BF16, False),
    ],
    ids=str,
)
def test_fa3_computes_only_what_it_was_measured_with(shape, dtype, deterministic):
    with installed(capability=HOPPER) as module:
        made = backends_made(module)
        step = make_step(shape, [(1, 30), (1030, 20)], dtype, seed=1)
        assert_agrees(step, step.run(backend_of(shape, dtype, deterministic=deterministic), None), None)
    assert "fa3" not in made


def test_where_fa3_cannot_be_used_fa2_computes_everything(monkeypatch, caplog):
    with installed(capability=HOPPER) as module:
        made, plan = backends_made(module), flashinfer_emulation.BatchPrefillWithPagedKVCacheWrapper.plan

        def refuse(wrapper, *args, **options):
            if made[-1] == "fa3":
                raise RuntimeError("no compiler\nand more")
            return plan(wrapper, *args, **options)

        monkeypatch.setattr(flashinfer_emulation.BatchPrefillWithPagedKVCacheWrapper, "plan", refuse)
        backend = backend_of(LONG_SHAPE, BF16)
        for seed in range(2):
            step = make_step(LONG_SHAPE, [(1, 30), (1030, 20)], BF16, seed)
            assert_agrees(step, step.run(backend, None), None)
    assert made == ["fa3", "fa2"]
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer's FA3 kernels cannot be used: no compiler; prompts take longer"
    ]


def test_no_graph_is_made_of_layers_with_sinks():
    with installed():
        graph = backend_of(SHAPE, BF16).for_graph(2, 4)
        step = make_step(SHAPE, [(1, 5)] * 2, BF16, 0)
        graph.prepare(step.batch)
        with pytest.raises(ValueError, match="in no graph"):
            step.forward(graph, None, torch.zeros(SHAPE.num_heads))


def test_a_graph_accepts_its_own_batch_size_and_no_more_pages_than_it_was_captured_for():
    with installed():
        parent = backend_of(SHAPE, BF16)
        graph = parent.for_graph(3, 6)
        for lengths in ([(1, 5)] * 2, [(1, 5)] * 4, [(1, 5), (2, 5)]):
            with pytest.raises(ValueError, match="a graph of 3 tokens"):
                graph.prepare(make_step(SHAPE, lengths, BF16, 0).batch)
        long = make_step(SHAPE, [(1, 40)] * 3, BF16, 0)
        with pytest.raises(ValueError, match="allocated buffer"):
            long.run(graph, None)
        short = make_step(SHAPE, [(1, 9)] * 3, BF16, 0)
        short.run(graph, None)
        with pytest.raises(ValueError, match="allocated buffer"):
            graph.prepare(long.batch)
        with pytest.raises(ValueError, match="allocated buffer"):
            short.forward(graph, None)
        with pytest.raises(ValueError, match="1 to"):
            parent.for_graph(9, 6)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 80), st.integers(1, 4), st.sampled_from([64, 128, 256]), st.sampled_from([(7, 5), (8, 0), (9, 0)])
)
def test_the_workspace_fits_the_largest_graph_of_every_shape(group, kv_heads, head_dim, capability):
    shape = AttentionShape(group * kv_heads, kv_heads, head_dim, 16, 1.0)
    with installed(capability=capability):
        size = flashinfer.MAX_GRAPH_BATCH_SIZE
        make_step(shape, [(1, 1)] * size, BF16, 0).run(backend_of(shape, BF16).for_graph(size, size), None)


def test_graphs_of_all_sizes_share_their_arrays_and_the_memory_of_their_plans():
    made = []
    with installed() as module:
        emulated = module.BatchDecodeWithPagedKVCacheWrapper

        class Recorded(emulated):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                made.append((self, kwargs))

        module.BatchDecodeWithPagedKVCacheWrapper = Recorded
        parent = backend_of(SHAPE, BF16)
        for size in (4, 2):
            make_step(SHAPE, [(1, 20)] * size, BF16, 0).run(parent.for_graph(size, 2 * size), None, 7)
    buffers = [{value.data_ptr() for value in kwargs.values() if torch.is_tensor(value)} for _, kwargs in made]
    assert buffers[0] == buffers[1] == buffers[2] == buffers[3]
    plans = [wrapper.int_workspace.data_ptr() for wrapper, _ in made]
    assert plans[0] == plans[2] != plans[1] == plans[3]


@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_waits_until_the_plan_before_has_left_its_staging_buffer(waits, monkeypatch):
    steps = [make_step(SHAPE, [(1, past), (1, 12 - past)], BF16, past) for past in (3, 5)]
    with installed():
        backend = backend_of(SHAPE, BF16)
        steps[0].run(backend, None)
        STREAM.lazy = True
        if not waits:
            monkeypatch.setattr(flashinfer_emulation.Fence, "wait", lambda self: None)
        results = [step.run(backend, None) for step in steps]
        STREAM.synchronize()
        STREAM.lazy = False
    if waits:
        for step, result in zip(steps, results, strict=True):
            assert_agrees(step, result, None)
    else:
        with pytest.raises(AssertionError):
            assert_agrees(steps[0], results[0], None)


def test_plans_before_one_that_fails_are_waited_for_too(monkeypatch):
    marked = []
    step = make_step(SHAPE, [(1, 20)], BF16, 0)
    with installed() as module:
        backend = backend_of(SHAPE, BF16)
        step.run(backend, None, 5)
        monkeypatch.setattr(flashinfer_emulation.Fence, "record", lambda _: marked.append(True))
        plan = module.BatchDecodeWithPagedKVCacheWrapper.plan

        def refuse(wrapper, *arrays, window_left, **options):
            if window_left >= 0:
                raise RuntimeError("no memory")
            plan(wrapper, *arrays, window_left=window_left, **options)

        monkeypatch.setattr(module.BatchDecodeWithPagedKVCacheWrapper, "plan", refuse)
        with pytest.raises(RuntimeError, match="no memory"):
            backend.prepare(step.batch)
    assert len(marked) == 1


def test_steps_of_single_tokens_take_the_decode_kernel_and_all_others_the_prefill_kernel(monkeypatch):
    made = []
    for kind in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        make = partial(record_and_make, made, getattr(flashinfer_emulation, kind))
        monkeypatch.setattr(flashinfer_emulation, kind, make)
    decode, mixed = (make_step(SHAPE, lengths, BF16, 0) for lengths in ([(1, 3), (1, 9)], [(1, 3), (4, 9)]))
    with installed():
        backend = backend_of(SHAPE, BF16)
        for step in (decode, mixed, decode, mixed):
            step.run(backend, None)
        assert made == ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"]
        made.clear()
        mixed.run(backend_of(SHAPE, BF16, deterministic=True), None)
        assert made == ["BatchDecodeWithPagedKVCacheWrapper"]


@settings(max_examples=20, deadline=None)
@given(SHAPES, DECODES | MIXED, WINDOWS, DTYPES, st.integers(0, 999))
def test_steps_over_kv_memory_in_fp8_equal_the_reference(shape, lengths, windows, dtype, seed):
    step = make_step(shape, lengths, dtype, seed, kv_dtype=FP8)
    expected = step.run(ReferenceAttention(shape), *windows)
    with installed():
        made = step.run(FlashInferAttention(shape, CPU, dtype, FP8), *windows)
    for mine, reference in zip(made[::2], expected[::2], strict=True):
        torch.testing.assert_close(mine, reference, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for mine, reference in zip(made[1::2], expected[1::2], strict=True):
        assert torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))


def record_and_make(made: list[str], kind: type, *args, **kwargs):
    made.append(kind.__name__)
    return kind(*args, **kwargs)


def test_deterministic_plans_split_no_context(monkeypatch):
    said = []
    plan = flashinfer_emulation.BatchDecodeWithPagedKVCacheWrapper.plan

    def recorded(self, *args, **kwargs):
        said.append((kwargs["disable_split_kv"], len(args[2])))
        plan(self, *args, **kwargs)

    monkeypatch.setattr(flashinfer_emulation.BatchDecodeWithPagedKVCacheWrapper, "plan", recorded)
    with installed():
        step = make_step(SHAPE, [(1, 3), (5, 9)], BF16, 0)
        step.run(backend_of(SHAPE, BF16, deterministic=True), None)
        decode = make_step(SHAPE, [(1, 3), (1, 9)], BF16, 0)
        decode.run(backend_of(SHAPE, BF16), None)
    assert said == [(True, 6), (False, 2)]


def test_forward_needs_a_prepared_step():
    with installed(), pytest.raises(ValueError, match="prepare comes before forward"):
        make_step(SHAPE, [(1, 3)], BF16, 0).forward(backend_of(SHAPE, BF16), None)


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "reason"),
    [
        (SHAPE, BF16, (9, 0), None),
        (SHAPE, torch.float16, (7, 5), None),
        (SHAPE, BF16, (7, 5), "8.0 or newer"),
        (SHAPE, torch.float16, (7, 0), "7.5 or newer, and this one has 7.0"),
        (SHAPE, torch.float32, (9, 0), "not in float32"),
        (replace(SHAPE, head_dim=80), BF16, (9, 0), "64, 128, 256 numbers, not of 80"),
        (replace(SHAPE, num_kv_heads=65, head_dim=128), BF16, (9, 0), "65 KV heads"),
    ],
)
def test_unsupported_settings_of_flashinfer_have_a_reason(shape, dtype, capability, reason):
    found = unsupported_reason(dtype, capability) or unsupported_shape_reason(shape)
    assert found == reason if reason is None else reason in found


class Gpu:
    """A GPU as far as the choice of a backend looks at it: FlashInfer's own device is the CPU."""

    def __init__(self, monkeypatch, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        self.made = []
        monkeypatch.setattr("quire_engine.worker.attention_selector.FlashInferAttention", self._make)

    def _make(self, shape, device, dtype, kv_dtype, *, deterministic):
        self.made.append((device, dtype, kv_dtype, deterministic))
        return FlashInferAttention(shape, CPU, dtype, kv_dtype, deterministic=deterministic)


def test_a_gpu_gets_flashinfer_and_a_cpu_its_own_kernel(monkeypatch):
    gpu = Gpu(monkeypatch)
    with installed():
        for name in ("auto", "flashinfer"):
            assert isinstance(make_attention(name, SHAPE, CUDA, BF16, deterministic=True), FlashInferAttention)
    assert gpu.made == [(CUDA, BF16, BF16, True)] * 2
    assert isinstance(make_attention("auto", SHAPE, CPU, BF16), CpuAttention)
    assert isinstance(make_attention("reference", SHAPE, CUDA, BF16), ReferenceAttention)


def test_an_old_gpu_is_not_deterministic(monkeypatch):
    Gpu(monkeypatch, capability=(7, 5))
    with installed():
        make_attention("auto", SHAPE, CUDA, torch.float16)
        with pytest.raises(ModelError, match="--deterministic needs"):
            make_attention("auto", SHAPE, CUDA, torch.float16, deterministic=True)


def test_a_gpu_without_flashinfer_uses_torch_and_warns_once(monkeypatch, caplog):
    Gpu(monkeypatch)
    with installed():
        assert isinstance(make_attention("auto", SHAPE, CUDA, torch.float32), ReferenceAttention)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert isinstance(make_attention("auto", SHAPE, CUDA, BF16), ReferenceAttention)
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "not in float32" in said[0]
    assert "not installed" in said[1]


@pytest.mark.parametrize(
    ("name", "dtype", "deterministic", "sentence"),
    [
        ("flashinfer", torch.float32, False, "not in float32"),
        ("auto", torch.float32, True, "not in float32"),
    ],
)
def test_a_dtype_that_flashinfer_does_not_compute_in_is_refused_in_one_sentence(
    name, dtype, deterministic, sentence, monkeypatch
):
    Gpu(monkeypatch)
    with installed(), pytest.raises(ModelError, match=sentence) as error:
        make_attention(name, SHAPE, CUDA, dtype, deterministic=deterministic)
    assert str(error.value).endswith(".")


def test_kv_memory_has_the_models_dtype_or_one_of_eight_bits():
    assert resolve_kv_cache_dtype("auto", BF16) == BF16
    assert resolve_kv_cache_dtype("int8", BF16) == torch.int8
    assert resolve_kv_cache_dtype("fp8", BF16) == FP8


@pytest.mark.parametrize("call", CONTRACT, ids=lambda call: call.name)
def test_the_emulation_takes_exactly_what_the_contract_names(call: Call):
    owner, _, method = call.name.partition(".")
    target = getattr(flashinfer_emulation, owner)
    parameters = inspect.signature(getattr(target, method) if method else target).parameters
    names = [name for name in parameters if name != "self"]
    assert tuple(names[: len(call.positional)]) == call.positional
    assert set(names[len(call.positional) :]) == set(call.keywords)


def test_the_contract_holds_for_the_flashinfer_that_is_installed():
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed")
    assert breaches(Path(spec.origin).parent) == []


def test_a_breach_of_the_contract_is_found(tmp_path):
    for call in CONTRACT:
        path = tmp_path / call.file
        path.parent.mkdir(exist_ok=True)
        path.write_text("class BatchDecodeWithPagedKVCacheWrapper:\n    def run(self, q, kv, *, out=None): ...\n")
    (tmp_path / "__init__.py").write_text("from .decode import BatchDecodeWithPagedKVCacheWrapper\n")
    found = breaches(tmp_path)
    assert "BatchDecodeWithPagedKVCacheWrapper.run begins with ('q', 'kv')" in found
    assert "flashinfer exports no append_paged_kv_cache" in found
    assert "page.py has no append_paged_kv_cache" in found
