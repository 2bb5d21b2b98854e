"""An engine as the contract describes it, without a network: it does what it is told, when it is told, and checks what
it is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.v1 import engine_pb2, types_pb2

from tests.support.scripted_engine import ABORT, LENGTH, STOP, logprobs, output

PROMPT_PIECE = 2
STOP_TOKEN = 3


@dataclass(frozen=True)
class Script:
    """What each choice comes to, wherever and however often it is run. A token's log-probability depends on its choice
    and its place; ``STOP_TOKEN``, which ends a choice, has one, too. ``beams`` are told in place of that by the k-th
    search; each of its searches finds others.
    """

    choices: Sequence[Sequence[int]]
    max_tokens: int

    def logprob(self, index: int, position: int) -> float:
        return -((index * 5 + position * 3) % 7) / 2

    def beams(self, search: int, count: int) -> list[list[int]]:
        return [[*self.choices[index], search] for index in range(count)]


@dataclass
class _Run:
    """One request that the engine is at work on: how many tokens each running choice has."""

    message: engine_pb2.Submit
    made: dict[int, int]
    search: int = 0
    prompt_told: int = 1
    started: bool = False

    @property
    def tells_prompt(self) -> bool:
        sampling = self.message.sampling
        return sampling.HasField("prompt_logprobs") and self.prompt_told < len(self.message.prompt_token_ids)


@dataclass
class ContractEngine:
    """Batches are kept, so that they can be replayed; nothing happens but in ``step``. With each piece it says the last
    ``repeats`` tokens again, and with ``late_ends`` a choice's end comes after its last token. Without ``columns`` it
    is an engine that does not know them.
    """

    script: Script
    generation: int = 1
    batches: list[engine_pb2.StepBatch] = field(default_factory=list)
    runs: dict[str, _Run] = field(default_factory=dict)
    searches: int = 0
    repeats: int = 0
    late_ends: bool = False
    columns: bool = False
    submits: int = 0
    _outputs: list[engine_pb2.SequenceOutput] = field(default_factory=list)
    _tokens: engine_pb2.TokenColumns = field(default_factory=engine_pb2.TokenColumns)

    def receive(self, command: engine_pb2.SessionRequest) -> None:
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._start(command.submit)
        elif kind == "cancel":
            self._cancel(command.cancel.request_id, command.cancel.indexes)

    def step(self, tokens: Mapping[int, int]) -> engine_pb2.StepBatch:
        """Lets each choice of each request make so many tokens, or come to its end."""
        for request_id, run in list(self.runs.items()):
            if run.tells_prompt:
                self._tell_prompt(request_id, run)
            if not run.tells_prompt:
                for index, count in tokens.items():
                    self._advance(request_id, run, index, count)
        tokens = self._tokens if self._tokens.handles else None
        batch = engine_pb2.StepBatch(sequence=len(self.batches) + 1, outputs=self._outputs, tokens=tokens)
        self.batches.append(batch)
        self._outputs, self._tokens = [], engine_pb2.TokenColumns()
        return batch

    def give_back(self) -> None:
        """What an engine does that shuts down."""
        for request_id in list(self.runs):
            self._cancel(request_id, ())

    def restart(self) -> None:
        """Nothing is left of what it knew."""
        self.generation += 1
        self.batches, self.runs, self._outputs = [], {}, []
        self._tokens = engine_pb2.TokenColumns()

    def _start(self, message: engine_pb2.Submit) -> None:
        if message.request_id in self.runs:
            return
        self.submits += 1
        sampling = message.sampling
        if sampling.beam_width:
            assert not message.delivered
            self.searches += 1
            made = dict.fromkeys(range(sampling.n), 0)
        else:
            made = self._positions(message, sampling.best_of or sampling.n)
        self.runs[message.request_id] = _Run(message, made, self.searches)

    def _positions(self, message: engine_pb2.Submit, drawn: int) -> dict[int, int]:
        assert drawn == 1 or not message.output_token_ids
        made = dict.fromkeys(range(drawn), 0) | {0: len(message.output_token_ids)}
        assert list(message.output_token_ids) == list(self.script.choices[0][: made[0]])
        for delivered in message.delivered:
            made[delivered.index] = len(delivered.token_ids)
            expected = self.script.choices[delivered.index][: made[delivered.index]]
            assert list(delivered.token_ids) == list(expected)
            if delivered.finished:
                del made[delivered.index]
        assert made
        assert all(count < self.script.max_tokens for count in made.values())
        return made

    def _cancel(self, request_id: str, indexes: Sequence[int]) -> None:
        run = self.runs.get(request_id)
        if run is None:
            return
        for index in indexes or list(run.made):
            if index in run.made:
                self._end(request_id, run, index, ABORT, [])

    def _tell_prompt(self, request_id: str, run: _Run) -> None:
        length = len(run.message.prompt_token_ids)
        end = min(length, run.prompt_told + PROMPT_PIECE)
        begin = max(1, run.prompt_told - self.repeats)
        told = logprobs(*(-float(position) for position in range(begin, end)))
        self._outputs.append(output(request_id, prompt_logprobs=told, prompt_position=begin))
        run.prompt_told = end

    def _advance(self, request_id: str, run: _Run, index: int, count: int) -> None:
        if index not in run.made or not count:
            return
        if run.message.sampling.beam_width:
            beam = self.script.beams(run.search, run.message.sampling.n)[index]
            self._end(request_id, run, index, STOP, beam)
            return
        whole, begin = self.script.choices[index], run.made[index]
        token_ids = whole[begin : begin + count]
        run.made[index] += len(token_ids)
        if begin + len(token_ids) == self.script.max_tokens and not (token_ids and self.late_ends):
            self._end(request_id, run, index, LENGTH, token_ids)
        elif len(token_ids) < count and not (token_ids and self.late_ends):
            self._end(request_id, run, index, STOP, token_ids)
        else:
            self._tell(request_id, run, index, token_ids)

    def _end(
        self,
        request_id: str,
        run: _Run,
        index: int,
        reason: types_pb2.FinishReason.ValueType,
        token_ids: Sequence[int],
    ) -> None:
        self._tell(request_id, run, index, token_ids, reason)
        del run.made[index]
        if not run.made:
            del self.runs[request_id]

    def _tell(
        self,
        request_id: str,
        run: _Run,
        index: int,
        token_ids: Sequence[int],
        reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    ) -> None:
        sampling = run.message.sampling
        end = len(token_ids) if sampling.beam_width else run.made[index]
        begin = end - len(token_ids)
        if not sampling.beam_width:
            begin = max(0, begin - self.repeats)
            token_ids = self.script.choices[index][begin:end]
        told = sampling.HasField("logprobs") or sampling.best_of > sampling.n
        values = [self.script.logprob(index, position) for position in range(begin, end)] if told else []
        score = -1.0 - index if sampling.beam_width and reason == STOP else None
        stop_token = None
        if told and reason == STOP:
            (its_logprobs,) = logprobs(self.script.logprob(index, end))
            stop_token = types_pb2.StopToken(token_id=STOP_TOKEN, logprobs=its_logprobs)
        plain = bool(token_ids) and not reason and not told and not sampling.beam_width
        if self.columns and run.message.handle and run.started and plain:
            self._tokens.handles.extend([run.message.handle + index] * len(token_ids))
            self._tokens.token_ids.extend(token_ids)
            self._tokens.positions.extend(range(begin, end))
            return
        run.started = True
        more = {"index": index, "logprobs": logprobs(*values), "score": score, "stop_token": stop_token}
        self._outputs.append(output(request_id, token_ids, begin, reason, **more))
