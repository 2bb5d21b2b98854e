"""A step that is under way on the device: it has its tokens drawn, hands them to the step after it, and says what came
of it. Knows batches and draws, neither plans nor blocks.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from quire_engine.device.transfers import upload
from quire_engine.executor.base import ExecutorError
from quire_engine.executor.torch.batch import InputBatch
from quire_engine.executor.torch.devices import inference_on
from quire_engine.executor.torch.model_runner import Runner
from quire_engine.executor.torch.streams import StepEvent, record_event
from quire_engine.sampling import Sampler, SamplerInput, SamplerOutput, compute_prompt_logprobs
from quire_engine.scheduling.plan import ModelOutput, StepTimings


class ForwardPass:
    """The forward pass of one batch, launched when this is made, and the draws from it."""

    def __init__(
        self, batch: InputBatch, runner: Runner, sampler: Sampler, vocab_size: int, pending: torch.Tensor | None
    ) -> None:
        self._batch, self._runner, self._sampler, self._vocab_size = batch, runner, sampler, vocab_size
        early, self._late = _split_by_readiness(batch)
        self._prepared: list[tuple[list[int], SamplerInput]] = []
        self._prepare_draws(early)
        self._hidden = runner.forward(batch.model_input, pending)
        self._logits = runner.logits(self._hidden, batch.model_input.sampled_rows) if batch.draws else None

    def compute_prompt_logprobs(self, result: ModelOutput) -> None:
        """Writes the log-probabilities of prompts, for which it waits."""
        if self._batch.prompt_logprob_chunks:
            logits_of = partial(self._runner.logits, self._hidden)
            compute_prompt_logprobs(
                self._batch.prompt_logprob_chunks,
                self._batch.model_input.prompt_logprob_rows,
                self._vocab_size,
                logits_of,
                result,
            )

    def draw(self) -> tuple[list[int], list[SamplerOutput]]:
        """Has the tokens drawn: the ids of their sequences, and their draws in the same order. Called once."""
        self._prepare_draws(self._late)
        if self._logits is None:
            return [], []
        rows_of, draws = self._batch.draw_rows, self._batch.draws
        ids = [draws[place].sequence_id for places, _ in self._prepared for place in places]
        return ids, [
            self._sampler.sample(pending, self._logits, [rows_of[place] for place in places])
            for places, pending in self._prepared
        ]

    def _prepare_draws(self, places: list[int]) -> None:
        if places:
            self._prepared.append((places, self._sampler.prepare([self._batch.draws[place] for place in places])))


class AsyncStep:
    """An ``AsyncModelOutput``. ``forward`` is None where there was nothing to compute; ``result`` holds what is known.

    What ``sample_tokens`` raises is raised by ``get_output``, so that a step ends in one place.
    """

    def __init__(self, device: torch.device, forward: ForwardPass | None, result: ModelOutput) -> None:
        self._device = device
        self._forward = forward
        self._result = result
        self._rows: dict[int, int] = {}
        self._sampled: list[SamplerOutput] = []
        self._mark: StepEvent | None = None
        self._error: Exception | None = None

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``. Waits only for the log-probabilities of prompts. Raises
        ``ExecutorError``.
        """
        forward, self._forward = self._forward, None  # its memory is free for the next step
        with device_errors(), inference_on(self._device), timed(self._result.timings, "sample"):
            try:
                if forward is not None:
                    self._draw(forward)
            except Exception as error:  # noqa: BLE001 - ``get_output`` raises it, when the device is done with the rest
                self._error = error
            self._mark = record_event(self._device)

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``. Waits for this step, and not for one that was launched after it."""
        assert self._mark is not None, "draw comes before result"
        with device_errors():
            with timed(self._result.timings, "forward"):
                self._mark.wait()
            if self._error is not None:
                raise self._error
            with timed(self._result.timings, "sample"):
                for drawn in self._sampled:
                    drawn.fetch_into(self._result)
        return self._result

    def sampled_token_ids(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """The tokens [P] int64 that were drawn for these sequences, on the device, without waiting for them. Where
        there is none, as the draw failed, it is any token: what is made of it will not be used.
        """
        if not self._sampled:
            return torch.zeros(len(sequence_ids), dtype=torch.int64, device=self._device)
        drawn = [one.token_ids for one in self._sampled]
        token_ids = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        rows = [self._rows.get(sequence_id, 0) for sequence_id in sequence_ids]
        if rows == list(range(len(token_ids))):
            return token_ids
        return token_ids.index_select(0, upload(torch.tensor(rows), self._device))

    def _draw(self, forward: ForwardPass) -> None:
        forward.compute_prompt_logprobs(self._result)
        ids, self._sampled = forward.draw()
        self._rows = {sequence_id: row for row, sequence_id in enumerate(ids)}


def _split_by_readiness(batch: InputBatch) -> tuple[list[int], list[int]]:
    """The places of the draws that are begun with the forward pass, and of those that are begun when they are made.

    What has a grammar is begun as soon as its tokens are known, so that its mask is filled meanwhile. The others would
    gain nothing, and are made together; all are begun at once where no token is pending.
    """
    places = list(range(len(batch.draws)))
    if not any(batch.awaits_token):
        return places, []
    early = [batch.draws[place].grammar is not None and not batch.awaits_token[place] for place in places]
    return [place for place in places if early[place]], [place for place in places if not early[place]]


@contextmanager
def device_errors() -> Iterator[None]:
    """A device that failed stays so, whatever is asked of it: the engine must end."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise ExecutorError(f"The device failed: {error}") from error


@contextmanager
def timed(timings: StepTimings, part: str) -> Iterator[None]:
    """Adds the seconds of the block to one field of ``timings``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, part, getattr(timings, part) + time.perf_counter() - start)
