"""Engines of a group make the same passes, whatever order their messages come in: none waits for a pass that another
does not make, none makes one that nobody has work for, and none ends while another has work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.data_parallel import (
    DataParallel,
    DPCoordinator,
    DPEngineCore,
    DPMessage,
    DPMessageKind,
    Lockstep,
)
from quire_engine.core.engine_core import Shutdown
from quire_engine.core.executor import ExecutorError
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.scheduler import Scheduler

from tests.support.paged_executor import PagedExecutor
from tests.support.processes import eventually

MOST_MOVES = 5000


@dataclass
class Engine:
    """A core and its lockstep, as ``DPEngineCore`` and ``EngineGroup`` use it. ``steps`` are those that its requests
    still need. ``in_pass`` is the pass in which it waits for the others.
    """

    lockstep: Lockstep
    steps: int = 0
    in_pass: int | None = None
    num_begun: int = 0
    waits_with_work: bool = False
    is_told_to_end: bool = False
    has_finished: bool = False

    @property
    def state(self) -> tuple[object, ...]:
        return (
            self.steps,
            self.in_pass,
            self.num_begun,
            self.waits_with_work,
            self.has_finished,
            self.lockstep.number,
        )


class Group:
    """Messages lie in ``sent`` until they are delivered, in any order."""

    make_coordinator: Callable[[int], DPCoordinator] = DPCoordinator
    makes_dummies = True
    exchanges_tokens = True
    """Without, as in a model whose layers are all dense, nobody waits for others in a pass."""

    def __init__(self, size: int) -> None:
        self.coordinator = self.make_coordinator(size)
        self.sent: list[tuple[Engine | None, DPMessage]] = []
        self.engines: list[Engine] = []
        self.wanted: set[int] = set()
        for _ in range(size):
            self.engines.append(Engine(Lockstep(self.send)))

    def run(self, script: Sequence[tuple[str, int]]) -> None:
        """Does what the script says, and then all that is left, which has to come to an end."""
        for action, pick in script:
            engine = self.engines[pick % len(self.engines)]
            match action:
                case "deliver" if self.sent:
                    self.deliver(pick % len(self.sent))
                case "round":
                    self.come_round(engine)
                case "request" if not engine.is_told_to_end:
                    engine.steps += 1 + pick % 3
                case "abort" if not engine.waits_with_work and engine.in_pass is None:
                    engine.steps = 0
                case "end":
                    engine.is_told_to_end = True
        self.come_to_rest()

    def come_to_rest(self) -> None:
        for _ in range(MOST_MOVES):
            if self.sent:
                self.deliver(0)
                continue
            states = [engine.state for engine in self.engines]
            for engine in self.engines:
                self.come_round(engine)
            if not self.sent and [engine.state for engine in self.engines] == states:
                break
        else:
            raise AssertionError("passes go on for ever")
        assert not any(engine.lockstep.is_due for engine in self.engines if engine.in_pass is None), (
            "passes are left out"
        )
        assert [engine.in_pass for engine in self.engines] == [None] * len(self.engines), "a pass never ends"
        assert [engine.steps for engine in self.engines] == [0] * len(self.engines), "an engine waits for ever"
        ended = [engine.lockstep._num_ended > 0 for engine in self.engines]
        assert ended == [all(engine.is_told_to_end for engine in self.engines)] * len(self.engines)

    def send(self, message: DPMessage) -> None:
        self.sent.append((None, message))

    def deliver(self, index: int) -> None:
        receiver, message = self.sent.pop(index)
        if receiver is not None:
            if message.kind is DPMessageKind.FINISHED:
                assert all(each.has_finished and not each.steps for each in self.engines), "one has work"
            receiver.lockstep.receive(message)
        elif (answer := self.coordinator.receive(message)) is not None:
            self.sent += [(engine, answer) for engine in self.engines]

    def come_round(self, engine: Engine) -> None:
        """What a core does until it waits."""
        lockstep = engine.lockstep
        if engine.in_pass is not None:
            if not self.exchanges_tokens or all(each.num_begun > engine.in_pass for each in self.engines):
                engine.in_pass = None
                lockstep.end()
            return
        if engine.steps and not engine.waits_with_work:
            lockstep.ask()
            engine.waits_with_work = True
        elif engine.is_told_to_end and not engine.steps and not engine.has_finished:
            engine.has_finished = True
            self.send(DPMessage(DPMessageKind.FINISHED))
        if lockstep.is_due and (engine.steps or self.makes_dummies):
            self.enter(engine)

    def enter(self, engine: Engine) -> None:
        engine.in_pass = engine.lockstep.number
        engine.num_begun += 1
        assert engine.num_begun == engine.in_pass + 1, "it leaves a pass out"
        if engine.steps:
            self.wanted.add(engine.in_pass)
            engine.steps -= 1
        engine.waits_with_work = False
        if all(each.num_begun > engine.in_pass for each in self.engines):
            assert engine.in_pass in self.wanted, "nobody has work"


ACTIONS = [*["deliver"] * 6, *["round"] * 4, *["request"] * 2, "abort", "end"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 59)), max_size=150)


def check(group: type[Group], examples: int, *phases: Phase) -> None:
    @settings(max_examples=examples, deadline=None, database=None, phases=phases, derandomize=True)
    @given(size=st.integers(2, 4), script=SCRIPTS)
    def run(size: int, script: list[tuple[str, int]]) -> None:
        group(size).run(script)

    run()


class WithoutExchanges(Group):
    exchanges_tokens = False


@pytest.mark.parametrize("group", [Group, WithoutExchanges])
def test_engines_make_the_same_passes_in_whatever_order_messages_come(group: type[Group]) -> None:
    check(group, 1000, Phase.generate, Phase.shrink)


# The controls: without each of these rules the machine finds what goes wrong.


class CountsLateMessages(DPCoordinator):
    """Takes what was said of an earlier pass for the next one."""

    def receive(self, message: DPMessage) -> DPMessage | None:
        if message.kind is DPMessageKind.WORK:
            message = DPMessage(message.kind, self._number)
        return super().receive(message)


class EndsWithTheFirst(DPCoordinator):
    """Lets all end when one has finished."""

    def receive(self, message: DPMessage) -> DPMessage | None:
        if message.kind is DPMessageKind.FINISHED:
            return message
        return super().receive(message)


@pytest.mark.parametrize("broken", [CountsLateMessages, EndsWithTheFirst])
def test_a_coordinator_without_one_of_its_rules_is_found_out(broken: type[DPCoordinator]) -> None:
    class Broken(Group):
        make_coordinator = broken

    with pytest.raises(AssertionError):
        check(Broken, 1000, Phase.generate)


def test_engines_that_make_no_dummies_are_found_out() -> None:
    class Broken(Group):
        makes_dummies = False

    with pytest.raises(AssertionError, match="are left out"):
        check(Broken, 1000, Phase.generate)


# A lockstep alone


class Sent(list[DPMessage]):
    """What a lockstep has sent."""

    def __call__(self, message: DPMessage) -> None:
        self.append(message)


def test_an_engine_says_once_that_it_has_work_and_not_where_others_have() -> None:
    sent = Sent()
    lockstep = Lockstep(sent)
    lockstep.ask()
    lockstep.ask()
    for number in (1, 0):
        lockstep.receive(DPMessage(DPMessageKind.PASS, number))
    for _ in range(2):
        lockstep.begin()
        lockstep.end()
    assert not lockstep.is_due
    lockstep.ask()
    assert [(message.kind, message.number) for message in sent] == [(DPMessageKind.WORK, 0), (DPMessageKind.WORK, 2)]


@pytest.mark.parametrize("waits", ["for a pass", "for the end"])
def test_an_engine_that_waits_hears_of_a_loss(waits: str) -> None:
    sent, begun, raised = Sent(), Event(), list[Any]()
    lockstep = Lockstep(lambda message: [sent(message), begun.set()])

    def wait() -> None:
        try:
            if waits == "for a pass":
                lockstep.begin()
            else:
                lockstep.finish(lambda: None)
        except ExecutorError as error:
            raised.append(str(error))

    thread = Thread(target=wait)
    thread.start()
    assert begun.wait(10)
    lockstep.receive(DPMessage(DPMessageKind.LOST, reason="Engine 1 is gone."))
    thread.join(10)
    assert raised == ["Engine 1 is gone."]
    with pytest.raises(ExecutorError, match="Engine 1 is gone"):
        lockstep.begin()


def test_those_who_wait_for_a_stop_hear_of_it_and_it_is_said_once() -> None:
    sent = Sent()
    own, other = Lockstep(sent), Lockstep(sent)
    own.leave()
    own.leave()
    other.receive(sent[0])
    other.leave()
    for lockstep in (own, other):
        lockstep.wait_until_leaving()
    assert sent == [DPMessage(DPMessageKind.LEAVING)]


# A core that waits for its disk, or for work


class SlowDisk(PagedExecutor):
    """Its transfers do not end before a pass is due."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__(KVCacheConfig(4, 41, 40))
        self.lockstep = lockstep
        self.timeouts: list[float] = []

    def take_transfers(self, timeout: float) -> list[TransferResult]:
        self.timeouts.append(timeout)
        if len(self.timeouts) == 2:
            self.lockstep.receive(DPMessage(DPMessageKind.PASS, 0))
        return []


def test_the_wait_for_a_disk_ends_when_a_pass_is_due() -> None:
    lockstep = Lockstep(Sent())
    executor = SlowDisk(lockstep)
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), KVCacheManager(executor.kv_cache_config))
    core = DPEngineCore(scheduler, executor, lambda _: None, DataParallel(lockstep, lambda: None))
    assert not core._wait_for_transfers()
    assert executor.timeouts == [0.0, 0.0], "others wait in a pass while this engine waits for its disk"


def test_an_idle_core_makes_each_pass_that_is_due_and_hears_of_commands() -> None:
    sent, made = Sent(), list[int]()
    lockstep = Lockstep(sent)
    done = {number: Event() for number in range(2)}

    def execute_dummy_batch() -> None:
        made.append(lockstep.number)
        lockstep.end()
        done[made[-1]].set()

    executor = PagedExecutor(KVCacheConfig(4, 41, 40))
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), KVCacheManager(executor.kv_cache_config))
    data_parallel = DataParallel(lockstep, execute_dummy_batch)
    core = DPEngineCore(scheduler, executor, lambda _: None, data_parallel)
    thread = Thread(target=core.run, daemon=True)
    thread.start()
    for number, event in done.items():
        lockstep.receive(DPMessage(DPMessageKind.PASS, number))
        assert event.wait(10)
    core.send(Shutdown())
    eventually(lambda: sent == [DPMessage(DPMessageKind.FINISHED)])
    lockstep.receive(sent[0])
    thread.join(10)
    assert not thread.is_alive()
    assert made == [0, 1]
    assert data_parallel.stats.dummy_passes == 2
