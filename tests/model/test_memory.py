"""Loaded without a size for its KV pool, a model takes what its surroundings leave, and says what it took."""

import logging
from pathlib import Path

import pytest
from quire_engine.core.step import SchedulerOutput
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.worker import memory as worker_memory
from quire_engine.worker.memory import CpuMemory

from tests.model.engine import run
from tests.model.models import OUTPUT_TOKENS, SmallModels
from tests.support.executors import load_executor
from tests.support.fake_container import container

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def folder(small_models: SmallModels) -> Path:
    return small_models.folder("llama3")


def confined(monkeypatch: pytest.MonkeyPatch, root: Path, spare: int) -> CpuMemory:
    """Executors find themselves in a container whose limit is so many bytes above what this process holds."""
    memory = CpuMemory(container(root, CpuMemory().used() + spare))
    monkeypatch.setattr(worker_memory, "device_memory", lambda device: memory)
    return memory


@pytest.mark.parametrize("utilization", [None, 0.97])
def test_a_containers_limit_is_filled_with_pools_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, utilization: float | None
) -> None:
    memory = confined(monkeypatch, tmp_path, 1 * GIB)
    executor = load_executor(folder, swap_bytes=64 * MIB, gpu_memory_utilization=utilization)
    capacity = executor.kv_cache_config
    pools = (capacity.device_blocks + capacity.host_blocks) * capacity.block_bytes
    usable = memory.limit * (utilization or 0.9)
    assert capacity.host_blocks * capacity.block_bytes == pytest.approx(64 * MIB, rel=0.01)
    assert memory.used() + pools <= usable
    assert memory.used() + pools + worker_memory.GROWTH_RESERVE >= 0.9 * usable, "and not much less"


def test_both_pools_share_a_small_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    memory = confined(monkeypatch, tmp_path, 300 * MIB)
    executor = load_executor(folder, swap_bytes=512 * MIB, gpu_memory_utilization=1.0)
    assert 0 < executor.kv_cache_config.host_blocks <= executor.kv_cache_config.device_blocks
    pools = (
        executor.kv_cache_config.device_blocks + executor.kv_cache_config.host_blocks
    ) * executor.kv_cache_config.block_bytes
    assert memory.used() + pools < memory.limit


def test_a_limit_that_leaves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    memory = confined(monkeypatch, tmp_path, 20 * MIB)
    with pytest.raises(ModelError, match="no memory for KV blocks") as caught:
        load_executor(folder, swap_bytes=0)
    assert f"the container's limit is {memory.limit / MIB:,.1f} MiB" in str(caught.value)
    assert "--max-num-batched-tokens" in str(caught.value)


def test_a_given_size_beyond_the_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    confined(monkeypatch, tmp_path, 300 * MIB)
    assert load_executor(folder, kv_cache_memory=100 * MIB, swap_bytes=0).kv_cache_config.device_blocks > 0
    with pytest.raises(ModelError, match="no memory for a KV pool"):
        load_executor(folder, kv_cache_memory=GIB, swap_bytes=0)


def test_an_engine_on_a_machine_of_its_users_leaves_most_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    memory = CpuMemory(container(tmp_path, None, total=64 * GIB, available=4 * GIB))
    monkeypatch.setattr(worker_memory, "device_memory", lambda device: memory)
    capacity = load_executor(folder, swap_bytes=0).kv_cache_config
    assert capacity.device_blocks * capacity.block_bytes == pytest.approx(GIB, rel=0.1)


def test_the_largest_step_is_as_large_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    ran: list[SchedulerOutput] = []
    run_step = TorchExecutor.execute_model

    def watched(self: TorchExecutor, scheduler_output: SchedulerOutput) -> object:
        ran.append(scheduler_output)
        return run_step(self, scheduler_output)

    monkeypatch.setattr(TorchExecutor, "execute_model", watched)
    settings = {"swap_bytes": 0, "max_num_batched_tokens": 700, "max_num_seqs": 9}
    executor = load_executor(folder, **settings)
    assert (ran[0].num_tokens, len(ran[0].chunks)) == (700, 9)
    assert executor.execute_model(ran[0]).errors == {}, "what was tried can be run"
    ran.clear()
    load_executor(folder, kv_cache_memory=MIB, **settings)
    assert not any(scheduler_output.total_num_draws for scheduler_output in ran), "a given size needs no such step"


def test_a_step_that_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(self: TorchExecutor, scheduler_output: SchedulerOutput) -> None:
        raise RuntimeError("out of memory: tried to allocate 80 GiB.\nmore")

    monkeypatch.setattr(TorchExecutor, "execute_model", fail)
    with pytest.raises(ModelError, match=r"tried to allocate 80 GiB; lower --max-num-batched-tokens"):
        load_executor(folder, swap_bytes=0)


def test_what_was_decided_is_logged_in_one_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    confined(monkeypatch, tmp_path, GIB)
    with caplog.at_level(logging.INFO):
        executor = load_executor(folder, swap_bytes=64 * MIB)
    records = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    rows = ["limit", "process", "weights", "activations", "kept free", "KV pool", "host pool", "longest request"]
    assert [record[8:24].strip() for record in records] == rows
    capacity = executor.kv_cache_config
    assert f"{capacity.device_blocks} blocks, {capacity.usable_tokens} tokens" in records[5]
    assert "256 tokens" in records[-1]


def test_blocks_that_were_used_for_measuring_hold_nothing_that_is_found_again(
    small_models: SmallModels, folder: Path
) -> None:
    from quire_proto.sampling import SamplingParams

    executor = load_executor(folder, dtype="float32", kv_cache_memory=MIB, swap_bytes=MIB)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    made = run(executor, small_models.prompts[:4], [params] * 4)
    assert made.outputs == small_models.outputs("llama3", range(4))


def test_rates_are_measured_for_each_executor(folder: Path) -> None:
    rates = load_executor(folder, kv_cache_memory=MIB, swap_bytes=MIB).rates
    assert 10 < rates.tokens_per_second < 1e9
    assert 1e5 < rates.bytes_per_second < 1e13
