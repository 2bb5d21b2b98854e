"""Layers that lie on disk (``--weights-memory-gb``): the same tokens and log-probabilities as in memory, in the memory
that was given, and a sentence for everything that cannot be.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from quire_engine.config import EngineArgs
from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.packed_linear import empty_on_huge_pages
from quire_engine.layers import streamed
from quire_engine.layers.streamed import AT_ONCE, StreamedLayer, WeightFile, choose_streamed, load_layers
from quire_engine.worker.cpu_graph import GraphKind
from quire_proto.sampling import SamplingParams
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.engine import Run, load, run
from tests.model.models import SmallModels
from tests.model.streamed import GIB, gib_of, needs_kernels, streamed_layers
from tests.support.kernels import cpu_path
from tests.support.steps import KnownChunk, make_step
from tests.support.variants import one_in

LAYERS, HIDDEN, INNER = 10, 128, 512
LAYER_BYTES = 4 * (2 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)  # two of four heads have keys
HUGE_PAGE = 2 << 20
PARAMS = [SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)] * 6


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten layers."""
    return write_model(tmp_path_factory.mktemp("deep"), seed=0)


def write_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def gib(layers: float) -> float:
    return gib_of(layers, LAYER_BYTES)


def outputs(executor: TorchExecutor, prompts: list[list[int]]) -> Run:
    return run(executor, prompts[: len(PARAMS)], PARAMS, chunk=32)


def settle(file: WeightFile) -> None:
    """Waits for what is read ahead."""
    for slot in file._slots:
        wait(slot.reading)


def resident_bytes(mapping: mmap.mmap) -> int:
    """What of a mapping is in memory, if it is one of a file in the system's page cache."""
    pages = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), pages) == 0
    return sum(each & 1 for each in pages) * mmap.PAGESIZE


def cached_bytes(file: WeightFile) -> int:
    """What of the file is in the page cache."""
    return resident_bytes(mmap.mmap(file._file.fileno(), 0))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """What a full disk is to a process: nothing can be allocated beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(count=st.integers(1, 200), size=st.integers(1, 1 << 30), held=st.floats(0, 220))
def test_what_is_in_memory_is_all_that_may_be(count: int, size: int, held: float) -> None:
    limit = int(held * size)
    chosen = choose_streamed(count, size, limit)
    if chosen is None:
        assert limit < min(count, AT_ONCE + 1) * size
        return
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(range(1, count))
    resident = count if not chosen else count - len(chosen) + AT_ONCE
    assert resident * size <= limit
    assert resident == min(count, limit // size), "no layer is read that could stay"
    if chosen:
        gaps = [after - before for before, after in pairwise(chosen)]
        assert max(gaps) - min(gaps) <= 1


KINDS = (("float32", None, 1), ("bfloat16", None, 0.5), ("float32", "int8", 0.27), ("float32", "int4", 0.17))


@needs_kernels
@pytest.mark.parametrize(("dtype", "quantization", "part", "held"), list(one_in(3, KINDS, (3, 6, 8))))
def test_tokens_are_those_of_the_model_in_memory(
    small_models: SmallModels,
    deep: Path,
    cache_folder: Path,
    dtype: str,
    quantization: str | None,
    part: float,
    held: int,
) -> None:
    settings = {"quantization": quantization, "deterministic": True}  # which has the kernel on every processor
    memory = gib(held) * part
    with (
        closing(load(deep, 200, 0, dtype, **settings)) as whole,
        closing(load(deep, 200, 0, dtype, weights_memory_gb=memory, **settings)) as on_disk,
    ):
        assert not streamed_layers(whole)
        assert len(streamed_layers(on_disk)) == LAYERS - held + AT_ONCE
        expected = outputs(whole, small_models.prompts)
        for _ in range(2):
            made = outputs(on_disk, small_models.prompts)
            assert made.choices == expected.choices


@needs_kernels
def test_a_model_that_fits_lies_in_memory_and_has_graphs(deep: Path, cache_folder: Path) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(LAYERS))) as executor:
        assert not streamed_layers(executor)
        assert executor._worker.runner._cpu_graphs is not None  # type: ignore[union-attr]
    assert not cache_folder.exists()


@needs_kernels
@pytest.mark.parametrize("direct", [True, False])
def test_two_layers_of_the_file_are_in_memory_and_nothing_of_it_in_the_page_cache(
    small_models: SmallModels, deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(streamed, "_bypass_page_cache", lambda _: None)  # as on a file system that cannot
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        layers = streamed_layers(executor)
        file = layers[0].weights
        assert (len(layers), file.memory_bytes) == (LAYERS - 1, AT_ONCE * LAYER_BYTES)
        outputs(executor, small_models.prompts)
        settle(file)
        for slot in file._slots:
            assert LAYER_BYTES <= resident_bytes(slot.memory) < LAYER_BYTES + HUGE_PAGE
        assert cached_bytes(file) == 0
        # The control: what is read through the page cache and not dropped stays there.
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fadvise", lambda *_: None)
            outputs(executor, small_models.prompts)
            settle(file)
        assert cached_bytes(file) == (0 if direct else len(layers) * LAYER_BYTES)


@needs_kernels
def test_the_file_has_no_name_and_takes_the_disk_of_its_layers(deep: Path, cache_folder: Path) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(4))) as executor:
        file = streamed_layers(executor)[0].weights
        assert list(cache_folder.iterdir()) == [], "nobody can change it, and nothing stays if the process is killed"
        status = os.fstat(file._file.fileno())
        assert status.st_size == len(streamed_layers(executor)) * LAYER_BYTES
        assert status.st_blocks * 512 >= status.st_size


@needs_kernels
def test_statistics_say_what_lies_where_what_is_read_and_how_long_steps_wait(
    deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(4))) as executor:
        stats, number = executor.weight_stats, LAYERS - 4 + AT_ONCE
        assert stats is not None
        assert (stats.memory_bytes, stats.disk_bytes) == (4 * LAYER_BYTES, number * LAYER_BYTES)
        read, preadv = stats.read_bytes, os.preadv
        prompt = make_step(0, [KnownChunk(0, [5, 6], 0, [1])])
        executor.execute_model(prompt)
        assert stats.read_bytes - read == number * LAYER_BYTES

        def read_slowly(*arguments: Any) -> int:
            sleep(0.01)
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", read_slowly)
        waited, start = stats.wait_seconds, perf_counter()
        executor.execute_model(prompt)
        assert 0.01 * (number - AT_ONCE) < stats.wait_seconds - waited < perf_counter() - start
    with closing(load(deep, 200, 0, weights_memory_gb=gib(LAYERS))) as executor:
        assert executor.weight_stats is None


@needs_kernels
def test_a_changed_checkpoint_is_packed_anew(small_models: SmallModels, tmp_path: Path, cache_folder: Path) -> None:
    for seed in (1, 2):
        folder = write_model(tmp_path / "model", seed)
        with closing(load(folder, 200, 0)) as whole, closing(load(folder, 200, 0, weights_memory_gb=gib(3))) as on_disk:
            assert outputs(on_disk, small_models.prompts).outputs == outputs(whole, small_models.prompts).outputs


@needs_kernels
def test_engines_that_start_at_the_same_time_have_a_file_each(
    small_models: SmallModels, deep: Path, tmp_path: Path, cache_folder: Path
) -> None:
    folders = [deep, write_model(tmp_path / "other", seed=3)]
    with ThreadPoolExecutor(2) as pool:
        executors = list(pool.map(lambda folder: load(folder, 200, 0, weights_memory_gb=gib(3)), folders))
    for folder, executor in zip(folders, executors, strict=True):
        with closing(executor), closing(load(folder, 200, 0)) as whole:
            assert outputs(executor, small_models.prompts).outputs == outputs(whole, small_models.prompts).outputs


@needs_kernels
def test_a_step_after_one_that_failed_is_right(
    small_models: SmallModels, deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        expected = outputs(executor, small_models.prompts).choices
        fourth = streamed_layers(executor)[3]
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(fourth, "_layer", None)
            for layer in streamed_layers(executor)[:3]:
                layer.weights.acquire(layer._place)
                layer.weights.release(layer._place)
            with pytest.raises(TypeError):
                fourth()
        assert outputs(executor, small_models.prompts).choices == expected


@needs_kernels
def test_a_layer_is_not_overwritten_by_what_was_read_ahead_before_a_failure(
    deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        file = streamed_layers(executor)[0].weights
        read = WeightFile._read_request

        def read_late(file: WeightFile, memory: memoryview, offset: int) -> None:
            sleep(0.1)
            read(file, memory, offset)

        with monkeypatch.context() as patch:
            patch.setattr(WeightFile, "_read_request", read_late)
            file.acquire(3)
            file.release(3)
        file.acquire(1)
        sleep(0.3)
        layer = file._layers[1]
        stored = mmap.mmap(file._file.fileno(), 0)[layer.offset : layer.offset + layer.nbytes]
        assert file._slots[1].memory[: layer.nbytes] == stored


@needs_kernels
def test_a_disk_that_fails_ends_the_engine_with_a_sentence(
    small_models: SmallModels, deep: Path, cache_folder: Path
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        os.ftruncate(streamed_layers(executor)[0].weights._file.fileno(), 4 * LAYER_BYTES)  # only this process could
        with pytest.raises(ExecutorError, match="weights of a layer cannot be read any more: the file ends"):
            outputs(executor, small_models.prompts)


@needs_kernels
def test_a_layer_that_was_read_is_there_whatever_the_disk_does(
    small_models: SmallModels, deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mapped weights a page can be taken back before it is used, and a disk that has failed then is a signal."""
    run_layer, ran = StreamedLayer.__call__, []
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3), enforce_eager=True)) as executor:
        file = streamed_layers(executor)[0].weights

        def fail_when_the_fourth_is_read(layer: StreamedLayer, *args: object) -> torch.Tensor:
            if layer._place == 3:
                file.acquire(3)
                settle(file)
                os.ftruncate(file._file.fileno(), 0)
            made = run_layer(layer, *args)
            ran.append(layer._place)
            return made

        monkeypatch.setattr(StreamedLayer, "__call__", fail_when_the_fourth_is_read)
        with pytest.raises(ExecutorError, match="cannot be read any more"):
            outputs(executor, small_models.prompts)
    assert ran == [0, 1, 2, 3, 4], "the fifth lay in the other slot already"


@needs_kernels
def test_decode_steps_are_graphs_that_wait_for_their_layers(
    small_models: SmallModels, deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(load(deep, 200, 0, deterministic=True, enforce_eager=True)) as whole,
        closing(load(deep, 200, 0, weights_memory_gb=gib(4), deterministic=True)) as on_disk,
    ):
        expected = outputs(whole, small_models.prompts).choices
        assert outputs(on_disk, small_models.prompts).choices == expected
        graphs = on_disk._worker.runner._cpu_graphs  # type: ignore[union-attr]
        assert graphs is not None
        assert graphs._graphs[GraphKind.LAYERS] is not None
        acquired: list[int] = []
        acquire = WeightFile.acquire

        def count(file: WeightFile, place: int) -> None:
            acquired.append(place)
            acquire(file, place)

        # All that were captured are replayed now, and no layer is called: what is patched is not what they call.
        monkeypatch.setattr(WeightFile, "acquire", count)
        read, stats = on_disk.weight_stats.read_bytes, on_disk.weight_stats  # type: ignore[union-attr]
        assert outputs(on_disk, small_models.prompts).choices == expected
        assert stats is not None
        layers, steps = stats.disk_bytes // LAYER_BYTES, (stats.read_bytes - read) // stats.disk_bytes
        assert len(acquired) < layers * steps / 2, "most steps are replayed"
        os.ftruncate(streamed_layers(on_disk)[0].weights._file.fileno(), 0)
        with pytest.raises(ExecutorError, match="weights of a layer cannot be read any more"):
            outputs(on_disk, small_models.prompts)


@needs_kernels
def test_a_full_disk_is_refused_at_the_start(deep: Path, cache_folder: Path) -> None:
    with largest_file(3 * LAYER_BYTES), pytest.raises(ModelError, match=r"cannot be kept in .*quire: File too large"):
        load(deep, 200, 0, weights_memory_gb=gib(3))
    assert list(cache_folder.iterdir()) == []


@needs_kernels
def test_a_folder_that_cannot_be_written_to_is_refused(deep: Path, cache_folder: Path) -> None:
    cache_folder.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot be kept in .*XDG_CACHE_HOME names another folder"):
        load(deep, 200, 0, weights_memory_gb=gib(3))


@needs_kernels
def test_a_folder_in_memory_is_refused(deep: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_file_system", lambda _: "tmpfs")
    with pytest.raises(ModelError, match="it lies in memory"):
        load(deep, 200, 0, weights_memory_gb=gib(3))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory")
def test_file_systems_in_memory_are_known(tmp_path: Path) -> None:
    assert streamed._file_system(Path("/dev/shm").stat().st_dev) == "tmpfs"
    assert streamed._file_system(0) == ""


@needs_kernels
def test_less_than_three_layers_are_refused(deep: Path, cache_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"is too little: .* three layers"):
        load(deep, 200, 0, weights_memory_gb=gib(2))


@pytest.mark.parametrize(
    ("sizes", "held", "reason"),
    [
        ([10, 10, 10, 6, 7, 10], 5, None),
        ([10, 10, 25, 10, 10, 10], 6, f"exceeded by {15 * mmap.PAGESIZE} bytes: layers of this model are larger"),
        ([10, 10, 25, 10, 10, 10], 5, f"exceeded by {15 * mmap.PAGESIZE} bytes: layers of this model are larger"),
        ([10, 10, 30, 10, 10, 10], 5, "exceeded by one layer of the two that are read: layers of this model are"),
    ],
)
def test_layers_larger_than_the_first_are_refused_where_they_are_too_much(
    cache_folder: Path, sizes: list[int], held: float, reason: str | None
) -> None:
    """``sizes`` are in pages, and ``held`` of the first layer's."""

    class Held:
        def __init__(self, pages: int) -> None:
            self.memory = empty_on_huge_pages(pages * mmap.PAGESIZE)

        is_capturable = True

        def __call__(self, *args: object) -> torch.Tensor:
            return self.memory

    def make() -> None:
        load_layers(range(len(sizes)), lambda index: Held(sizes[index]), held * sizes[0] * mmap.PAGESIZE / GIB)

    if reason is None:
        make()
    else:
        with pytest.raises(ModelError, match=reason):
            make()


def test_without_kernels_it_is_refused(deep: Path, cache_folder: Path) -> None:
    with cpu_path("torch"), pytest.raises(ModelError, match="needs the compiled kernels"):
        load(deep, 200, 0, weights_memory_gb=1)


def test_models_of_transformers_are_refused(small_models: SmallModels) -> None:
    with pytest.raises(ModelError, match="runs through transformers"):
        load(small_models.folder("gpt2"), 200, 0, weights_memory_gb=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights_memory_gb": 0}, "greater than 0"),
        ({"weights_memory_gb": float("inf")}, "less than or equal to 1048576"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineArgs.model_validate({"model": Path("model"), "weights_memory_gb": 1, **settings})
