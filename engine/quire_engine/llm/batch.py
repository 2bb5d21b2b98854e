"""One call's requests on their way through the engine: fed, stepped and gathered in the caller's thread."""

from collections import deque
from collections.abc import Callable, Sequence

from quire_proto.text.model_text import ModelTokenizer

from quire_engine.core import EngineCore, EngineCoreOutputs
from quire_engine.llm.collector import OutputProcessor
from quire_engine.llm.outputs import RequestOutput
from quire_engine.llm.progress import Progress
from quire_engine.llm.submission import PreparedRequest

_LOOKAHEAD = 4  # waiting requests for each that may run: enough to choose from, whatever the policy


class OfflineRun:
    """Runs ``submissions`` on ``core``, whose outputs must come to ``on_step``. Only so many of them wait there at a
    time that what they need does not grow with their number. ``broken`` is set when a step did not come to its
    end: then nothing can be run on the core any more.
    """

    def __init__(
        self, submissions: Sequence[PreparedRequest], core: EngineCore, text: ModelTokenizer, progress: Progress
    ) -> None:
        self.broken = False
        self._core = core
        self._scheduler = core.scheduler
        self._text = text
        self._progress = progress
        self._pending = deque(self._in_order(submissions))
        self._live: dict[str, tuple[int, OutputProcessor]] = {}
        self._to_abort: list[tuple[str, int]] = []
        self._results: dict[int, RequestOutput] = {}
        limits = self._scheduler.config
        self._window = min(limits.max_waiting, _LOOKAHEAD * limits.max_num_seqs)

    def run(self, between_steps: Callable[[], None]) -> list[RequestOutput]:
        """The outputs, in the order of the submissions. If ``between_steps`` raises, what runs is aborted; in any case
        the core is idle afterwards.
        """
        try:
            while self._pending or self._live:
                between_steps()
                self._feed()
                self._step()
        finally:
            if not self.broken:
                self._abort_all()
        return [self._results[index] for index in sorted(self._results)]

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Receives the news of a step. What a stop string has ended is ended in the engine once the step is over."""
        finished = prompt_tokens = output_tokens = 0
        for output in step.outputs:
            if output.request_id not in self._live:
                continue  # its end is already told
            index, collector = self._live[output.request_id]
            if collector.add_output(output):
                self._to_abort.append((output.request_id, output.index))
            output_tokens += len(output.token_ids)
            if collector.is_finished:
                self._results[index] = collector.result()
                del self._live[output.request_id]
                finished += 1
                prompt_tokens += len(collector.prepared.request.prompt_token_ids)
        self._progress.add(prompts=finished, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def _feed(self) -> None:
        while self._pending and len(self._scheduler.waiting) < self._window:
            index, submission = self._pending.popleft()
            self._scheduler.add_request(submission.request)
            self._live[submission.request.request_id] = index, OutputProcessor(submission, self._text)

    def _step(self) -> None:
        self.broken = True
        self._core.step()
        self.broken = False
        for request_id, index in self._to_abort:
            self._scheduler.abort_request(request_id, (index,))
        self._to_abort.clear()

    def _abort_all(self) -> None:
        for request_id in self._live:
            self._scheduler.abort_request(request_id)
        self._live.clear()
        while self._scheduler.has_work:
            self._step()

    def _in_order(self, submissions: Sequence[PreparedRequest]) -> list[tuple[int, PreparedRequest]]:
        """By the policy, as far as it can be known before all of them wait."""
        numbered = list(enumerate(submissions))
        if self._scheduler.config.scheduling_policy == "priority":
            numbered.sort(key=lambda each: each[1].request.priority)
        return numbered
