"""One request, the sequences it generates, and what is counted on the way. Knows no blocks' meaning, no tensors, no
text.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from quire_proto.sampling import SamplingParams

from quire_engine.grammar import Grammar
from quire_engine.kv.table import BlockTable
from quire_engine.scheduling.plan import BeamCandidates, SampleRequest

if TYPE_CHECKING:
    from quire_engine.scheduling.beams import BeamSearch


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What an earlier attempt delivered of one choice; a ``finished`` one is not run again."""

    index: int
    token_ids: Tokens[int]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a router submitted, checked.

    ``output_token_ids`` were delivered by an earlier attempt of the first choice; they count towards ``max_tokens``,
    and the next token is drawn for the position after them. ``delivered`` says the same of each choice, and takes
    precedence. With the priority policy, smaller numbers go first. ``grammar`` is ``sampling.structured``, compiled.
    ``traceparent`` is carried for the service's traces and means nothing here.
    """

    request_id: str
    prompt_token_ids: Tokens[int]
    sampling: SamplingParams
    output_token_ids: Tokens[int] = ()
    cache_salt: bytes = b""
    traceparent: str = ""
    delivered: Tokens[ResumedOutput] = ()
    priority: int = 0
    grammar: Grammar | None = None

    @property
    def history(self) -> Tokens[ResumedOutput]:
        """What earlier attempts delivered, in one form."""
        if self.delivered or not self.output_token_ids:
            return self.delivered
        return (ResumedOutput(0, self.output_token_ids),)


class SequenceStatus(Enum):
    """Where a sequence is: exactly one of the scheduler's queues, or none once it finished."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """Something that happened to a sequence: its name, when (nanoseconds since 1970), how many blocks it moved, and
    why it was decided so.
    """

    name: str
    time: int
    blocks: int = 0
    reason: str = ""


@dataclass(slots=True)
class SequenceTimings:
    """When a sequence went through its stages, in nanoseconds since 1970; 0 where it has not come yet."""

    arrived: int
    admitted: int = 0
    first_token: int = 0
    finished: int = 0
    first_step: int = 0
    last_step: int = 0
    moments: list[SequenceEvent] = field(default_factory=list)

    def copy(self) -> "SequenceTimings":
        """The same past for a sequence that parts from this one."""
        return replace(self, moments=[*self.moments])


class SequenceGroup:
    """The sequences of one request.

    ``open`` are the choices whose end has not been told, and ``sequences`` the ones that live, by id. Until they part,
    one sequence (the *root*) stands for all choices. ``age`` is the order of first admission. ``num_cached`` of the
    prompt's tokens were found in the prefix cache then, and ``num_told`` have had their log-probabilities told.
    ``beams`` is the state of a beam search, and ``candidates`` what its next step chooses from, of the beams that have
    been computed; its sequences advance together, so they are preempted together.
    """

    __slots__ = ("age", "beams", "candidates", "num_cached", "num_prompt", "num_told", "open", "request", "sequences")

    def __init__(self, request: Request, beams: "BeamSearch | None") -> None:
        self.request = request
        self.beams = beams
        self.sequences: dict[int, Sequence] = {}
        self.candidates: dict[int, BeamCandidates] = {}
        self.open: dict[int, None] = {}
        self.age: int | None = None
        self.num_cached: int | None = None
        self.num_prompt = len(request.prompt_token_ids)
        self.num_told = 1


class Sequence:
    """The tokens of one output being made, or of several that have not parted yet.

    ``token_ids`` are all known tokens, prompt and output; ``num_computed`` of them are in KV memory, and
    ``num_scheduled`` will be once the steps under way are done. Everything the scheduler decides follows from these
    three: there is no prefill phase and no decode phase. ``index`` is the choice that it is an output of. ``draws`` say
    how its next token is drawn: once, or once for each output that parts from it then. At ``limit`` tokens it ends.
    ``width`` counts the sequences that it has places for. ``precedence`` orders what has been admitted: whoever is last
    gives way first. ``rank`` orders what waits, and ``served_at_arrival`` are the tokens that the engine had computed
    before it came.
    """

    __slots__ = (
        "draws", "group", "id", "index", "limit", "num_computed", "num_reported", "num_scheduled", "precedence",
        "rank", "served_at_arrival", "status", "table", "timeline", "token_ids", "width",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: int,
        group: SequenceGroup,
        index: int,
        token_ids: list[int],
        *,
        table: BlockTable,
        timeline: SequenceTimings,
        limit: int,
    ) -> None:
        self.id = sequence_id
        self.group = group
        self.index = index
        self.token_ids = token_ids
        self.table = table
        self.timeline = timeline
        self.draws: tuple[SampleRequest, ...] = ()
        self.limit = limit
        self.width = 1
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_reported = self.num_output
        self.precedence = (0, 0, sequence_id)
        self.rank = 0.0
        self.served_at_arrival = 0
        self.status = SequenceStatus.WAITING

    @property
    def request(self) -> Request:
        """The request that it is an output of."""
        return self.group.request

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in KV memory: at least 1, except in a beam that waits for the other beams."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens that a step can be given next: the known ones that no step has been given, or else the one that is
        being drawn. For that one nothing is planned if the sequence certainly ends with it, parts there into several,
        or is a beam, which waits for the others.
        """
        return len(self.token_ids) - self.num_scheduled or int(self._runs_ahead)

    @property
    def _runs_ahead(self) -> bool:
        goes_on = len(self.token_ids) + 1 < self.limit
        return goes_on and len(self.draws) == 1 and self.group.beams is None

    @property
    def num_output(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return len(self.token_ids) - self.group.num_prompt
