"""``Worker``: a rank's work on a step. It updates its rows, copies blocks and runs its part of the model. The first
rank of the last stage also samples or pools.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from quire_proto.errors import ErrorCode, QuireError

from quire_engine.core.executor import ExecutorError, SleepError
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SchedulerOutput, StepTimings
from quire_engine.core.step_plain import lora_from_plain, lora_to_plain
from quire_engine.device.accelerator import upload
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
    """All ranks of a model, from the view of one rank. Rank 0 leads: it sends its calls to the other ranks, which make
    them too. Use it from one thread.
    """

    @property
    def runner(self) -> ModelRunner:
        """This rank's own runner."""
        ...

    @property
    def rank(self) -> int | None:
        """This rank's number, or None if it is the only one."""
        ...

    @property
    def is_sampler(self) -> bool:
        """Whether this rank samples. In a pipeline only the first rank of the last stage does."""
        ...

    def execute(
        self, output: SchedulerOutput, without_loras: Sequence[int], work: "Callable[[], AsyncStep]"
    ) -> "AsyncStep":
        """Executes the step on the other ranks while this rank does ``work``, its part up to the forward pass. Adapters
        in ``without_loras`` cannot be used.
        """
        ...

    def compute_logits(self, work: Callable[[], T]) -> T:
        """Does ``work``, which the ranks of the last stage do together after the forward pass."""
        ...

    def get_output(self) -> ModelOutput:
        """Waits for the output of the oldest executed step whose output has not been taken. Only for a rank 0 that does
        not sample. Raises ``RuntimeError`` with the reason if the step failed on the rank that samples.
        """
        ...

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        """Sends the grammar bitmask of the last executed step to the rank that samples."""
        ...

    def queue_sampled_tokens(self, rows: Indices, positions: Indices, token_ids: Indices) -> None:
        """Passes sampled tokens to the other ranks with the next step: one token per row, and its position in the
        row.
        """
        ...

    def broadcast(self, pending: torch.Tensor) -> None:
        """Overwrites ``pending`` with rank 0's pending tokens, from device to device."""
        ...

    def execute_dummy_batch(self) -> None:
        """Takes part in a forward pass of the other engines of a group, without tokens."""
        ...

    def call(self, name: str, arguments: Sequence[Any], work: Callable[[], object]) -> list[Any]:
        """Makes the rare call ``name`` on the other ranks while this rank does ``work``. Returns the answers in rank
        order (see ``Worker.answer``).
        """
        ...

    def report_to(self, report: Callable[[TransferResult], object]) -> None:
        """Passes the results of the other ranks' transfers to ``report``, on another thread."""
        ...

    def close(self) -> None:
        """Frees the KV memory, and the weights unless another runner uses them. Call it once."""
        ...


class LogitsError(Exception):
    """The logits of a step failed with ``failure`` on a rank that follows rank 0. Only if they did so on all ranks of
    the last stage, none of these waits for another.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


class LocalRank:
    """The ``Ranks`` of a rank that leads no others: the only rank, or one that follows rank 0 and receives pending
    tokens by ``broadcast``.
    """

    def __init__(
        self,
        runner: ModelRunner,
        broadcast: Callable[[torch.Tensor], None] = lambda _pending: None,
        *,
        rank: int | None = None,
        is_sampler: bool = True,
    ) -> None:
        self.runner = runner
        self.rank = rank
        self.broadcast = broadcast
        self.is_sampler = is_sampler
        self.execute_dummy_batch, self.close = runner.execute_dummy_batch, runner.close

    def execute(
        self, _output: SchedulerOutput, _without_loras: Sequence[int], work: "Callable[[], AsyncStep]"
    ) -> "AsyncStep":
        """See ``Ranks.execute``."""
        return work()

    def compute_logits(self, work: Callable[[], T]) -> T:
        """See ``Ranks.compute_logits``. Raises ``LogitsError`` for a failure on a rank that follows rank 0."""
        try:
            return work()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if self.rank is None:
                raise
            raise LogitsError(error) from error

    def get_output(self) -> ModelOutput:
        """See ``Ranks.get_output``."""
        raise AssertionError("this rank samples, or nobody asks it")

    def send_bitmask(self, _bitmask: GrammarBitmask) -> None:
        """See ``Ranks.send_bitmask``."""
        raise AssertionError("this rank samples, or nobody asks it")

    def queue_sampled_tokens(self, rows: Indices, positions: Indices, token_ids: Indices) -> None:
        """See ``Ranks.queue_sampled_tokens``."""

    def call(self, _name: str, _arguments: Sequence[Any], work: Callable[[], object]) -> list[Any]:
        """See ``Ranks.call``."""
        return [work()]

    def report_to(self, report: Callable[[TransferResult], object]) -> None:
        """See ``Ranks.report_to``."""


ON_EVERY_RANK = frozenset(("add_lora", "remove_lora", "open_disk", "sleep", "wake_up"))
"""Methods of ``Worker`` that ``call_all`` may call: rare operations, with arguments and results that JSON has."""


class Worker:
    """Executes scheduler outputs one at a time, and keeps the state of each row between them. Every rank has a worker;
    rank 0's worker leads the other ``ranks``. Use it from one thread.

    ``run_pass`` launches steps together with other engines. Host memory holds at most ``num_loras_held`` adapters, and
    the least recently used is dropped first. ``filler`` supplies the bitmasks on a rank that samples but does not know
    the grammars. ``report`` gets the result of each transfer to or from the disk, on other threads.
    """

    def __init__(
        self,
        model: LoadedModel,
        ranks: Ranks,
        *,
        report: Callable[[TransferResult], object],
        num_loras_held: int = 0,
        run_pass: RunPass | None = None,
        filler: AnyBitmaskFiller | None = None,
    ) -> None:
        self.ranks = ranks
        self._report = report
        ranks.report_to(report)
        self.runner = ranks.runner
        self._run_pass = run_pass
        self.device = model.device
        self._kv_cache_config = capacity = self.runner.kv_cache_config
        state_block_size = 0 if capacity.states is None else capacity.states.block_size
        self.states = RequestStates(len(capacity.groups), model.config.vocab_size, state_block_size)
        self.sampler = Sampler(model.config.vocab_size, filler)
        pooler = model.config.pooler_config
        self.pooler = Pooler(pooler, model.classifier) if ranks.is_sampler and pooler is not None else None
        self._lora_manager = model.loras
        self._num_loras_held = num_loras_held
        self._previous_step: AsyncStep | None = None

    def execute(self, scheduler_output: SchedulerOutput) -> "AsyncStep":
        """Launches the block copies and the forward pass. On the CPU the forward pass is done when this returns. Raises
        the errors of ``AsyncExecutor.execute_model_async``.

        The step's ``timings`` are host times. On CUDA ``swap`` and ``sample`` cover launches only, and ``forward``
        covers the launch and the wait for the whole step.
        """
        self.states.update(scheduler_output)
        with on_device(self.device):
            failed = self._load_loras(scheduler_output.rows) if self.states.loras else []
            launch = partial(self._launch, scheduler_output, failed)
            launch_all = partial(self.ranks.execute, scheduler_output, failed, launch)
            step = self._run_pass(launch_all) if self._run_pass and scheduler_output.rows else launch_all()
            if not self.ranks.is_sampler:
                step.send_bitmask()
            return step

    def follow(
        self, scheduler_output: SchedulerOutput, sampled: "array[int]", without_loras: Sequence[int]
    ) -> "AsyncStep":
        """Like ``execute``, for a step that rank 0 executes. ``sampled`` has the tokens sampled since the last step, as
        int32 triples of row, position and token.
        """
        self.states.write_tokens(sampled)
        self.states.update(scheduler_output)
        with on_device(self.device):
            return self._launch(scheduler_output, without_loras)

    def _launch(self, scheduler_output: SchedulerOutput, without_loras: Sequence[int]) -> "AsyncStep":
        """Does the part of the step that all ranks do at the same time."""
        capacity, states = self._kv_cache_config, self.states
        step = AsyncStep(self)
        if self.pooler is not None:
            self.pooler.remove(scheduler_output.freed_rows)
        start = perf_counter()
        if not scheduler_output.copies.is_empty:
            self.runner.copy(scheduler_output.copies)
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
        """Reads the adapter's folder and returns the adapter with its digest, ready for steps. Thread-safe. Raises
        ``LoRAError`` if it does not fit the model, or if the engine serves no adapters.
        """
        if self._lora_manager is None:
            raise LoRAError("This engine serves no adapters: start it with --enable-lora, or enable_lora=True.")
        return self._lora_manager.check(lora)

    def drop_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter on all ranks, if it is held. No later step may use it."""
        if self._lora_manager is not None and lora_id in self._lora_manager.held:
            self.call_all("remove_lora", lora_id)

    def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Calls one of the methods ``ON_EVERY_RANK`` on the workers of all ranks. Returns their answers in rank order:
        a string from a rank that could not do it.
        """
        return self.ranks.call(name, arguments, lambda: self.answer(name, *arguments))

    def answer(self, name: str, *arguments: Any) -> Any:
        """Calls one of the methods ``ON_EVERY_RANK`` here. Returns its result, or the reason if it cannot be done,
        which does not count as a failure of this rank.
        """
        assert name in ON_EVERY_RANK, name
        try:
            with on_device(self.device):
                return getattr(self, name)(*arguments)
        except (LoRAError, SleepError, OSError) as error:
            return str(error)

    def add_lora(self, *lora: Any) -> None:
        """Reads this rank's shard of an adapter (``lora_to_plain``) into host memory. Raises ``LoRAError``."""
        self.runner.add_lora(lora_from_plain(lora))

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter."""
        self.runner.remove_lora(lora_id)

    def open_disk(self, folder: str, fingerprint: str, num_slots: int) -> dict[str, Any]:
        """Opens this rank's part of the blocks on disk in ``folder``, which no other process may use. ``fingerprint``
        describes the numbers in them. Afterwards steps may start transfers. Returns what is there
        (``DiskContents.to_plain``). Raises ``OSError``.
        """
        own = Path(folder)
        if self.ranks.rank is not None:
            own, fingerprint = own / f"rank-{self.ranks.rank}", f"{fingerprint} rank {self.ranks.rank}"
            own.mkdir(mode=0o700, exist_ok=True)
        return self.runner.open_disk(own, fingerprint, num_slots, self._report).to_plain()

    def sleep(self) -> None:
        """See ``Sleeper.sleep``. Does nothing if this rank sleeps already. Raises ``SleepError``."""
        self._previous_step = None
        self.runner.sleep()

    def wake_up(self) -> None:
        """See ``Sleeper.wake_up``. Does nothing if this rank is awake. Raises ``SleepError``."""
        self.runner.wake_up()

    def _load_loras(self, rows: Sequence[int]) -> list[int]:
        """Loads the adapters of ``rows`` on all ranks. Returns the ids of the adapters that cannot be read."""
        manager, loras = self._lora_manager, self.states.loras
        assert manager is not None, "a step has adapters, and the model has no slots for them"
        wanted = {loras[row].lora_int_id: loras[row] for row in rows if row in loras}
        failed: list[int] = []
        for lora_id in [lora_id for lora_id in wanted if lora_id not in manager.held]:
            answers = self.call_all("add_lora", *lora_to_plain(wanted[lora_id]))
            if reasons := [each for each in answers if each is not None]:  # the folder may change, so some may have it
                log.error("the adapter %s cannot be used: %s", wanted[lora_id].lora_name, reasons[0])
                self.call_all("remove_lora", lora_id)
                failed.append(lora_id)
            if len(manager.held) > self._num_loras_held:
                self.call_all("remove_lora", next(each for each in manager.held if each not in wanted))
        return failed

    def close(self) -> None:
        """Frees the memory of KV pools and weights. Nothing can run afterwards."""
        self.ranks.close()
        self.pooler = self._lora_manager = self._previous_step = None
        self.sampler.close()


def _fail_without(
    rows: Sequence[int], loras: Mapping[int, LoRARequest], without_loras: Sequence[int], output: ModelOutput
) -> None:
    """Writes an error into ``output`` for each chunk whose adapter cannot be read."""
    for number, row in enumerate(rows):
        if row in loras and loras[row].lora_int_id in without_loras:
            message = f"The adapter {loras[row].lora_name} cannot be read any more."
            output.errors[number] = QuireError(ErrorCode.UNAVAILABLE, message, param="model")


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Enters inference mode, with ``device`` as the current GPU of this thread. Each thread has a current GPU of its
    own, by default the first one, and some libraries launch their kernels there wherever their tensors are.

    Converts a device failure to ``ExecutorError``. After such a failure every call to the device fails, so the engine
    must end.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
            yield
    except torch.AcceleratorError as error:
        raise ExecutorError(f"The device failed: {error}") from error


@dataclass(slots=True)
class ForwardPass:
    """A launched forward pass and what is needed to sample from it. ``hidden`` [T, hidden] are the hidden states.
    ``prepared`` are the draws that are prepared for the sampler already, and ``late`` those that ``sample_tokens``
    prepares.
    """

    batch: InputBatch
    prepared: "list[PreparedDraws]"
    late: list[RowDraw]
    hidden: torch.Tensor


PreparedDraws = tuple[list[RowDraw], SamplerInput]


class AsyncStep:
    """A step on the device of ``worker``. Implements ``AsyncModelOutput``. ``output`` holds what is known of the result
    so far.
    """

    def __init__(self, worker: Worker) -> None:
        self.output = ModelOutput()
        self._worker = worker
        self._forward: ForwardPass | None = None
        self._appended: AppendedDraws | None = None
        self._sampled: list[SamplerOutput | PlainSamplerOutput] = []
        self._sampled_numbers: Indices | None = None
        self._pooled: PoolerOutput | None = None
        self._event: StepEvent | None = None
        self._error: Exception | None = None

    def launch(self, batch: InputBatch, previous: "AsyncStep | None") -> None:
        """Launches the forward pass of ``batch``. ``previous`` samples its pending tokens.

        A draw with a grammar is prepared as soon as the tokens before it are known, so that its bitmask is filled while
        the model computes. The other draws gain nothing from that and are prepared together later. If no token is
        pending, all are prepared at once.
        """
        early, late, pending, worker = batch.row_draws, list[RowDraw](), None, self._worker
        if len(batch.pending):
            assert previous is not None, "a token is pending, and no step samples it"
            pending = previous.sampled_token_ids(batch.pending)
            worker.ranks.broadcast(pending)
            early = [each for each in batch.row_draws if not each.awaits_token and self._has_grammar(each)]
            late = [each for each in batch.row_draws if each.awaits_token or not self._has_grammar(each)]
        if not worker.ranks.is_sampler:  # another rank samples, but only rank 0 knows the grammars
            early, late = [each for each in batch.row_draws if self._has_grammar(each)], []
        prepared = [self._prepare(early)] if early else []
        hidden = worker.runner.forward(batch.model_input, pending)
        self._forward = ForwardPass(batch, prepared, late, hidden)
        self._appended = batch.appended

    def _has_grammar(self, draw: RowDraw) -> bool:
        return self._worker.states.sampling_state(draw.row, draw.choice).grammar_state is not None

    def _prepare(self, draws: list[RowDraw]) -> "PreparedDraws":
        states = self._worker.states
        return draws, self._worker.sampler.prepare(
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
        """Sends the bitmask to the rank that samples. Only for a rank 0 that does not sample."""
        forward, self._forward = self._forward, None
        if forward is not None:
            for _, inputs in forward.prepared:
                if inputs.bitmask is not None:
                    self._worker.ranks.send_bitmask(inputs.bitmask.wait())

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``. Waits only for prompt log-probabilities."""
        forward, self._forward = self._forward, None  # the next step can reuse its memory
        start = perf_counter()
        with on_device(self._worker.device):
            try:
                if forward is not None:
                    self._sample(forward)
            except Exception as error:  # noqa: BLE001 - ``get_output`` raises it, after the device has ended the rest
                self._error = error
            if self._worker.device.type != "cpu":
                self._event = StepEvent(self._worker.device)
        self.output.timings.sample += perf_counter() - start

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``. Waits for this step, but not for a step that was launched after it."""
        assert self._forward is None, "sample_tokens comes before get_output"
        timings, start, ranks = self.output.timings, perf_counter(), self._worker.ranks
        with on_device(self._worker.device):
            if self._event is not None:
                self._event.wait()
            if self._error is not None:
                raise self._error
            if self._appended is not None and not ranks.is_sampler:
                self._take_output(ranks.get_output())
            done = perf_counter()
            for sampled in self._sampled:
                sampled.fetch_into(self.output)
            if self._appended is not None and self.output.token_ids:
                token_ids = np.array(self.output.token_ids, np.int64)[self._appended.numbers]
                self._worker.states.tokens.write(self._appended.rows, self._appended.positions, token_ids)
                ranks.queue_sampled_tokens(self._appended.rows, self._appended.positions, token_ids)
            if self._pooled is not None:
                self._pooled.fetch_into(self.output)
        timings.forward += done - start
        timings.sample += perf_counter() - done
        return self.output

    def sampled_token_ids(self, rows: Indices) -> torch.Tensor:
        """Returns the tokens [P] int64 sampled for ``rows``, on the device, without waiting for them. If sampling
        failed, the values are arbitrary, and their results will not be used.
        """
        appended = self._appended
        if not self._sampled or appended is None:
            return torch.zeros(len(rows), dtype=torch.int64, device=self._worker.device)
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
        return token_ids.index_select(0, upload(torch.from_numpy(places), self._worker.device))

    def _take_output(self, output: ModelOutput) -> None:
        """Adopts the output of the rank that samples. The wait for it counts as forward time, minus the seconds of
        sampling.
        """
        swap, forward = self.output.timings.swap, self.output.timings.forward - output.timings.sample
        self.output = output
        output.timings = StepTimings(swap, forward, output.timings.sample)

    @property
    def needs_logits(self) -> bool:
        """Whether the ranks of the last stage compute logits for this step."""
        return self._forward is not None and self._forward.batch.needs_logits

    def end(self, *, with_logits: bool) -> None:
        """Completes the step on a rank that does not sample, in the place of ``sample_tokens``."""
        forward, self._forward = self._forward, None
        if forward is not None and with_logits:
            with on_device(self._worker.device):
                self._worker.ranks.compute_logits(lambda: self._logits(forward))

    def _sample(self, forward: ForwardPass) -> None:
        batch, prepared, logits, worker = forward.batch, forward.prepared, None, self._worker
        self.output.token_ids = [0] * batch.num_draws
        if batch.needs_logits:  # first: nothing that fails on this rank alone may come before
            logits = worker.ranks.compute_logits(lambda: self._logits(forward))
        if batch.pooled:
            assert worker.pooler is not None, "a step pools prompts, and the model says not how"
            self._pooled = worker.pooler.pool(forward.hidden, batch.pooled)
        if logits is None:
            return
        if batch.is_plain:
            metadata = worker.states.sampling.metadata(batch.appended.rows, batch.appended.positions)
            self._sampled = [worker.sampler.sample_plain(logits, metadata)]
            return
        if forward.late:
            prepared = [*prepared, self._prepare(forward.late)]
        self._sampled_numbers = np.array([each.number for draws, _ in prepared for each in draws], np.int64)
        self._sampled = [
            worker.sampler.sample(inputs, logits, [each.logits_row for each in draws]) for draws, inputs in prepared
        ]

    def _logits(self, forward: ForwardPass) -> torch.Tensor | None:
        """Returns the logits to sample from, if any, on the first rank of the last stage; all ranks of that stage
        compute them together. Consumes the logits of prompt tokens for prompt log-probabilities.
        """
        batch, start, logits, worker = forward.batch, perf_counter(), None, self._worker
        if len(batch.model_input.sampled_rows):
            logits = worker.runner.logits(forward.hidden, batch.model_input.sampled_rows)
            if batch.prompt_logprobs:
                logits = logits.clone()  # the logits of prompt tokens take their place
            seconds = perf_counter() - start  # counted as part of the forward pass
            self.output.timings.forward += seconds
            self.output.timings.sample -= seconds
        if batch.prompt_logprobs:
            logits_of, rows = partial(worker.runner.logits, forward.hidden), batch.model_input.prompt_logprob_rows
            output = self.output if worker.ranks.is_sampler else None
            # An error of this rank alone is the step's, and no failure of the call that all ranks make.
            self._error = compute_prompt_logprobs(
                batch.prompt_logprobs, rows, worker.states.vocab_size, logits_of, output
            )
        return logits
