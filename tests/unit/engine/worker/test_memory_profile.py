"""The largest step is as large as a step can be, and rates are those of the quickest of a few tries."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.worker import memory
from quire_engine.worker.memory import largest_step, measure_rates

VOCAB = 50


@given(st.integers(1, 600), st.integers(1, 80), st.integers(1, 300), st.sampled_from([1, 3, 16]))
def test_the_largest_step_has_as_many_tokens_and_sequences_as_are_allowed(
    tokens: int, sequences: int, length: int, block_size: int
) -> None:
    scheduler_output = largest_step(tokens, sequences, length, block_size, VOCAB)
    assert len(scheduler_output.chunks) == min(sequences, tokens)
    assert scheduler_output.num_tokens == min(tokens, len(scheduler_output.chunks) * length)
    for chunk, new in zip(scheduler_output.chunks, scheduler_output.new, strict=True):
        assert 1 <= chunk.length <= length
        assert chunk.row == new.row
        assert all(set(table) == {1} and len(table) * block_size >= chunk.end for table in new.block_ids)
        assert chunk.num_draws == len(new.sample_requests) == 1
        assert len(new.token_ids) == chunk.length
        assert all(0 <= token < VOCAB for token in new.token_ids)
    assert len({chunk.sequence_id for chunk in scheduler_output.chunks}) == len(scheduler_output.chunks)


class Machine:
    """An executor whose time is made up: some seconds a token and a copied byte, and some noise in each run."""

    depth = 1

    def __init__(self, capacity: KVCacheConfig, noise: list[float], token: float = 1e-5, byte: float = 1e-9) -> None:
        self.kv_cache_config = capacity
        self.now = 0.0
        self.runs: list[SchedulerOutput] = []
        self._noise, self._token, self._byte = noise, token, byte

    def clock(self) -> float:
        return self.now

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        for new in scheduler_output.new:
            for table in new.block_ids:
                assert all(1 <= block < self.kv_cache_config.device_blocks for block in table)
        assert all(
            copy.target < self.kv_cache_config.host_blocks for copy in scheduler_output.copies.blocks_to_swap_out
        )
        seconds = (
            scheduler_output.num_tokens * self._token
            + scheduler_output.num_swapped_blocks * self.kv_cache_config.block_bytes * self._byte
        )
        self.now += seconds + self._noise[len(self.runs) % len(self._noise)]
        self.runs.append(scheduler_output)
        return ModelOutput()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], Machine]:
    def use(machine: Machine) -> Machine:
        monkeypatch.setattr(memory, "perf_counter", machine.clock)
        return machine

    return use


def test_rates_are_what_the_machine_does_when_nothing_disturbs_it(timed: Callable[[Machine], Machine]) -> None:
    machine = timed(Machine(KVCacheConfig(16, 100, 50, 4096), noise=[0.01, 0.003, 0.0, 0.02, 0.001]))
    rates = measure_rates(machine, 2048, VOCAB)
    assert rates.tokens_per_second == pytest.approx(1e5)
    assert rates.bytes_per_second == pytest.approx(1e9)


@given(st.integers(2, 40), st.integers(0, 40), st.integers(1, 1000), st.sampled_from([1, 16]))
def test_any_pool_can_be_measured(device: int, host: int, length: int, block_size: int) -> None:
    machine = Machine(KVCacheConfig(block_size, device, host, 4096), noise=[0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "perf_counter", machine.clock)
        rates = measure_rates(machine, length, VOCAB)
    assert rates.tokens_per_second == pytest.approx(1e5)
    assert rates.bytes_per_second == (pytest.approx(1e9) if host else math.inf)


def test_a_slow_machine_is_not_kept_waiting(timed: Callable[[Machine], Machine]) -> None:
    machine = timed(Machine(KVCacheConfig(16, 100, 50, 4096), noise=[0.0], token=0.1, byte=1e-3))
    rates = measure_rates(machine, 2048, VOCAB)
    assert len(machine.runs) == 2, "one try each"
    assert rates.tokens_per_second == pytest.approx(10)


def test_only_a_few_blocks_are_touched(timed: Callable[[Machine], Machine]) -> None:
    machine = timed(Machine(KVCacheConfig(16, 1 << 20, 1 << 20, 1 << 20), noise=[0.0]))
    measure_rates(machine, 2048, VOCAB)
    assert max(scheduler_output.num_swapped_blocks for scheduler_output in machine.runs) <= 16
