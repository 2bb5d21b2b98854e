"""``Worker``: a rank's work on a step. It updates its rows, copies blocks and runs its part of the model. The first
rank of the last stage also draws or pools.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np
import torch
from quire_proto.errors import ErrorCode, QuireError

from quire_engine.core.executor import ExecutorError
from quire_engine.core.kv_disk import DiskContents, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SchedulerOutput, StepTimings
from quire_engine.device.accelerator import inference_on, upload
from quire_engine.errors import LoRAError
from quire_engine.sampling.grammar_bitmask import AnyBitmaskFiller, GrammarBitmask
from quire_engine.sampling.logits_processors import Draw
from quire_engine.sampling.prompt_logprobs import compute_prompt_logprobs
from quire_engine.sampling.sampler import PlainSamplerOutput, Sampler, SamplerInput, SamplerOutput
from quire_engine.worker.input_batch import AppendedDraws, InputBatch, RowDraw, prepare_inputs
from quire_engine.worker.kv_cache import StepEvent
from quire_engine.worker.model_runner import LoadedModel, ModelRunner
from quire_engine.worker.pooler import Pooler, PoolerOutput
from quire_engine.worker.request_states import Indices, RequestStates

log = logging.getLogger(__name__)

RunPass = Callable[[Callable[[], "AsyncStep"]], "AsyncStep"]
T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of a model. Rank 0 tells the others what it does, which they do too. Used by one thread."""

    @property
    def runner(self) -> ModelRunner:
        """This rank's own."""
        ...

    @property
    def draws(self) -> bool:
        """Whether this rank draws; in a pipeline the first rank of the last stage does."""
        ...

    def execute(
        self, output: SchedulerOutput, without_loras: Sequence[int], work: "Callable[[], AsyncStep]"
    ) -> "AsyncStep":
        """Has the others execute the step while this rank does ``work``, its part up to the forward pass. Adapters
        ``without_loras`` cannot be used.
        """
        ...

    def compute_logits(self, work: Callable[[], T]) -> T:
        """Does ``work``, which the ranks of the last stage do together behind the forward pass."""
        ...

    def get_output(self) -> ModelOutput:
        """On a rank 0 that does not draw, waits for the output of the oldest step that has not been asked for, and was
        executed. Raises what that raised there.
        """
        ...

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        """Gives the rank that draws what the grammars of the step allow that was executed last."""
        ...

    def take_drawn(self, rows: Indices, positions: Indices, token_ids: Indices) -> None:
        """Tells the others, by the next step, what was drawn: a token for each row, and its position there."""
        ...

    def broadcast(self, pending: torch.Tensor) -> None:
        """Overwrites tokens that are pending with those of rank 0, from device to device."""
        ...

    def execute_dummy_batch(self) -> None:
        """Takes part in a forward pass of the other engines of a group, without tokens."""
        ...

    def add_lora(self, lora: LoRARequest) -> None:
        """Reads an adapter into host memory, so that steps may have it. Raises ``LoRAError``."""
        ...

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter."""
        ...

    def open_disk(
        self, folder: Path, fingerprint: str, num_slots: int, report: Callable[[TransferResult], object]
    ) -> DiskContents:
        """Opens blocks on disk in ``folder``, which nobody else may use, for numbers that ``fingerprint`` describes.
        From then on steps begin transfers too, and ``report`` is called with the result of each, once by every rank, on
        other threads. Raises ``OSError``.
        """
        ...

    def sleep(self) -> None:
        """See ``Sleeper.sleep``. Does nothing if it sleeps."""
        ...

    def wake_up(self) -> None:
        """See ``Sleeper.wake_up``. Does nothing if it is awake."""
        ...

    def close(self) -> None:
        """Gives the KV memory back, and the weights unless another runner has them too. To be called once."""
        ...


class OneRank:
    """The ``Ranks`` of a rank that has nobody to tell: the only one, or one that does what rank 0 tells it, which
    receives pending tokens by ``broadcast``. ``has_parted``: whether logits could not be computed, so that others may
    wait for this rank.
    """

    def __init__(
        self,
        runner: ModelRunner,
        broadcast: Callable[[torch.Tensor], None] = lambda _pending: None,
        *,
        draws: bool = True,
    ) -> None:
        self.runner = runner
        self.broadcast = broadcast
        self.draws = draws
        self.has_parted = False
        self.execute_dummy_batch = runner.execute_dummy_batch
        self.add_lora, self.remove_lora = runner.add_lora, runner.remove_lora
        self.open_disk = runner.open_disk
        self.sleep, self.wake_up, self.close = runner.sleep, runner.wake_up, runner.close

    def execute(
        self, _output: SchedulerOutput, _without_loras: Sequence[int], work: "Callable[[], AsyncStep]"
    ) -> "AsyncStep":
        """See ``Ranks.execute``."""
        return work()

    def compute_logits(self, work: Callable[[], T]) -> T:
        """See ``Ranks.compute_logits``."""
        self.has_parted = True
        logits = work()
        self.has_parted = False
        return logits

    def get_output(self) -> ModelOutput:
        """See ``Ranks.get_output``."""
        raise AssertionError("this rank draws, or nobody asks it")

    def send_bitmask(self, _bitmask: GrammarBitmask) -> None:
        """See ``Ranks.send_bitmask``."""
        raise AssertionError("this rank draws, or nobody asks it")

    def take_drawn(self, rows: Indices, positions: Indices, token_ids: Indices) -> None:
        """See ``Ranks.take_drawn``."""


class Worker:
    """Executes scheduler outputs, one after the other, with what it keeps of each row between them. Every rank has one,
    of which that of rank 0 tells the other ``ranks`` what to do. ``run_pass`` has steps launched together with other
    engines. ``num_loras_held`` adapters are held in host memory, those that were used last. A rank that draws and does
    not know the grammars has bitmasks from ``filler``. Used by one thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        ranks: Ranks,
        *,
        num_loras_held: int = 0,
        run_pass: RunPass | None = None,
        filler: AnyBitmaskFiller | None = None,
    ) -> None:
        self._ranks = ranks
        self._runner = ranks.runner
        self._run_pass = run_pass
        self._device = model.device
        self._states = RequestStates(len(self._runner.kv_cache_config.groups), model.config.vocab_size)
        self._sampler = Sampler(model.config.vocab_size, filler)
        pooler = model.config.pooler_config
        self._pooler = Pooler(pooler, model.classifier) if ranks.draws and pooler is not None else None
        self._lora_manager = model.loras
        self._num_loras_held = num_loras_held
        self._previous_step: AsyncStep | None = None

    def execute(self, scheduler_output: SchedulerOutput) -> "AsyncStep":
        """Begins with the copies and the forward pass, which on the CPU is over when this returns. Raises as
        ``AsyncExecutor.execute_model_async``.

        ``timings`` are the host's: on CUDA ``swap`` and ``sample`` are launches, and ``forward`` is the launch and the
        wait for all of the step.
        """
        self._states.update(scheduler_output)
        with device_errors(), inference_on(self._device):
            failed = self._load_loras(scheduler_output.rows) if self._states.loras else []
            launch = partial(self._launch, scheduler_output, failed)
            launch_all = partial(self._ranks.execute, scheduler_output, failed, launch)
            step = self._run_pass(launch_all) if self._run_pass and scheduler_output.rows else launch_all()
            if not self._ranks.draws:
                step.send_bitmask()
            return step

    def follow(
        self, scheduler_output: SchedulerOutput, drawn: "array[int]", without_loras: Sequence[int]
    ) -> "AsyncStep":
        """As ``execute``, of a step that rank 0 executes. ``drawn`` are tokens that it drew before, as int32 triples of
        a row, a position and the token there.
        """
        self._states.write_tokens(drawn)
        self._states.update(scheduler_output)
        with device_errors(), inference_on(self._device):
            return self._launch(scheduler_output, without_loras)

    def _launch(self, scheduler_output: SchedulerOutput, without_loras: Sequence[int]) -> "AsyncStep":
        """What all ranks do at the same time."""
        capacity, states = self._runner.kv_cache_config, self._states
        step = AsyncStep(self._ranks, states, self._sampler, self._pooler, device=self._device)
        if self._pooler is not None:
            self._pooler.remove(scheduler_output.freed_rows)
        start = perf_counter()
        if not scheduler_output.copies.is_empty:
            self._runner.copy(scheduler_output.copies)
        copied = perf_counter()
        if scheduler_output.rows:
            if without_loras:
                _fail_without(scheduler_output.rows, states.loras, without_loras, step.output)
            batch = prepare_inputs(states, scheduler_output, capacity.block_size, capacity.groups, without_loras)
            step.launch(batch, self._previous_step)
        step.output.timings.swap, step.output.timings.forward = copied - start, perf_counter() - copied
        self._previous_step = step
        return step

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """The adapter as steps may have it, with its digest: its folder was read. May be called from any thread. Raises
        ``LoRAError`` for one that is none of this model, or if the model serves no adapters.
        """
        if self._lora_manager is None:
            raise LoRAError("This engine serves no adapters: start it with --enable-lora, or enable_lora=True.")
        return self._lora_manager.check(lora)

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter, if any is held for it. No step has it any more."""
        if self._lora_manager is not None and lora_id in self._lora_manager.held:
            self._ranks.remove_lora(lora_id)

    def _load_loras(self, rows: Sequence[int]) -> list[int]:
        """Has all ranks hold the adapters of the step's ``rows``. Returns the ids of those that cannot be read."""
        manager, loras = self._lora_manager, self._states.loras
        assert manager is not None, "a step has adapters, and the model has no slots for them"
        wanted = {loras[row].lora_int_id: loras[row] for row in rows if row in loras}
        failed: list[int] = []
        for lora_id in [lora_id for lora_id in wanted if lora_id not in manager.held]:
            try:
                self._ranks.add_lora(wanted[lora_id])
            except LoRAError as error:
                log.error("the adapter %s cannot be used: %s", wanted[lora_id].lora_name, error)
                failed.append(lora_id)
            if len(manager.held) > self._num_loras_held:
                self._ranks.remove_lora(next(each for each in manager.held if each not in wanted))
        return failed

    def forget_step(self) -> None:
        """Gives back what is kept of the last step, behind which no token is pending."""
        self._previous_step = None

    def close(self) -> None:
        """Gives the memory of KV pools and weights back. Nothing can be run any more."""
        self._ranks.close()
        self._lora_manager = self._previous_step = None
        self._sampler.close()


def _fail_without(
    rows: Sequence[int], loras: Mapping[int, LoRARequest], without_loras: Sequence[int], output: ModelOutput
) -> None:
    """Gives the chunks whose adapter cannot be read an error in ``output``."""
    for number, row in enumerate(rows):
        if row in loras and loras[row].lora_int_id in without_loras:
            message = f"The adapter {loras[row].lora_name} cannot be read any more."
            output.errors[number] = QuireError(ErrorCode.UNAVAILABLE, message, param="model")


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises ``ExecutorError`` for a device that failed: whatever it is asked for next fails too, so the engine must
    end.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        raise ExecutorError(f"The device failed: {error}") from error


@dataclass(slots=True)
class ForwardPass:
    """A forward pass that was launched, and what is sampled from it: ``hidden`` [T, hidden], of which the logits are
    made. ``prepared`` are the draws that were prepared for the sampler, and ``late`` those that will be when they are
    sampled.
    """

    batch: InputBatch
    prepared: "list[PreparedDraws]"
    late: list[RowDraw]
    hidden: torch.Tensor


PreparedDraws = tuple[list[RowDraw], SamplerInput]


class AsyncStep:
    """A step on the device. An ``AsyncModelOutput``; ``output`` holds what is known of it.

    What ``sample_tokens`` raises is raised by ``get_output``, so that a step ends in one place.
    """

    def __init__(
        self,
        ranks: Ranks,
        states: RequestStates,
        sampler: Sampler,
        pooler: Pooler | None,
        *,
        device: torch.device,
    ) -> None:
        self.output = ModelOutput()
        self._states = states
        self._ranks = ranks
        self._runner = ranks.runner
        self._sampler = sampler
        self._pooler = pooler
        self._device = device
        self._forward: ForwardPass | None = None
        self._appended: AppendedDraws | None = None
        self._sampled: list[SamplerOutput | PlainSamplerOutput] = []
        self._sampled_numbers: Indices | None = None
        self._pooled: PoolerOutput | None = None
        self._event: StepEvent | None = None
        self._error: Exception | None = None

    def launch(self, batch: InputBatch, previous: "AsyncStep | None") -> None:
        """Launches the forward pass of ``batch``, whose pending tokens are sampled by ``previous``.

        A draw with a grammar is prepared as soon as the tokens before it are known, so that its bitmask is filled while
        the model computes. The others would gain nothing, and are prepared together; all are at once where no token is
        pending.
        """
        early, late, pending = batch.draws, list[RowDraw](), None
        if len(batch.pending):
            assert previous is not None, "a token is pending, and no step samples it"
            pending = previous.sampled_token_ids(batch.pending)
            self._ranks.broadcast(pending)
            early = [each for each in batch.draws if not each.awaits_token and self._has_grammar(each)]
            late = [each for each in batch.draws if each.awaits_token or not self._has_grammar(each)]
        if not self._ranks.draws:  # another rank does; what grammars allow is known here alone
            early, late = [each for each in batch.draws if self._has_grammar(each)], []
        prepared = [self._prepare(early)] if early else []
        hidden = self._runner.forward(batch.model_input, pending)
        self._forward = ForwardPass(batch, prepared, late, hidden)
        self._appended = batch.appended

    def _has_grammar(self, draw: RowDraw) -> bool:
        return self._states.sampling_state(draw.row, draw.choice).grammar_state is not None

    def _prepare(self, draws: list[RowDraw]) -> "PreparedDraws":
        states = self._states
        return draws, self._sampler.prepare(
            [
                Draw(
                    each.number,
                    states.sampling_state(each.row, each.choice),
                    states.tokens.row(each.row)[: each.position],
                    each.num_drafts,
                )
                for each in draws
            ]
        )

    def send_bitmask(self) -> None:
        """On a rank 0 that does not draw, gives what grammars allow to the rank that does."""
        forward, self._forward = self._forward, None
        if forward is not None:
            for _, inputs in forward.prepared:
                if inputs.bitmask is not None:
                    self._ranks.send_bitmask(inputs.bitmask.wait())

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``. Waits only for the log-probabilities of prompts. Raises
        ``ExecutorError``.
        """
        forward, self._forward = self._forward, None  # its memory is free for the next step
        start = perf_counter()
        with device_errors(), inference_on(self._device):
            try:
                if forward is not None:
                    self._sample(forward)
            except Exception as error:  # noqa: BLE001 - ``get_output`` raises it, when the device is done with the rest
                self._error = error
            if self._device.type != "cpu":
                self._event = StepEvent(self._device)
        self.output.timings.sample += perf_counter() - start

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``. Waits for this step, and not for one that was launched after it."""
        assert self._forward is None, "sample_tokens comes before get_output"
        timings, start = self.output.timings, perf_counter()
        with device_errors():
            if self._event is not None:
                self._event.wait()
            if self._error is not None:
                raise self._error
            if self._appended is not None and not self._ranks.draws:
                self._take_output(self._ranks.get_output())
            done = perf_counter()
            for sampled in self._sampled:
                sampled.fetch_into(self.output)
            if self._appended is not None and self.output.token_ids:
                drawn = np.array(self.output.token_ids, np.int64)[self._appended.numbers]
                self._states.tokens.write(self._appended.rows, self._appended.positions, drawn)
                self._ranks.take_drawn(self._appended.rows, self._appended.positions, drawn)
            if self._pooled is not None:
                self._pooled.fetch_into(self.output)
        timings.forward += done - start
        timings.sample += perf_counter() - done
        return self.output

    def sampled_token_ids(self, rows: Indices) -> torch.Tensor:
        """The tokens [P] int64 that were sampled for these rows, on the device, without waiting for them. Where there
        is none, as the sampling failed, it is any token: what is made of it will not be used.
        """
        appended = self._appended
        if not self._sampled or appended is None:
            return torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        tensors = [sampled.token_ids for sampled in self._sampled]
        token_ids = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        number_of = np.zeros(max(rows.max(), appended.rows.max(initial=0)) + 1, np.int64)
        number_of[appended.rows] = appended.numbers
        places = number_of[rows]
        if self._sampled_numbers is not None:
            place_of = np.zeros(len(self.output.token_ids), np.int64)
            place_of[self._sampled_numbers] = np.arange(len(self._sampled_numbers))
            places = place_of[places]
        if np.array_equal(places, np.arange(len(token_ids))):
            return token_ids
        return token_ids.index_select(0, upload(torch.from_numpy(places), self._device))

    def _take_output(self, output: ModelOutput) -> None:
        """Takes what another rank has made of the step. The wait for it was part of the forward pass, but for the
        seconds of sampling.
        """
        swap, forward = self.output.timings.swap, self.output.timings.forward - output.timings.sample
        self.output = output
        output.timings = StepTimings(swap, forward, output.timings.sample)

    @property
    def needs_logits(self) -> bool:
        """Whether the ranks of the last stage compute logits of it."""
        return self._forward is not None and len(self._forward.batch.model_input.logits_rows) > 0

    def end(self, *, with_logits: bool) -> None:
        """What a rank that does not draw does of ``sample_tokens``."""
        forward, self._forward = self._forward, None
        if forward is not None and with_logits:
            with device_errors(), inference_on(self._device):
                self._logits(forward)

    def _sample(self, forward: ForwardPass) -> None:
        batch, prepared, logits = forward.batch, forward.prepared, None
        self.output.token_ids = [0] * batch.num_draws
        if batch.pooled:
            assert self._pooler is not None, "a step pools prompts, and the model says not how"
            self._pooled = self._pooler.pool(forward.hidden, batch.pooled)
        if len(batch.model_input.logits_rows):
            logits = self._ranks.compute_logits(lambda: self._logits(forward))
        if logits is None:
            return
        if batch.is_plain:
            metadata = self._states.sampling.metadata(batch.appended.rows, batch.appended.positions)
            self._sampled = [self._sampler.sample_plain(logits, metadata)]
            return
        if forward.late:
            prepared = [*prepared, self._prepare(forward.late)]
        self._sampled_numbers = np.array([each.number for draws, _ in prepared for each in draws], np.int64)
        self._sampled = [
            self._sampler.sample(inputs, logits, [each.logits_row for each in draws]) for draws, inputs in prepared
        ]

    def _logits(self, forward: ForwardPass) -> torch.Tensor | None:
        """The logits that are drawn from, if any are; those of prompts are used up. All ranks of the last stage compute
        them together, and its first has them.
        """
        batch, start, logits = forward.batch, perf_counter(), None
        if len(batch.model_input.sampled_rows):
            logits = self._runner.logits(forward.hidden, batch.model_input.sampled_rows)
            seconds = perf_counter() - start  # as part of the forward pass
            self.output.timings.forward += seconds
            self.output.timings.sample -= seconds
        if batch.prompt_logprobs:
            logits_of, rows = partial(self._runner.logits, forward.hidden), batch.model_input.prompt_logprob_rows
            output = self.output if self._ranks.draws else None
            compute_prompt_logprobs(batch.prompt_logprobs, rows, self._states.vocab_size, logits_of, output)
        return logits
