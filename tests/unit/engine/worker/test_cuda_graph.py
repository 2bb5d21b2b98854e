"""Decode steps that are recorded once and replayed: padding, the ladder of sizes, and the memory that never moves, with
a capture that runs no code of the model.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE
from quire_engine.attention.flashinfer import FlashInferAttention
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.config import EngineArgs
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels import bindings
from quire_engine.models.loader import read_model_config
from quire_engine.worker.cuda_graph import CapturedGraph, CudaGraphCapturer, capture_sizes
from quire_engine.worker.input_batch import dummy_decode, pad_decode
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.model_runner import LoadedModel, ModelRunner, load_model_and_attention
from quire_engine.worker.worker import LocalRank

from tests.model.driver import Driver, Sequence
from tests.model.models import small_model, small_prompts
from tests.model.overlapping import Loop, came_of, some_sequences
from tests.support.fake_graphs import FakeCapturer, GraphReference, check_decode, parts_of
from tests.support.flashinfer_emulation import installed
from tests.support.steps import PENDING, KnownChunk, prepare

BLOCK_SIZE = 16
POOLS = CacheSizes(2 << 20, 2 << 20)
SIZES = (1, 2, 4, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _in_torch_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels of the CPU are no operations of torch, and cannot be recorded."""
    monkeypatch.setenv("QUIRE_ENGINE_CPU_KERNELS", "0")
    bindings.library.cache_clear()
    yield
    bindings.library.cache_clear()


def loaded_model(name: str, folders: Path, sizes: tuple[int, ...] = SIZES) -> LoadedModel:
    folder = small_model(name, folders)
    config = EngineArgs(model=folder, dtype="float32", block_size=BLOCK_SIZE, attention="reference")
    parts = load_model_and_attention(config, read_model_config(folder), torch.device("cpu"))
    return replace(parts, attention=GraphReference(parts.attention._shape), graph_sizes=sizes)


def captured_by(capture: Any) -> Callable[[LoadedModel, CacheSizes], LocalRank]:
    """What makes the one rank of an executor that captures its decode steps so."""
    return lambda model, sizes: LocalRank(ModelRunner(model, sizes, capture))


def decode_chunks(lengths: list[int], first_block: int = 1) -> list[KnownChunk]:
    """A chunk of one token for each sequence of so many tokens, each with blocks of its own."""
    chunks, block = [], first_block
    for id, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        chunks.append(KnownChunk(id, [id + 3], length - 1, list(range(block, block + count))))
        block += count
    return chunks


# The ladder


@given(st.integers(1, 2 * MAX_GRAPH_BATCH_SIZE))
def test_every_batch_size_has_a_graph_that_is_little_larger(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(largest, MAX_GRAPH_BATCH_SIZE)
    for size in range(1, sizes[-1] + 1):
        chosen = min(one for one in sizes if one >= size)
        assert chosen < size + 8
        assert chosen < 2 * size


def test_the_ladder_is_1_2_4_and_the_eights() -> None:
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(32) == [1, 2, 4, 8, 16, 24, 32]


# Padding


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(0, 3))
def test_a_padded_batch_is_the_batch_and_then_first_tokens_on_the_null_page(lengths: list[int], more: int) -> None:
    batch = prepare(decode_chunks(lengths), BLOCK_SIZE).model_input
    (attention,) = batch.attention
    padded = pad_decode(attention, len(lengths) + more)
    check_decode(padded, len(lengths) + more, sum(-(-length // BLOCK_SIZE) for length in lengths) + more, BLOCK_SIZE)
    for own, after in zip(parts_of(attention), parts_of(padded), strict=True):
        assert torch.equal(after[: len(own)], own)
    assert padded.page_ids[len(attention.page_ids) :].tolist() == [0] * more
    assert padded.context_lens[len(lengths) :].tolist() == [1] * more


def test_a_batch_of_nothing_but_pads_is_one_that_can_be_prepared() -> None:
    check_decode(dummy_decode(3), 3, 3, BLOCK_SIZE)


# Graphs against the same steps without


@pytest.mark.parametrize("name", ["llama3", "qwen2-yarn", "qwen3", "mistral"])
def test_replayed_steps_make_the_same_tokens(name: str, folders: Path) -> None:
    parts, capturer = loaded_model(name, folders), FakeCapturer()
    executor = TorchExecutor(parts, POOLS, make_ranks=captured_by(capturer))

    def sequences() -> list[Sequence]:
        return [Sequence(id, prompt, 12) for id, prompt in enumerate(small_prompts()[:9])]

    eager = Driver(TorchExecutor(replace(parts, graph_sizes=()), POOLS), seed=1, max_chunk=40).run(sequences())
    assert capturer.replays == 0
    assert Driver(executor, seed=1, max_chunk=40).run(sequences()) == eager
    mixed = Driver(executor, seed=2, max_chunk=3).run(sequences())
    assert mixed == eager
    made = parts.attention.made
    assert [one.size for one in made] == sorted(SIZES, reverse=True)
    assert all(len(one.prepared) > 1 for one in made), "not every size was replayed"
    assert sum(len(one.prepared) - 1 for one in made) == capturer.replays


@pytest.mark.parametrize(("name", "deterministic"), [("mistral", False), ("mistral", True), ("qwen2-yarn", False)])
def test_graphs_work_with_the_attention_of_gpus(
    folders: Path, name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are emulated, and what is replayed here is the code that was recorded."""
    replayed: list[int] = []

    def record(work: Callable[[], object]) -> SimpleNamespace:
        work()
        return SimpleNamespace(replay=lambda: replayed.append(1) or work())

    def sequences() -> list[Sequence]:
        return [Sequence(id, prompt, 12) for id, prompt in enumerate(small_prompts()[:6])]

    monkeypatch.setattr("quire_engine.worker.input_batch.WINDOW_ALIGNMENT", 16)
    parts = loaded_model(name, folders)
    expected = Driver(TorchExecutor(replace(parts, graph_sizes=()), POOLS), seed=1, max_chunk=40).run(sequences())
    with installed():
        attention = FlashInferAttention(
            parts.attention._shape, torch.device("cpu"), torch.float32, deterministic=deterministic
        )
        parts = replace(parts, attention=attention)
        executor = TorchExecutor(parts, POOLS, make_ranks=captured_by(record))
        assert Driver(executor, seed=2, max_chunk=13).run(sequences()) == expected
    assert len(replayed) > 10


def test_pending_tokens_are_put_where_the_graph_reads_them(folders: Path) -> None:
    parts = loaded_model("llama3", folders)
    runner = ModelRunner(parts, POOLS, FakeCapturer())
    chunks = decode_chunks([1, 20, 33])
    with torch.inference_mode():
        known = runner.forward(prepare(chunks, BLOCK_SIZE).model_input).clone()
        assert len(known) == len(chunks), "pads are not told"
        for places in ([0, 1, 2], [1], [0, 2], []):
            pending = torch.tensor([chunks[place].token_ids[0] for place in places])
            hidden = [replace_last(chunk) if place in places else chunk for place, chunk in enumerate(chunks)]
            made = runner.forward(prepare(hidden, BLOCK_SIZE).model_input, pending if places else None)
            assert torch.equal(made, known)


def replace_last(chunk: KnownChunk) -> KnownChunk:
    return replace(chunk, token_ids=[*chunk.token_ids[:-1], PENDING])


def test_replayed_steps_overlap_as_others_do(folders: Path) -> None:
    """The memory that a graph reads and writes is used again by the next step, while this one is drawn from."""
    parts, capturer = loaded_model("llama3", folders), FakeCapturer()
    prompts = [prompt[:60] for prompt in small_prompts()]
    pools = CacheSizes(4 << 20, 0)
    apart, overlapped = some_sequences(prompts), some_sequences(prompts)
    Loop(TorchExecutor(replace(parts, graph_sizes=()), pools), apart, seed=5).run()
    executor = TorchExecutor(parts, pools, depth=2, make_ranks=captured_by(capturer))
    loop = Loop(executor, overlapped, seed=6)
    loop.run_overlapped()
    assert came_of(overlapped) == came_of(apart)
    assert loop.num_pending > 20
    assert capturer.replays > 10


@pytest.mark.parametrize("lengths", [[1] * 7, [4, 4]], ids=["too many", "longer chunks"])
def test_a_batch_without_a_graph_runs_eagerly(lengths: list[int], folders: Path) -> None:
    capturer = FakeCapturer()
    runner = ModelRunner(loaded_model("llama3", folders), POOLS, capturer)
    chunks = [KnownChunk(id, [5] * length, 0, [id + 1]) for id, length in enumerate(lengths)]
    with torch.inference_mode():
        assert len(runner.forward(prepare(chunks, BLOCK_SIZE).model_input)) == sum(lengths)
    assert capturer.replays == 0


def test_pads_touch_the_null_page_alone(folders: Path) -> None:
    runner = ModelRunner(loaded_model("llama3", folders), POOLS, FakeCapturer())
    kv = runner._kv_cache.blocks
    with torch.inference_mode():
        kv[1:].fill_(7.0)
        runner.forward(prepare(decode_chunks([1, 1, 1], first_block=2), BLOCK_SIZE).model_input)
    touched = [block for block in range(1, len(kv)) if not bool((kv[block] == 7.0).all())]
    assert touched == [2, 3, 4]


# What cannot be recorded


def test_a_model_that_decides_on_the_host_is_not_recorded(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    capturer = FakeCapturer()
    ModelRunner(loaded_model("mixtral", folders), POOLS, capturer)
    assert not capturer.captures
    assert not caplog.records


def test_a_recording_that_fails_is_one_warning_and_steps_without_graphs(
    folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(work: Callable[[], object]) -> CapturedGraph:
        work()
        raise RuntimeError("operation not permitted when stream is capturing.\nand more about it")

    parts = loaded_model("llama3", folders)
    runner = ModelRunner(parts, POOLS, refuse)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no CUDA graphs: operation not permitted when stream is capturing; short steps" in caplog.text
    batch = prepare(decode_chunks([1, 20]), BLOCK_SIZE).model_input
    with torch.inference_mode():
        expected = ModelRunner(replace(parts, graph_sizes=()), POOLS).forward(batch)
        assert torch.equal(runner.forward(batch), expected)


def test_work_that_synchronizes_with_the_device_cannot_be_captured() -> None:
    """The stand-in refuses what CUDA refuses."""
    with pytest.raises(RuntimeError, match="capturing"):
        FakeCapturer()(lambda: torch.ones(1).item())


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["eager", "attention without graphs"])
def test_without_sizes_or_an_attention_for_it_nothing_is_recorded(sizes: tuple[int, ...], folders: Path) -> None:
    capturer, parts = FakeCapturer(), loaded_model("llama3", folders, sizes)
    if sizes:
        parts = replace(parts, attention=ReferenceAttention(parts.attention._shape))
    ModelRunner(parts, POOLS, capturer)
    assert not capturer.captures


def test_the_current_stream_is_set_back_where_the_end_of_a_recording_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ends the capture before it sets the stream back, and does not where that raises."""
    current = ["compute"]

    class Capture:
        def __init__(self, graph: object, *, pool: object, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"

        def __enter__(self) -> None:
            current[0] = "capture"

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(wanted: str) -> Iterator[None]:
        before, current[0] = current[0], wanted
        try:
            yield
        finally:
            current[0] = before

    for name, stand_in in {
        "CUDAGraph": object,
        "graph": Capture,
        "graph_pool_handle": object,
        "stream": stream,
        "current_stream": lambda: current[0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphCapturer()(lambda: None)
    assert current == ["compute"]


def test_no_garbage_is_collected_while_graphs_are_recorded(folders: Path) -> None:
    enabled: list[bool] = []

    def record(work: Callable[[], object]) -> CapturedGraph:
        enabled.append(gc.isenabled())
        return FakeCapturer()(work)

    ModelRunner(loaded_model("llama3", folders), POOLS, record)
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()
