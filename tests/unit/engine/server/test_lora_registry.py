"""The adapters of a running engine: loaded, unloaded when their last request has ended, and told to every session."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs, RemoveLoRA
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.scheduler import Scheduler
from quire_engine.errors import LoRAError
from quire_engine.server import loras as loras_module
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.session import Session
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.tracing import TraceExporter
from quire_proto.errors import ErrorCode, QuireError

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.slow_grammars import Watched

CAPACITY = KVCacheConfig(4, 40, 0)


def check(lora: LoRARequest) -> LoRARequest:
    """A folder's digest is its name's first letter."""
    if "broken" in str(lora.lora_path):
        raise LoRAError(f"{lora.lora_path} is broken.")
    return replace(lora, digest=str(lora.lora_path)[:1].encode() * 16)


class Executor(PagedExecutor):
    """Notes which adapters it was told to forget."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.removed: list[int] = []

    def remove_lora(self, lora_id: int) -> None:
        self.removed.append(lora_id)


class Engine:
    """A manager with adapters, on a core that is stepped by hand."""

    def __init__(self) -> None:
        self.loras = LoRARegistry(check, ["model"])
        self.grammars = Watched()
        spans = TraceExporter(enabled=False, step_interval=1)
        config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE, max_loras=2)
        self.executor = Executor()
        scheduler = Scheduler(config, KVCacheManager(CAPACITY))
        self.core = EngineCore(scheduler, self.executor, self._publish)
        self.manager = SessionManager(self.core, 7, 0.05, spans, self.grammars.compiler, loras=self.loras)

    def _publish(self, step: EngineCoreOutputs) -> None:
        self.manager.publish(step)

    async def open(self, session_id: str = "one") -> tuple[Session, pb.Snapshot]:
        opening = asyncio.create_task(self.manager.open(pb.Open(session_id=session_id)))
        await asyncio.sleep(0)
        self.take_commands()
        session, _, snapshot = await opening
        return session, snapshot.snapshot

    def submit(self, session: Session, request_id: str, lora: str, digest: bytes = b"", **sampling: object) -> None:
        params = types.SamplingParams(**{"max_tokens": 2, **sampling})
        message = pb.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=params)
        message.lora_name, message.lora_digest = lora, digest
        self.manager.submit(session, message)

    def take_commands(self) -> None:
        while not self.core._commands.empty():
            self.core._handle_command(self.core._commands.get())

    def run(self) -> None:
        """Steps until nothing is left to do."""
        self.take_commands()
        while self.core.scheduler.has_work:
            self.core.step()
            self.take_commands()


def names(loras: pb.Loras) -> dict[str, bytes]:
    return {lora.name: lora.digest[:1] for lora in loras.loras}


def batches(session: Session) -> list[pb.StepBatch]:
    return list(session.batches.unacknowledged)


def outputs(session: Session) -> list[pb.SequenceOutput]:
    return [output for batch in batches(session) for output in batch.outputs]


async def test_sessions_hear_of_adapters_when_they_begin_and_whenever_there_are_others() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")
    session, snapshot = await engine.open()
    assert names(snapshot.loras) == {"x": b"a"}
    await engine.loras.load("y", "b")
    await engine.loras.load("y", "b")
    await engine.loras.unload("x")
    engine.submit(session, "r", "y")
    engine.run()
    told = [names(batch.loras) for batch in batches(session) if batch.HasField("loras")]
    assert told == [{"x": b"a", "y": b"b"}, {"y": b"b"}], "once for each change"
    session.batches.acknowledge(batches(session)[-1].sequence)
    _, _, again = await engine.manager.open(pb.Open(session_id="one", last_sequence=session.sequence))
    assert again.snapshot.resumed
    assert names(again.snapshot.loras) == {"y": b"b"}


async def test_what_is_wrong_is_said_and_changes_nothing() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")

    async def refused(name: str, folder: str) -> tuple[ErrorCode, str | None]:
        with pytest.raises(QuireError) as caught:
            await engine.loras.load(name, folder)
        return caught.value.code, caught.value.param

    assert await refused("y", "broken") == (ErrorCode.INVALID, "lora_path")
    assert await refused("x", "b") == (ErrorCode.CONFLICT, "lora_name")
    assert await refused("model", "a") == (ErrorCode.CONFLICT, "lora_name")
    for name in ("", "a b", "a\n", "a\x85b", "../a", "a/..", "/a", "a//b", "ü", "n" * 257):
        assert await refused(name, "a") == (ErrorCode.INVALID, "lora_name")
    with pytest.raises(QuireError, match="no adapter y") as caught:
        await engine.loras.unload("y")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert names(engine.loras.to_proto()) == {"x": b"a"}


async def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loras_module, "MAX_LORAS", 1)
    registry = LoRARegistry(check, [])
    registry.load_now("x", Path("a"))
    with pytest.raises(QuireError) as caught:
        await registry.load("y", "b")
    assert caught.value.code is ErrorCode.OVERLOADED
    assert registry.load_now("x", Path("a")) == registry.find("x"), "what is there already is no more"


async def test_a_request_for_an_adapter_that_is_not_there_is_refused() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")
    session, _ = await engine.open()
    engine.submit(session, "unknown", "y")
    engine.submit(session, "another", "x", digest=b"b" * 16)
    engine.submit(session, "right", "x", digest=b"a" * 16)
    engine.run()
    ends = {output.request_id: output.error.code for output in outputs(session) if output.finish_reason}
    assert ends == {"unknown": types.ERROR_CODE_NOT_FOUND, "another": types.ERROR_CODE_NOT_FOUND, "right": 0}


async def test_unloading_waits_for_the_requests_that_run_and_refuses_new_ones_at_once() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")
    session, _ = await engine.open()
    engine.submit(session, "before", "x", n=2)
    engine.submit(session, "waits-for-its-grammar", "x", structured=types.Structured(regex="a"))
    engine.take_commands()
    engine.core.step()
    unloading = asyncio.create_task(engine.loras.unload("x"))
    await asyncio.sleep(0)
    engine.submit(session, "after", "x")
    assert [output.request_id for output in outputs(session) if output.error.code] == ["after"]
    engine.manager.cancel(session, "waits-for-its-grammar")
    await asyncio.sleep(0)
    assert not unloading.done()
    assert engine.executor.removed == []
    engine.run()
    async with asyncio.timeout(30):
        await unloading
    engine.run()
    assert engine.executor.removed == [1]
    assert sum(output.finish_reason == types.FINISH_REASON_LENGTH for output in outputs(session)) == 2


async def test_an_adapter_of_the_same_name_may_come_before_the_old_ones_requests_have_ended() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")
    session, _ = await engine.open()
    engine.submit(session, "old", "x")
    unloading = asyncio.create_task(engine.loras.unload("x"))
    await asyncio.sleep(0)
    await engine.loras.load("x", "b")
    engine.submit(session, "new", "x")
    engine.run()
    async with asyncio.timeout(30):
        await unloading
    assert engine.executor.removed == [1]
    assert not any(output.error.code for output in outputs(session))
    await engine.loras.unload("x")
    engine.run()
    assert engine.executor.removed == [1, 2]


async def test_a_session_that_ends_gives_its_adapters_back_behind_its_aborts() -> None:
    engine = Engine()
    await engine.loras.load("x", "a")
    session, _ = await engine.open()
    engine.submit(session, "r", "x", max_tokens=50)
    engine.take_commands()
    engine.core.step()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.loras.unload("x")
    engine.manager.close(session)
    commands = [engine.core._commands.get() for _ in range(engine.core._commands.qsize())]
    assert commands[-1] == RemoveLoRA(1)
    assert len(commands) == 2


async def test_one_that_others_have_is_loaded_only_if_it_is_the_same_and_its_folder_is_told() -> None:
    engine = Engine()
    engine.loras.load_now("given", Path("g"))
    with pytest.raises(QuireError, match="holds another adapter") as other:
        await engine.loras.load("x", "a", b"b" * 16)
    assert (other.value.code, other.value.param) == (ErrorCode.INVALID, "lora_path")
    loaded = await engine.loras.load("x", "a", b"a" * 16)
    assert await engine.loras.load("x", "broken", b"a" * 16) == loaded, "what is there is not read again"
    assert {lora.name: lora.path for lora in engine.loras.to_proto().loras} == {"given": "", "x": "a"}
    await engine.loras.unload("given")
    await engine.loras.load("given", "g")
    assert {lora.name: lora.path for lora in engine.loras.to_proto().loras} == {"given": "g", "x": "a"}
