"""One request, the sequence it generates, and what is counted on the way. Knows no blocks' meaning, no tensors, no
text.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum, auto

from quire_proto.errors import QuireError
from quire_proto.hashing import extra_key
from quire_proto.sampling import FinishReason, SamplingParams

from quire_engine.grammar import Grammar
from quire_engine.kv.table import BlockTable
from quire_engine.scheduling.plan import Draw


@dataclass(frozen=True, slots=True)
class Delivered:
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
    delivered: Tokens[Delivered] = ()
    priority: int = 0
    grammar: Grammar | None = None


class Status(Enum):
    """Where a sequence is: exactly one of the scheduler's queues, or none once it finished."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a sequence: its name, when (nanoseconds since 1970), and how many blocks it
    moved.
    """

    name: str
    time: int
    blocks: int = 0


@dataclass(slots=True)
class Timeline:
    """When a sequence went through its stages, in nanoseconds since 1970; 0 where it has not come yet."""

    arrived: int
    admitted: int = 0
    first_token: int = 0
    finished: int = 0
    first_step: int = 0
    last_step: int = 0
    moments: list[Moment] = field(default_factory=list)


class Sequence:
    """The tokens of one output being made.

    ``token_ids`` are all known tokens, prompt and output; ``num_computed`` of them are in KV memory. Everything the
    scheduler decides follows from these two: there is no prefill phase and no decode phase.
    """

    __slots__ = (
        "draw", "error", "finish_reason", "id", "num_cached", "num_computed", "num_reported", "request",
        "status", "table", "timeline", "token_ids",
    )  # fmt: skip

    draw: Draw

    def __init__(self, sequence_id: int, request: Request, model_revision: str, now: int) -> None:
        self.id = sequence_id
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed = 0
        self.num_reported = len(request.output_token_ids)
        self.num_cached: int | None = None
        self.table = BlockTable(extra_key(model_revision, request.cache_salt))
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: QuireError | None = None
        self.timeline = Timeline(arrived=now)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in KV memory; at least 1 until the sequence ends."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt

    def append(self, token_id: int) -> None:
        """Adds a drawn token."""
        self.token_ids.append(token_id)
