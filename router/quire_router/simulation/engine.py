"""One engine of a simulated fleet: the engine's own core, scheduler and pools, with the simulated executor."""

from dataclasses import replace

from quire.v1 import engine_pb2
from quire_engine.core import EngineCore, EngineCoreOutputs
from quire_engine.executor.simulated import SimulatedExecutor
from quire_engine.kv.memory import KVCacheManager
from quire_engine.pace import StepTimeEstimator
from quire_engine.request import Request
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.service.messages import load_to_proto
from quire_engine.simulation.clock import NANOSECONDS
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_proto.errors import QuireError

from quire_router.generation import GenerationRequest

STUCK_AFTER = 1000


class SimulatedEngine:
    """Steps when it is told to. What a step makes is known when it begins and belongs to the moment of its end: nothing
    reaches the engine between the two. ``busy`` are the nanoseconds in which it stepped.
    """

    def __init__(self, settings: SimulatedEngineConfig, seed: int) -> None:
        self.busy = 0
        limits = settings.scheduler_config(settings.scheduling_policy)
        executor = SimulatedExecutor(
            settings.kv_cache_config,
            settings.latency,
            seed=seed,
            vocab_size=limits.vocab_size,
            sleep=self._advance_clock,
        )
        self.memory = KVCacheManager(
            settings.kv_cache_config,
            prefix_caching=settings.enable_prefix_caching,
            host_caching=settings.enable_host_caching,
        )
        self.scheduler = Scheduler(limits, self.memory, rates=settings.latency.rates, clock=self._time)
        self._core = EngineCore(self.scheduler, executor, self._receive)
        self._meter = StepTimeEstimator(settings.latency.rates, settings.kv_cache_config.block_bytes)
        self._now = 0
        self._idle_steps = 0
        self._inbox: list[Request] = []
        self._step: EngineCoreOutputs | None = None

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    def report(self) -> engine_pb2.Load:
        """What it would say of itself when a router connects."""
        return load_to_proto(self.scheduler.get_load(), self._meter.model)

    def submit(self, generation: GenerationRequest, num_output: int) -> None:
        """A request has come that will draw so many tokens; the engine looks at it when its next step begins."""
        params = replace(generation.params, max_tokens=num_output, ignore_eos=True)
        tokens, salt = generation.prompt_token_ids, generation.cache_salt
        self._inbox.append(Request(generation.request_id, tokens, params, cache_salt=salt))

    def admit_arrived(self) -> list[tuple[str, QuireError]]:
        """Looks at what has arrived; returns what it refuses."""
        refused: list[tuple[str, QuireError]] = []
        for request in self._inbox:
            try:
                self.scheduler.add_request(request)
            except QuireError as error:
                refused.append((request.request_id, error))
        self._inbox.clear()
        return refused

    def begin(self, now: int) -> int | None:
        """Begins a step, if there is work; returns when it ends, in nanoseconds."""
        if not self.scheduler.has_work:
            return None
        self._now = now
        self._core.step()
        self.busy += self._now - now
        self._measure((self._now - now) / NANOSECONDS)
        self._idle_steps = 0 if self._now > now else self._idle_steps + 1
        assert self._idle_steps < STUCK_AFTER, "the engine has work and does none"
        return self._now

    def end(self) -> tuple[EngineCoreOutputs, engine_pb2.Load]:
        """What the step made and what the engine says after it, at the moment of its end."""
        step, self._step = self._step, None
        assert step is not None, "no step is under way"
        return step, load_to_proto(step.load, self._meter.model)

    def _measure(self, seconds: float) -> None:
        """As the service does with every step, but for the clock."""
        assert self._step is not None, "every step is published"
        trace = self._step.trace
        prompt_tokens = trace.num_tokens - trace.num_decode
        self._meter.observe(prompt_tokens, trace.num_draws, seconds - trace.timings.swap, self._now / NANOSECONDS)

    def _receive(self, step: EngineCoreOutputs) -> None:
        self._step = step

    def _time(self) -> int:
        return self._now

    def _advance_clock(self, seconds: float) -> None:
        self._now += round(seconds * NANOSECONDS)
