"""Which requests are live, and the sequences that each of them is made of: their birth, their parting, their end."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire_proto.hashing import extra_key
from quire_proto.sampling import choice_seed

from quire_engine.kv.memory import KVCacheManager
from quire_engine.kv.table import BlockTable
from quire_engine.request import Request, Sequence, SequenceGroup, SequenceTimings
from quire_engine.scheduling.beams import BeamSearch
from quire_engine.scheduling.plan import SampleRequest, SchedulerOutput

if TYPE_CHECKING:
    from quire_engine.scheduling.config import SchedulerConfig


class Registry:
    """All live requests and sequences. Ids of sequences only grow, in the order of arrival."""

    def __init__(self, config: "SchedulerConfig", memory: KVCacheManager, clock: Callable[[], int]) -> None:
        self._config = config
        self._kv_cache_manager = memory
        self._clock = clock
        self._next_id = 0
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._finished_seq_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    def group(self, request_id: str) -> SequenceGroup | None:
        """The live request of this id."""
        return self._groups.get(request_id)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """The live sequence of this id."""
        return self._sequences.get(sequence_id)

    def create(self, request: Request) -> list[Sequence]:
        """The sequences that a request begins with: one for all its choices, or one for each that an earlier attempt
        left unfinished.
        """
        stops = self._stop_token_ids(request)
        beams = BeamSearch(request.sampling, stops) if request.sampling.beam_width else None
        group = SequenceGroup(request, beams)
        self._groups[request.request_id] = group
        history = {delivered.index: delivered for delivered in request.all_resumed_outputs}
        choices = range(request.sampling.num_returned)
        group.unfinished = {i: None for i in choices if i not in history or not history[i].finished}
        if not history:
            return [self._new_root(group, len(choices))]
        return [self._new_sequence(group, i, [*history[i].token_ids] if i in history else []) for i in group.unfinished]

    def fork(self, parent: Sequence, sequence_id: int | None = None, index: int = 0) -> Sequence:
        """A sequence that parts from ``parent`` with all its tokens and blocks. It runs as soon as it is queued."""
        child = Sequence(
            self._next_sequence_id() if sequence_id is None else sequence_id,
            parent.group,
            index,
            [*parent.token_ids],
            table=self._kv_cache_manager.fork(parent.table),
            timings=parent.timings.copy(),
            limit=parent.limit,
        )
        child.num_computed_tokens, child.num_scheduled_tokens = parent.num_computed_tokens, parent.num_scheduled_tokens
        child.num_output_sent = parent.num_output_sent
        child.preemption_key = (*parent.preemption_key[:2], child.id)
        child.draws = (self._draw(child, index),)
        self._register(child)
        return child

    def split(self, root: Sequence) -> None:
        """``root`` is from now on the output of its own choice only. Choices that have ended were drawn for until now,
        and get no sequences.
        """
        group, others = root.group, root.draws[1:]
        self._finished_seq_ids += [
            draw.sequence_id for index, draw in enumerate(others, 1) if index not in group.unfinished
        ]
        root.draws, root.num_slots = root.draws[:1], 1

    def free(self, sequence: Sequence) -> None:
        """Forgets a sequence, all that it draws for, and its request with the last one."""
        del self._sequences[sequence.id]
        self._finished_seq_ids += [draw.sequence_id for draw in sequence.draws]
        group = sequence.group
        del group.sequences[sequence.id]
        if not group.sequences:
            del self._groups[group.request.request_id]

    def take_finished(self, under_way: Iterable[SchedulerOutput]) -> list[int]:
        """Ids of the sequences that were closed since the last call, but for those that a plan under way draws for:
        they are told later, because that draw would make anew what the executor forgets.
        """
        if not self._finished_seq_ids:
            return []
        drawn = {draw.sequence_id for plan in under_way for chunk in plan.chunks for draw in chunk.draws}
        ended = [each for each in self._finished_seq_ids if each not in drawn]
        self._finished_seq_ids = [each for each in self._finished_seq_ids if each in drawn]
        return ended

    def _new_root(self, group: SequenceGroup, width: int) -> Sequence:
        """One sequence for all choices, whose ids it reserves."""
        root = self._new_sequence(group, 0, [])
        if group.beam_search is not None:
            root.num_slots = group.beam_search.width
        elif width > 1:
            root.num_slots = width
            own = root.draws[0]
            root.draws = (own, *(self._draw(root, i, self._next_sequence_id()) for i in range(1, width)))
        return root

    def _new_sequence(self, group: SequenceGroup, index: int, output: list[int]) -> Sequence:
        request = group.request
        table = BlockTable(extra_key(self._config.model_revision, request.cache_salt))
        tokens = [*request.prompt_token_ids, *output]
        limit = min(group.num_prompt_tokens + request.sampling.max_tokens, self._config.max_model_len)
        timings = SequenceTimings(arrived=self._clock())
        sequence = Sequence(self._next_sequence_id(), group, index, tokens, table=table, timings=timings, limit=limit)
        sequence.draws = (self._draw(sequence, index),)
        self._register(sequence)
        return sequence

    def _register(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        sequence.group.sequences[sequence.id] = sequence

    def _draw(self, sequence: Sequence, index: int, sequence_id: int | None = None) -> SampleRequest:
        group = sequence.group
        request = group.request
        return SampleRequest(
            sequence_id=sequence.id if sequence_id is None else sequence_id,
            params=request.sampling,
            seed=choice_seed(request.sampling.seed, index),
            token_ids=sequence.token_ids,
            num_prompt_tokens=group.num_prompt_tokens,
            stop_token_ids=self._stop_token_ids(request),
            grammar=request.grammar,
            num_candidates=group.beam_search.num_candidates if group.beam_search is not None else 0,
        )

    def _stop_token_ids(self, request: Request) -> frozenset[int]:
        sampling = request.sampling
        ends = frozenset() if sampling.ignore_eos else self._config.eos_token_ids
        return ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends

    def _next_sequence_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
