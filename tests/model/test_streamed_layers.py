"""Layers that lie on disk (``--weights-memory-gb``): the same tokens and log-probabilities as in memory, in the memory
that was given, and a sentence for everything that cannot be.
"""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from quire_engine.config import EngineArgs
from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.layers import streamed
from quire_engine.layers.streamed import AT_ONCE, StreamedLayer, WeightFile, choose_streamed
from quire_proto.sampling import SamplingParams
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.engine import Run, load, run
from tests.model.models import SmallModels
from tests.support.kernels import cpu_path

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
LAYERS, HIDDEN, INNER = 10, 128, 512
LAYER_BYTES = 4 * (2 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)  # two of four heads have keys
GIB = 1 << 30
PARAMS = [SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)] * 6


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten layers."""
    return write_model(tmp_path_factory.mktemp("deep"), seed=0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the file; kernels are found in the one before."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"


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


def gib(layers: float, size: int = LAYER_BYTES) -> float:
    """So many layers in memory, and a little more than that."""
    return (layers + 0.1) * size / GIB


def outputs(executor: TorchExecutor, prompts: list[list[int]]) -> Run:
    return run(executor, prompts[: len(PARAMS)], PARAMS, chunk=32)


def streamed_layers(executor: TorchExecutor) -> list[StreamedLayer]:
    layers = executor._runner._model._layers  # type: ignore[union-attr]
    return [layer for layer in layers if isinstance(layer, StreamedLayer)]


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


@needs_kernels
@pytest.mark.parametrize("held", [3, 6, 8])
@pytest.mark.parametrize(
    ("dtype", "quantization", "part"),
    [("float32", None, 1), ("bfloat16", None, 0.5), ("float32", "int8", 0.27), ("float32", "int4", 0.17)],
)
def test_tokens_are_those_of_the_model_in_memory(
    small_models: SmallModels, deep: Path, cache: Path, dtype: str, quantization: str | None, part: float, held: int
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
def test_a_model_that_fits_lies_in_memory_and_has_graphs(deep: Path, cache: Path) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(LAYERS))) as executor:
        assert not streamed_layers(executor)
        assert executor._runner._cpu_graphs is not None  # type: ignore[union-attr]
    assert not cache.exists()


@needs_kernels
def test_no_more_is_resident_than_two_layers_of_the_file(
    small_models: SmallModels, deep: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        layers = streamed_layers(executor)
        file = layers[0].file
        assert len(layers) == LAYERS - 1
        assert file._ahead is not None, "the first steps have been measured"
        file._ahead[1].result()
        assert file.resident_bytes() == LAYER_BYTES, "what was packed has left memory, but for the next to be used"
        acquire = WeightFile.acquire

        def look(self: WeightFile, place: int) -> None:
            acquire(self, place)
            assert self._ahead is not None
            self._ahead[1].result()  # both are there: the most that can be
            seen.append(self.resident_bytes())

        monkeypatch.setattr(WeightFile, "acquire", look)
        outputs(executor, small_models.prompts)
        assert max(seen) == AT_ONCE * LAYER_BYTES
        assert min(seen) == AT_ONCE * LAYER_BYTES
        # The control: without dropping, all of the file stays.
        monkeypatch.setattr(WeightFile, "release", lambda *_: None)
        outputs(executor, small_models.prompts)
        assert max(seen) == len(layers) * LAYER_BYTES


@needs_kernels
def test_the_file_has_no_name_and_takes_the_disk_of_its_layers(deep: Path, cache: Path) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(4))) as executor:
        file = streamed_layers(executor)[0].file
        assert list(cache.iterdir()) == [], "nobody can change it, and nothing stays if the process is killed"
        status = os.fstat(file._file.fileno())
        assert status.st_size == len(streamed_layers(executor)) * LAYER_BYTES
        assert status.st_blocks * 512 >= status.st_size


@needs_kernels
def test_a_changed_checkpoint_is_packed_anew(small_models: SmallModels, tmp_path: Path, cache: Path) -> None:
    for seed in (1, 2):
        folder = write_model(tmp_path / "model", seed)
        with closing(load(folder, 200, 0)) as whole, closing(load(folder, 200, 0, weights_memory_gb=gib(3))) as on_disk:
            assert outputs(on_disk, small_models.prompts).outputs == outputs(whole, small_models.prompts).outputs


@needs_kernels
def test_engines_that_start_at_the_same_time_have_a_file_each(
    small_models: SmallModels, deep: Path, tmp_path: Path, cache: Path
) -> None:
    folders = [deep, write_model(tmp_path / "other", seed=3)]
    with ThreadPoolExecutor(2) as pool:
        executors = list(pool.map(lambda folder: load(folder, 200, 0, weights_memory_gb=gib(3)), folders))
    for folder, executor in zip(folders, executors, strict=True):
        with closing(executor), closing(load(folder, 200, 0)) as whole:
            assert outputs(executor, small_models.prompts).outputs == outputs(whole, small_models.prompts).outputs


@needs_kernels
def test_a_step_after_one_that_failed_is_right(
    small_models: SmallModels, deep: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        expected = outputs(executor, small_models.prompts).choices
        fourth = streamed_layers(executor)[3]
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(fourth, "_layer", None)
            for layer in streamed_layers(executor)[:3]:
                layer.file.acquire(layer._place)
                layer.file.release(layer._place)
            with pytest.raises(TypeError):
                fourth()
        assert outputs(executor, small_models.prompts).choices == expected
        assert fourth.file.resident_bytes() <= AT_ONCE * LAYER_BYTES


@needs_kernels
def test_a_disk_that_cannot_be_read_ends_the_engine_with_a_sentence(
    small_models: SmallModels, deep: Path, cache: Path
) -> None:
    with closing(load(deep, 200, 0, weights_memory_gb=gib(3))) as executor:
        os.ftruncate(streamed_layers(executor)[0].file._file.fileno(), 4 * LAYER_BYTES)  # only this process could
        with pytest.raises(ExecutorError, match="weights of a layer cannot be read"):
            outputs(executor, small_models.prompts)


@needs_kernels
def test_a_full_disk_is_refused_at_the_start(deep: Path, cache: Path) -> None:
    with largest_file(3 * LAYER_BYTES), pytest.raises(ModelError, match=r"cannot be kept in .*quire: File too large"):
        load(deep, 200, 0, weights_memory_gb=gib(3))
    assert list(cache.iterdir()) == []


@needs_kernels
def test_a_folder_that_cannot_be_written_to_is_refused(deep: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot be kept in .*XDG_CACHE_HOME names another folder"):
        load(deep, 200, 0, weights_memory_gb=gib(3))


@needs_kernels
def test_a_folder_in_memory_is_refused(deep: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_file_system", lambda _: "tmpfs")
    with pytest.raises(ModelError, match="it lies in memory"):
        load(deep, 200, 0, weights_memory_gb=gib(3))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory")
def test_file_systems_in_memory_are_known(tmp_path: Path) -> None:
    assert streamed._file_system(Path("/dev/shm").stat().st_dev) == "tmpfs"
    assert streamed._file_system(0) == ""


@needs_kernels
def test_less_than_three_layers_are_refused(deep: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="is too little: three layers"):
        load(deep, 200, 0, weights_memory_gb=gib(2))


@needs_kernels
def test_layers_larger_than_the_first_are_refused_where_they_are_too_much() -> None:
    streamed._check_sizes([10, 10, 20, 10], [2, 3], 50)
    with pytest.raises(ModelError, match="exceeded by 1 bytes"):
        streamed._check_sizes([10, 10, 20, 10], [2, 3], 49)


def test_without_kernels_it_is_refused(deep: Path, cache: Path) -> None:
    with cpu_path("torch"), pytest.raises(ModelError, match="needs the compiled kernels"):
        load(deep, 200, 0, weights_memory_gb=1)


@pytest.mark.parametrize(
    ("name", "reason"), [("mixtral", "models with experts"), ("gpt2", "runs through transformers")]
)
def test_models_that_cannot_be_are_refused(small_models: SmallModels, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(small_models.folder(name), 200, 0, weights_memory_gb=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "is for one process"),
        ({"pipeline_parallel_size": 2}, "is for one process"),
        ({"enable_lora": True}, "exclude each other"),
        ({"weights_memory_gb": 0}, "greater than 0"),
        ({"weights_memory_gb": float("inf")}, "finite"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineArgs.model_validate({"model": Path("model"), "weights_memory_gb": 1, **settings})
