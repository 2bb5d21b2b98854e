"""Prefixes that come back from disk, in another engine than the one that stored them, make the same tokens, on one rank
or on several.
"""

import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import EngineArgs, EngineConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.request import Request
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import make_scheduler
from quire_proto.sampling import SamplingParams

from tests.model.models import SmallModels, greedy_oracle
from tests.support.executors import load_executor
from tests.support.rank_threads import ranks_are_threads

MODEL = "llama3"
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LOADING_PAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e12)  # however small the model
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def generate(folder: Path, disk: Path | None, rounds: list[list[list[int]]], **settings: Any) -> Any:
    """The outputs of the rounds' prompts by an engine that begins and ends here, and its counters."""
    where = {} if disk is None else {"kv_disk_path": disk, "kv_disk_space": 0.01}
    args = {
        "kv_cache_memory": 1 << 20,
        "swap_space": 1 / 1024,
        "block_size": 4,
        "dtype": "float32",
        **where,
        **settings,
    }
    config = EngineArgs(model=folder, **args)
    executor = TorchExecutor.load(config)
    outputs: dict[str, list[int]] = {}

    def receive(step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            assert output.error is None
            outputs.setdefault(output.request_id, []).extend(output.token_ids)

    executor.rates = LOADING_PAYS
    number = 0
    try:
        core = EngineCore(make_scheduler(config, executor), executor, receive)
        for prompts in rounds:
            for prompt in prompts:
                core.scheduler.add_request(Request(str(number), prompt, GREEDY))
                number += 1
            for _ in range(20_000):
                if not core.scheduler.has_work:
                    break
                core.step()
            assert not core.scheduler.has_work
        return [outputs[str(index)] for index in range(number)], core.scheduler.stats
    finally:
        executor.close()


@pytest.fixture
def prompts() -> list[list[int]]:
    """Two prompts of many blocks."""
    return [[(7 * i + 3 * number) % 60 + 1 for i in range(33)] for number in range(2)]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"async_scheduling": True},
        TENSOR,
        {**TENSOR, "async_scheduling": True},
        PIPELINE,
        {**TENSOR, **PIPELINE},
    ],
    ids=str,
)
def test_a_later_engine_finds_what_was_used_twice_and_makes_the_same_tokens(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, None, [prompts], **settings)
    if "kv_cache_dtype" not in settings:
        assert expected == greedy_oracle(folder, prompts, GREEDY.max_tokens)
    first, stored = generate(folder, tmp_path, [prompts, prompts], **settings)
    later, loaded = generate(folder, tmp_path, [prompts], **settings)
    assert first == expected * 2
    assert later == expected
    assert stored.disk_blocks_stored == 16
    assert loaded.prefix_disk_tokens == 64


def damage(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def test_what_was_damaged_meanwhile_is_computed(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, tmp_path, [prompts, prompts])
    damage(tmp_path / "0" / "blocks")
    later, statistics = generate(folder, tmp_path, [prompts])
    assert later == expected[:2]
    assert statistics.prefix_disk_tokens == 0
    # Where the first loads took long, the other prompts are computed without a look at the disk.
    assert 0 < statistics.disk_failures["damaged"] <= 16


@pytest.fixture(params=[TENSOR, PIPELINE, {**TENSOR, **PIPELINE}], ids=str)
def ranks(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of an engine of several ranks."""
    return request.param


def test_what_one_rank_lacks_is_computed(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """As when all ranks are killed, and one of them had written less than the others."""
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, tmp_path, [prompts, prompts], **ranks)
    index = tmp_path / "0" / "rank-1" / "index"
    os.truncate(index, index.stat().st_size // 2)
    later, statistics = generate(folder, tmp_path, [prompts], **ranks)
    assert later == expected[:2]
    assert 0 < statistics.prefix_disk_tokens < 64
    assert not statistics.disk_failures


def test_what_was_damaged_on_one_rank_is_computed(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path, ranks: dict[str, Any]
) -> None:
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, tmp_path, [prompts, prompts], **ranks)
    damage(tmp_path / "0" / "rank-1" / "blocks")
    later, statistics = generate(folder, tmp_path, [prompts], **ranks)
    assert later == expected[:2]
    assert statistics.prefix_disk_tokens == 0
    assert 0 < statistics.disk_failures["damaged"] <= 16


@pytest.fixture
def full_disk_of_rank_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing more can be written into its blocks once they are open."""
    write = os.pwrite

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/0/rank-1/blocks"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("full_disk_of_rank_1")
def test_a_full_disk_of_one_rank_turns_the_disk_off_and_fails_no_request(
    small_models: SmallModels,
    prompts: list[list[int]],
    tmp_path: Path,
    ranks: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, None, [prompts], **ranks)
    outputs, statistics = generate(folder, tmp_path, [prompts] * 3, **ranks)
    assert outputs == expected * 3
    assert statistics.disk_failures["failed"]
    assert not statistics.disk_blocks_stored
    assert "rank 1: [Errno 28] No space left on device" in caplog.text
    assert not generate(folder, tmp_path, [prompts], **ranks)[1].prefix_disk_tokens


def test_a_rank_that_cannot_open_its_folder_is_no_reason_not_to_run(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "rank-1").write_text("")
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, None, [prompts], **TENSOR)
    outputs, statistics = generate(folder, tmp_path, [prompts, prompts], **TENSOR)
    assert outputs == expected * 2
    assert not statistics.disk_blocks_stored
    assert "cannot be used: rank 1: [Errno 17]" in caplog.text


def test_another_division_finds_nothing(small_models: SmallModels, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, tmp_path, [prompts, prompts], **TENSOR)
    later, statistics = generate(folder, tmp_path, [prompts], **PIPELINE)
    assert later == expected[:2]
    assert not statistics.prefix_disk_tokens
    assert not statistics.disk_failures


def test_other_settings_find_nothing(small_models: SmallModels, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = small_models.folder(MODEL)
    generate(folder, tmp_path, [prompts, prompts])
    _, statistics = generate(folder, tmp_path, [prompts], deterministic=True)
    assert not statistics.prefix_disk_tokens


def test_a_folder_that_cannot_be_used_is_no_reason_not_to_run(
    small_models: SmallModels, prompts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = small_models.folder(MODEL)
    expected, _ = generate(folder, None, [prompts])
    outputs, statistics = generate(folder, tmp_path / "file", [prompts, prompts])
    assert outputs == expected * 2
    assert not statistics.disk_blocks_stored
    assert "KV blocks are not kept on disk" in caplog.text


def test_there_are_no_more_slots_than_the_file_system_has_room_for(small_models: SmallModels, tmp_path: Path) -> None:
    pools = {"kv_cache_memory": 1 << 20, "swap_bytes": 1 << 20}
    disk = {"kv_disk_path": tmp_path / "kv", "kv_disk_space": 1 << 20}
    with closing(load_executor(small_models.folder(MODEL), dtype="float32", **pools, **disk)) as executor:
        contents = executor.disk_contents
        assert contents is not None
        assert 0 < contents.num_blocks * contents.block_bytes <= shutil.disk_usage(tmp_path).total


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_disk_path": None}, "belong together"),
        ({"kv_disk_path": ""}, "it is empty"),
        ({"kv_disk_space": 0}, "belong together"),
        ({"kv_disk_space": math.inf}, "less than or equal to 1048576"),
        ({"swap_space": 1e300}, "less than or equal to 1048576"),
        ({"weights_memory_gb": 1e300}, "less than or equal to 1048576"),
        ({"enable_prefix_caching": False}, "needs --enable-prefix-caching"),
        ({"enable_host_caching": False}, "needs --enable-prefix-caching"),
        ({"swap_space": 0}, "needs --enable-prefix-caching"),
    ],
)
def test_settings_that_it_cannot_work_with_are_refused(changes: dict[str, Any], reason: str) -> None:
    settings: dict[str, Any] = {"model": Path(), "kv_disk_path": Path("kv"), "kv_disk_space": 1}
    EngineArgs(**settings)
    with pytest.raises(ValueError, match=reason):
        EngineArgs(**{**settings, **changes})


def test_ranks_of_several_machines_are_refused() -> None:
    settings: dict[str, Any] = {"model": Path(), "tensor_parallel_size": 2, "nnodes": 2}
    EngineConfig(**settings)
    with pytest.raises(ValueError, match="--kv-disk-path and --nnodes exclude each other"):
        EngineConfig(**settings, kv_disk_path=Path("kv"), kv_disk_space=1)
