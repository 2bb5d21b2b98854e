"""``Worker``: an engine's work on a step, in rank 0. It updates its rows, copies blocks, runs the model on all ranks,
and draws or pools.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch
from quire_proto.errors import ErrorCode, QuireError

from quire_engine.core.executor import ExecutorError
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.device.accelerator import inference_on, upload
from quire_engine.errors import LoRAError
from quire_engine.sampling.logits_processors import Draw
from quire_engine.sampling.prompt_logprobs import compute_prompt_logprobs
from quire_engine.sampling.sampler import PlainSamplerOutput, Sampler, SamplerInput, SamplerOutput
from quire_engine.worker.input_batch import AppendedDraws, InputBatch, ModelInput, RowDraw, prepare_inputs
from quire_engine.worker.kv_cache import StepEvent
from quire_engine.worker.model_runner import LoadedModel, Runner
from quire_engine.worker.pooler import Pooler, PoolerOutput
from quire_engine.worker.request_states import Indices, RequestStates

log = logging.getLogger(__name__)

Forward = Callable[[ModelInput, torch.Tensor | None], torch.Tensor]


class Worker:
    """Executes scheduler outputs, one after the other, with what it keeps of each row between them. ``forward`` makes
    the forward passes of ``runner``; by default that does. ``num_loras_held`` adapters are held in host memory, those
    that were used last. Used by one thread.
    """

    def __init__(
        self, model: LoadedModel, runner: Runner, *, num_loras_held: int = 0, forward: Forward | None = None
    ) -> None:
        self._runner = runner
        self._forward = forward
        self._device = model.device
        self._states = RequestStates(len(runner.kv_cache_config.groups), model.config.vocab_size)
        self._sampler = Sampler(model.config.vocab_size)
        pooler = model.config.pooler_config
        self._pooler = None if pooler is None else Pooler(pooler, model.classifier)
        self._lora_manager = model.loras
        self._num_loras_held = num_loras_held
        self._previous_step: AsyncStep | None = None

    def execute(self, scheduler_output: SchedulerOutput) -> "AsyncStep":
        """Begins with the copies and the forward pass, which on the CPU is over when this returns. Raises as
        ``AsyncExecutor.execute_model_async``.

        ``timings`` are the host's: on CUDA ``swap`` and ``sample`` are launches, and ``forward`` is the launch and the
        wait for all of the step.
        """
        capacity, states = self._runner.kv_cache_config, self._states
        states.update(scheduler_output)
        forward = self._forward or self._runner.forward
        step = AsyncStep(self._runner, forward, states, self._sampler, self._pooler, device=self._device)
        if self._pooler is not None:
            self._pooler.remove(scheduler_output.freed_rows)
        with device_errors(), inference_on(self._device):
            start = perf_counter()
            if not scheduler_output.copies.is_empty:
                self._runner.copy(scheduler_output.copies)
            copied = perf_counter()
            if scheduler_output.rows:
                failed = self._load_loras(scheduler_output.rows, step.output) if states.loras else ()
                batch = prepare_inputs(states, scheduler_output, capacity.block_size, capacity.groups, failed)
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
            self._runner.remove_lora(lora_id)

    def _load_loras(self, rows: Sequence[int], output: ModelOutput) -> list[int]:
        """Has all ranks hold the adapters of the step's ``rows``. Returns the ids of those that cannot be read, whose
        chunks get an error in ``output``.
        """
        manager, loras = self._lora_manager, self._states.loras
        assert manager is not None, "a step has adapters, and the model has no slots for them"
        wanted = {loras[row].lora_int_id: loras[row] for row in rows if row in loras}
        failed: list[int] = []
        for lora_id in [lora_id for lora_id in wanted if lora_id not in manager.held]:
            try:
                self._runner.add_lora(wanted[lora_id])
            except LoRAError as error:
                log.error("the adapter %s cannot be used: %s", wanted[lora_id].lora_name, error)
                failed.append(lora_id)
            if len(manager.held) > self._num_loras_held:
                self._runner.remove_lora(next(each for each in manager.held if each not in wanted))
        for number, row in enumerate(rows):
            if row in loras and loras[row].lora_int_id in failed:
                message = f"The adapter {loras[row].lora_name} cannot be read any more."
                output.errors[number] = QuireError(ErrorCode.UNAVAILABLE, message, param="model")
        return failed

    def forget_step(self) -> None:
        """Gives back what is kept of the last step, behind which no token is pending."""
        self._previous_step = None

    def close(self) -> None:
        """Gives the memory of KV pools and weights back. Nothing can be run any more."""
        self._runner.close()
        self._lora_manager = self._previous_step = None
        self._sampler.close()


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
    """A step on the device, whose forward pass ``forward`` makes. An ``AsyncModelOutput``; ``output`` holds what is
    known of it.

    What ``sample_tokens`` raises is raised by ``get_output``, so that a step ends in one place.
    """

    def __init__(
        self,
        runner: Runner,
        forward: Forward,
        states: RequestStates,
        sampler: Sampler,
        pooler: Pooler | None,
        *,
        device: torch.device,
    ) -> None:
        self.output = ModelOutput()
        self._states = states
        self._runner = runner
        self._run_forward = forward
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
            early = [each for each in batch.draws if not each.awaits_token and self._has_grammar(each)]
            late = [each for each in batch.draws if each.awaits_token or not self._has_grammar(each)]
        prepared = [self._prepare(early)] if early else []
        hidden = self._run_forward(batch.model_input, pending)
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
            done = perf_counter()
            for sampled in self._sampled:
                sampled.fetch_into(self.output)
            if self._sampled and self._appended is not None:
                drawn = np.array(self.output.token_ids, np.int64)[self._appended.numbers]
                self._states.tokens.write(self._appended.rows, self._appended.positions, drawn)
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

    def _sample(self, forward: ForwardPass) -> None:
        batch, prepared, logits = forward.batch, forward.prepared, None
        self.output.token_ids = [0] * batch.num_draws
        if batch.pooled:
            assert self._pooler is not None, "a step pools prompts, and the model says not how"
            self._pooled = self._pooler.pool(forward.hidden, batch.pooled)
        if len(batch.model_input.sampled_rows):
            start = perf_counter()
            logits = self._runner.logits(forward.hidden, batch.model_input.sampled_rows)
            seconds = perf_counter() - start  # as part of the forward pass
            self.output.timings.forward += seconds
            self.output.timings.sample -= seconds
        if batch.prompt_logprobs:
            logits_of, rows = partial(self._runner.logits, forward.hidden), batch.model_input.prompt_logprob_rows
            compute_prompt_logprobs(batch.prompt_logprobs, rows, self._sampler.vocab_size, logits_of, self.output)
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
