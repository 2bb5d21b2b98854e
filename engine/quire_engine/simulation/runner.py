"""``Simulation``: the engine's own core, scheduler and pools on virtual time. Decides nothing itself: it lets requests
arrive when they are due, and time pass as the simulated executor says.
"""

from collections.abc import Iterable
from time import perf_counter

from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from quire_engine.core import EngineCore, EngineCoreOutputs
from quire_engine.executor.latency import LatencyModel
from quire_engine.executor.simulated import SimulatedExecutor
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.memory import KVCacheManager
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.simulation.clock import VirtualClock
from quire_engine.simulation.recorder import SimulationRecorder
from quire_engine.simulation.trace import Arrival

STUCK_AFTER = 1000


class Simulation:
    """One engine, for one run. ``recorder`` has seen all of it afterwards."""

    def __init__(
        self,
        limits: SchedulerConfig,
        capacity: KVCacheConfig,
        latency: LatencyModel,
        *,
        seed: int = 0,
        prefix_caching: bool = True,
        host_caching: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        executor = SimulatedExecutor(capacity, latency, seed=seed, vocab_size=limits.vocab_size, sleep=self.clock.sleep)
        memory = KVCacheManager(capacity, prefix_caching=prefix_caching, host_caching=host_caching)
        self.scheduler = Scheduler(limits, memory, rates=latency.rates, clock=self.clock)
        self.recorder = SimulationRecorder(self.scheduler)
        self._core = EngineCore(self.scheduler, executor, self._receive)
        self._step_began = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> SimulationRecorder:
        """Every request to its end; ``arrivals`` are in the order of their times."""
        begin = perf_counter()
        for index, arrival in enumerate(arrivals):
            self._work_until(arrival.time)
            self._arrive(index, arrival)
        self._work_until(float("inf"))
        self.recorder.wall_seconds = perf_counter() - begin
        return self.recorder

    def _work_until(self, time: float) -> None:
        """Steps while there is work and ``time`` has not come. What arrives during a step waits for its end."""
        idle_steps = 0
        while self.scheduler.has_work and self.clock.seconds < time:
            self._step_began = self.clock.seconds
            self._core.step()
            idle_steps = 0 if self.clock.seconds > self._step_began else idle_steps + 1
            assert idle_steps < STUCK_AFTER, "the engine has work and does none"
        if not self.scheduler.has_work:
            self.recorder.inspect()
            if time < float("inf"):
                self.clock.advance_to(time)

    def _arrive(self, index: int, arrival: Arrival) -> None:
        request_id = str(index)
        prompt = arrival.prompt(self.scheduler.config.vocab_size)
        params = SamplingParams(temperature=0, seed=index, max_tokens=arrival.num_output, ignore_eos=True)
        self.recorder.arrive(request_id, arrival.time)
        try:
            self.scheduler.add_request(Request(request_id, prompt, params))
        except QuireError as error:
            self.recorder.refuse(request_id, error)

    def _receive(self, step: EngineCoreOutputs) -> None:
        self.recorder.observe(self._step_began, self.clock.seconds, step)
