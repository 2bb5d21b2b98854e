"""An engine that slept makes the tokens that one makes that did not, and its memory was given back meanwhile."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from quire_engine.core.engine_core import Sleep, WakeUp
from quire_engine.core.executor import SleepError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.worker.sleep import device_storages
from quire_proto.errors import ErrorCode

from tests.model.engine import BLOCK_SIZE, load
from tests.model.models import SmallModels
from tests.support.pages import ROOT
from tests.support.running_core import PROMPT, SECONDS, Running

DEMO = ROOT / "demo" / "model"


@pytest.fixture
def demo() -> Iterator[Running]:
    with closing(Running(load(DEMO, 64, 32))) as running:
        yield running


def contents(executor: TorchExecutor) -> list[torch.Tensor]:
    """Bytes of all weights, whatever they are held as."""
    storages = device_storages(executor._worker.runner._model, torch.device("cpu"))
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in storages]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral", "gpt2"])
def test_tokens_after_wake_up_are_those_before_sleep(small_models: SmallModels, name: str) -> None:
    with closing(Running(load(small_models.folder(name), 64, 0))) as running:
        expected, weights = running.run(), contents(running.executor)
        for _ in range(2):  # again, as a second time frees what the first has made
            assert running.ask(Sleep) is None
            assert running.core.is_sleeping
            assert running.ask(WakeUp) is None
            assert not running.core.is_sleeping
            assert running.run() == expected
        assert all(map(torch.equal, contents(running.executor), weights))


def test_a_request_wakes_the_engine_and_nothing_of_it_is_lost(demo: Running) -> None:
    expected = demo.run()
    assert demo.ask(Sleep) is None
    assert demo.run() == expected
    assert not demo.core.is_sleeping
    assert demo.scheduler.stats.wake_ups == 1


def test_weights_take_no_memory_while_it_sleeps(demo: Running) -> None:
    demo.run()
    before = contents(demo.executor)
    demo.ask(Sleep)
    asleep = contents(demo.executor)  # pages that were given back are zeros; the first and the last may be shared
    whole = [part[4096:-4096] for part in asleep if len(part) > 16384]
    assert len(whole) > 10
    assert not any(map(torch.Tensor.any, whole))
    demo.ask(WakeUp)
    assert all(map(torch.equal, contents(demo.executor), before))


def test_a_request_that_runs_is_not_put_to_sleep(demo: Running) -> None:
    expected = demo.run()
    demo.submit(PROMPT)
    refusal = demo.ask(Sleep)
    assert refusal is not None
    assert refusal.code is ErrorCode.OVERLOADED
    assert [token for output in demo.outputs() for token in output.token_ids] == expected


def test_what_was_used_twice_is_cached_on_the_host_when_it_sleeps(demo: Running) -> None:
    expected = [demo.run() for _ in range(3)][-1]
    stats = demo.scheduler.stats
    assert stats.prefix_host_tokens == 0
    demo.ask(Sleep)
    assert demo.scheduler.kv_cache_manager.device_pool.stored_blocks() == []
    assert demo.run() == expected
    assert stats.prefix_host_tokens == 3 * BLOCK_SIZE
    demo.scheduler.kv_cache_manager.check_integrity()


def test_routers_hear_that_it_sleeps_and_what_is_not_cached_any_more(demo: Running) -> None:
    demo.run()
    stored = {event.block_hash for event in demo.scheduler.kv_cache_manager.stored_blocks()}
    while not demo.published.empty():
        demo.published.get()
    demo.ask(Sleep)
    steps = [demo.published.get(timeout=SECONDS) for _ in range(2)]
    assert [step.load.is_sleeping for step in steps] == [False, True]
    assert {event.block_hash for step in steps for event in step.kv_events} == stored
    demo.ask(WakeUp)
    assert not demo.published.get(timeout=SECONDS).load.is_sleeping


def test_an_engine_that_finds_no_memory_sleeps_on_and_says_so(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = demo.run()
    demo.ask(Sleep)

    def refuse(_: object) -> None:
        raise SleepError("the GPU does not have the memory for the weights")

    with monkeypatch.context() as patched:
        patched.setattr(TorchExecutor, "wake_up", refuse)
        failure = demo.ask(WakeUp)
        assert failure is not None
        assert failure.code is ErrorCode.UNAVAILABLE
        demo.submit(PROMPT)
        (output,) = demo.outputs()
        assert output.error is not None
        assert "cannot wake up: the GPU does not have the memory" in output.error.message
        assert demo.core.is_sleeping
    assert demo.run() == expected


def test_an_engine_that_cannot_put_its_weights_away_stays_awake(
    demo: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = demo.run()

    def refuse() -> object:
        return (tmp_path / "read-only").open("xb").__enter__() and (tmp_path / "read-only").open("rb", buffering=0)

    monkeypatch.setattr("quire_engine.worker.sleep._unnamed_file", refuse)
    failure = demo.ask(Sleep)
    assert failure is not None
    assert "cannot be written to a file" in failure.message
    assert not demo.core.is_sleeping
    assert demo.run() == expected


def anonymous_bytes(executor: TorchExecutor) -> int:
    """Memory of rank 1's process that no file has the contents of."""
    (rank,) = executor._worker.ranks._workers._processes
    status = Path(f"/proc/{rank.pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_all_ranks_sleep_and_wake_up(sizes: dict[str, int]) -> None:
    with closing(Running(load(DEMO, 64, 32, **sizes))) as running:
        expected = running.run()
        for _ in range(2):
            awake = anonymous_bytes(running.executor)
            assert running.ask(Sleep) is None
            assert anonymous_bytes(running.executor) < awake - (3 << 20)  # of about 5 MB of weights
            assert running.ask(WakeUp) is None
            assert running.run() == expected


@pytest.mark.parametrize("cannot", ["sleep", "wake_up"])
def test_if_one_rank_cannot_change_none_does(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, cannot: str
) -> None:
    def refuse() -> None:
        raise SleepError("rank 0 has its reasons")

    with closing(Running(load(small_models.folder("llama3"), 64, 0, tensor_parallel_size=2))) as running:
        expected = running.run()
        asked = Sleep if cannot == "sleep" else WakeUp
        if asked is WakeUp:
            assert running.ask(Sleep) is None
        with monkeypatch.context() as patched:
            patched.setattr(running.executor._worker.runner, cannot, refuse)
            failure = running.ask(asked)
            assert failure is not None
            assert "rank 0 has its reasons" in failure.message
            assert running.core.is_sleeping == (asked is WakeUp)
        assert running.run() == expected
