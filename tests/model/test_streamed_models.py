"""Layers that lie on disk, of models with experts, with adapters, and shared by several ranks: the same tokens as in
memory, or as transformers makes.

Ranks are threads, so that none has to start.
"""

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import closing
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import EngineArgs
from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.executor.rank_worker import RankSettings
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.layers import streamed
from quire_engine.layers.streamed import AT_ONCE, Layer, WeightFile
from quire_engine.models.loader import read_model_config

from tests.model.driver import Driver, Sequence
from tests.model.models import SmallModels, greedy_oracle, small_model
from tests.model.ranks import OUTPUT_TOKENS, PROMPTS, generate
from tests.model.streamed import WITH_ADAPTERS, gib_of, needs_kernels, sequences_with_adapters, streamed_layers
from tests.support.executors import load_executor
from tests.support.processes import eventually
from tests.support.rank_threads import ranks_are_threads
from tests.support.variants import one_in

pytestmark = needs_kernels
LAYERS, POOL = 8, 4 << 20


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> list[WeightFile]:
    """Every file that is made."""
    made: list[WeightFile] = []
    make = WeightFile.make

    def record(slot_bytes: int) -> WeightFile:
        made.append(make(slot_bytes))
        return made[-1]

    monkeypatch.setattr(WeightFile, "make", record)
    return made


def load(folder: Path, **settings: Any) -> TorchExecutor:
    pools = {"kv_cache_memory": POOL, "swap_bytes": POOL}
    return load_executor(folder, **{"dtype": "float32", **pools, **settings})


def layer_bytes(folder: Path, **settings: Any) -> int:
    """What the packed weights of a layer take on each rank, of the largest one if they differ."""
    sizes: list[int] = []
    load_in_memory = streamed._load_in_memory

    def record(load_layer: Callable[[], Layer]) -> tuple[Layer, int]:
        layer, nbytes = load_in_memory(load_layer)
        sizes.append(nbytes)
        return layer, nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "_load_in_memory", record)
        load(folder, weights_memory_gb=1, **settings).close()
    return max(sizes)


def expected(models: SmallModels, folder: Path) -> list[list[int]]:
    return greedy_oracle(folder, models.prompts[4 : 4 + PROMPTS], OUTPUT_TOKENS)


@pytest.mark.parametrize(("name", "quantization"), list(one_in(2, ("mixtral", "qwen3-moe"), (None, "int8", "int4"))))
def test_experts_are_read_with_their_layer(
    small_models: SmallModels, tmp_path: Path, files: list[WeightFile], name: str, quantization: str | None
) -> None:
    changes = {"mlp_only_layers": []} if name == "qwen3-moe" else {}
    folder = small_model(name, tmp_path, num_hidden_layers=LAYERS, **changes)
    settings = {"quantization": quantization, "deterministic": True}
    size, number = layer_bytes(folder, **settings), LAYERS - 5 + AT_ONCE
    with (
        closing(load(folder, **settings)) as whole,
        closing(load(folder, weights_memory_gb=gib_of(5, size), **settings)) as on_disk,
    ):
        assert (len(streamed_layers(on_disk)), files[0].stats.disk_bytes) == (number, number * size)
        made = generate(on_disk, small_models)
        assert made.choices == generate(whole, small_models).choices
    if quantization is None:
        assert made.outputs == expected(small_models, folder)


def test_layers_with_experts_behind_one_without_are_refused(tmp_path: Path, cache_folder: Path) -> None:
    folder = small_model("qwen3-moe", tmp_path, num_hidden_layers=LAYERS, mlp_only_layers=[0])
    with pytest.raises(ModelError, match=r"is exceeded by .* layers of this model are larger than its first one"):
        load(folder, weights_memory_gb=gib_of(3, layer_bytes(folder)))


def test_smaller_layers_behind_one_with_experts_are_read_too(
    small_models: SmallModels, tmp_path: Path, cache_folder: Path
) -> None:
    folder = small_model("qwen3-moe", tmp_path, num_hidden_layers=LAYERS, mlp_only_layers=[2, 3, 6])
    with closing(load(folder, weights_memory_gb=gib_of(3, layer_bytes(folder)))) as executor:
        assert len(streamed_layers(executor)) == LAYERS - 1
        assert generate(executor, small_models).outputs == expected(small_models, folder)


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}])
def test_an_executor_that_is_closed_holds_no_weights(
    small_models: SmallModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
    sizes: dict[str, int],
) -> None:
    """Nor their file, while somebody still has the executor itself."""
    ranks_are_threads(monkeypatch)
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS)
    memory = gib_of(4, layer_bytes(folder, **sizes)) * sizes.get("tensor_parallel_size", 1)
    with closing(load(folder, weights_memory_gb=memory, **sizes)) as executor:
        generate(executor, small_models)
        file = weakref.ref(streamed_layers(executor)[0].weights)
        assert file() is not None
    gc.collect()
    eventually(lambda: file() is None)  # what is read ahead may still be on its way


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}])
def test_adapters_stay_beside_layers_that_are_read(
    small_models: SmallModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
    sizes: dict[str, int],
) -> None:
    ranks_are_threads(monkeypatch)
    folder = small_model("llama3", tmp_path, num_hidden_layers=LAYERS)
    sequences, wanted = sequences_with_adapters(folder, tmp_path, small_models.prompts[:9], OUTPUT_TOKENS)
    settings = {**WITH_ADAPTERS, **sizes}
    memory = gib_of(4, layer_bytes(folder, **settings)) * sizes.get("tensor_parallel_size", 1)
    with closing(load(folder, weights_memory_gb=memory, **settings)) as executor:
        assert len(streamed_layers(executor)) == LAYERS - 4 + AT_ONCE
        assert Driver(executor, seed=1, max_chunk=13).run(sequences) == wanted


def test_tokens_go_to_the_ranks_of_their_experts_while_layers_are_read(
    small_models: SmallModels, files: list[WeightFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    folder = small_model("mixtral", tmp_path, num_hidden_layers=LAYERS)
    settings = {"tensor_parallel_size": 2, "all2all_backend": "alltoall"}
    memory = gib_of(4, layer_bytes(folder, **settings)) * 2
    sequences = [Sequence(number, prompt, OUTPUT_TOKENS) for number, prompt in enumerate(small_models.prompts[:6])]
    expected = greedy_oracle(folder, small_models.prompts[:6], OUTPUT_TOKENS)
    with closing(load(folder, weights_memory_gb=memory, **settings)) as executor:
        assert streamed_layers(executor)
        assert Driver(executor, seed=1, max_chunk=13).run(sequences) == expected
    assert len(files) == 2


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "held", "number"),
    list(one_in(2, ("llama2", "mixtral"), ((2, 1, 4, 6), (1, 2, 3, 3), (2, 2, 3, 3)))),
)
def test_each_rank_reads_its_own_layers(
    small_models: SmallModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[WeightFile],
    name: str,
    tensor: int,
    stages: int,
    held: int,
    number: int,
) -> None:
    """``held`` of a rank's layers may be in memory, so ``number`` are not."""
    ranks_are_threads(monkeypatch)
    folder = small_model(name, tmp_path, num_hidden_layers=LAYERS)
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "deterministic": True}
    memory = gib_of(held, layer_bytes(folder, **settings)) * tensor * stages
    with (
        closing(load(folder, **settings)) as whole,
        closing(load(folder, weights_memory_gb=memory, **settings)) as on_disk,
    ):
        assert [len(file._layers) for file in files] == [number] * (tensor * stages)
        made = generate(on_disk, small_models, num_stages=stages)
        assert made.outputs == expected(small_models, folder)
        assert made.choices == generate(whole, small_models, num_stages=stages).choices
    assert all(file.stats.read_bytes > 5 * file.stats.disk_bytes for file in files), "they are read in each step"


@pytest.mark.parametrize(
    ("nodes", "parts"), [(1, [2.0, 2.0, 1.5, 1.5]), (2, [3.5, 3.5, 3.5, 3.5])], ids=["one machine", "two"]
)
def test_ranks_of_a_machine_share_the_memory_as_its_layers(tmp_path: Path, nodes: int, parts: list[float]) -> None:
    folder = small_model("llama2", tmp_path, num_hidden_layers=7)
    engine = EngineArgs(model=folder, tensor_parallel_size=2, pipeline_parallel_size=2, weights_memory_gb=7)
    settings = RankSettings(engine, read_model_config(folder), "cpu", threads=1, nnodes=nodes)
    assert settings.num_layers() == [4, 4, 3, 3]
    assert [settings.weights_memory_gb(rank) for rank in range(4)] == parts


@pytest.mark.parametrize(
    ("sizes", "rank"),
    # Not the last stage: rank 0 waits for what it sends until it is killed, which a thread cannot be.
    [({"tensor_parallel_size": 2}, 0), ({"tensor_parallel_size": 2}, 1), ({"pipeline_parallel_size": 2}, 0)],
)
def test_a_disk_that_fails_for_one_rank_ends_the_engine_with_a_sentence(
    small_models: SmallModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[WeightFile],
    sizes: dict[str, int],
    rank: int,
) -> None:
    ranks_are_threads(monkeypatch)
    folder = small_model("llama2", tmp_path, num_hidden_layers=LAYERS)
    with closing(load(folder, weights_memory_gb=2 * gib_of(3, layer_bytes(folder, **sizes)), **sizes)) as executor:
        own = streamed_layers(executor)[0].weights
        (failing,) = [file for file in files if (file is own) == (rank == 0)]
        reads: list[int] = []
        preadv, most = os.preadv, 1 << 30

        def read_or_fail(file: int, *rest: Any) -> int:
            if file == failing._file.fileno():
                reads.append(file)
                if len(reads) > most:
                    raise OSError(EIO, os.strerror(EIO))
            return preadv(file, *rest)

        monkeypatch.setattr(os, "preadv", read_or_fail)
        generate(executor, small_models, num_stages=sizes.get("pipeline_parallel_size", 1))
        most = len(reads) * 7 // 4  # in a decode step
        with pytest.raises(ExecutorError, match="weights of a layer cannot be read any more: Input/output error"):
            generate(executor, small_models, num_stages=sizes.get("pipeline_parallel_size", 1))
