"""What passes between a server and the process of its core: messages as JSON, each with its length before it."""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from quire_proto.errors import QuireError

from quire_engine.core.data_parallel import DPStats
from quire_engine.core.engine_core import Command, EngineCoreOutputs
from quire_engine.core.executor import WeightStats
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.startup import PhaseTime
from quire_engine.core.step import Grammar
from quire_engine.core.step_plain import error_from_plain, error_to_plain
from quire_engine.core_client.client import CoreStats
from quire_engine.core_client.codec import Codec, Codecs
from quire_engine.errors import LoRAError, LoRANotFoundError
from quire_engine.structured_output.llguidance import RejectedError, UnusableTokenizerError

MAX_BYTES = 1 << 28
"""The most bytes of a message."""
STATUS_SECONDS = 0.5
"""The interval of ``Status`` messages."""
_LENGTH = Struct("<I")
_READ_BYTES = 1 << 20
_RAISED = (LoRAError, LoRANotFoundError, RejectedError, UnusableTokenizerError, OSError)


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error that a call raised in the other process. ``kind`` is the name of its class; "" for one that no caller
    expects.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> "RemoteError":
        """Returns what to send of ``error``."""
        kind = next((each for each in reversed(_RAISED) if isinstance(error, each)), None)
        return cls("" if kind is None else kind.__name__, str(error) or type(error).__name__)

    def to_exception(self) -> Exception:
        """Returns the error to raise in this process."""
        kinds: dict[str, type[Exception]] = {each.__name__: each for each in _RAISED}
        return kinds.get(self.kind, RuntimeError)(self.text)


# To the core's process


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: the engine's settings as JSON types, when the server's process began (seconds since 1970), and
    whether spans of steps are exported.
    """

    config: Any
    started: float
    is_traced: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Calls ``CoreRunner.start``."""


@dataclass(frozen=True, slots=True)
class CheckLoRA:
    """Calls ``CoreRunner.check_lora``."""

    lora: LoRARequest
    reply: Callable[[LoRARequest | RemoteError], None]


@dataclass(frozen=True, slots=True)
class LoadTokenizer:
    """Calls ``GrammarBackend.load``."""

    reply: Callable[[RemoteError | None], None]


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Calls ``GrammarBackend.compile``. Keeps the grammar under this id until ``FreeGrammar``."""

    grammar_id: int
    definition: str
    reply: Callable[[RemoteError | None], None]


@dataclass(frozen=True, slots=True)
class FreeGrammar:
    """Drops a grammar that no later request uses."""

    grammar_id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Calls ``CoreRunner.leave``."""


ToCore = Start | Run | Command | CheckLoRA | LoadTokenizer | CompileGrammar | FreeGrammar | Leave


# From the core's process


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. ``description`` is a serialized ``DescribeResponse``."""

    description: bytes
    phases: list[PhaseTime]
    stats: CoreStats


@dataclass(frozen=True, slots=True)
class Published:
    """The outputs of a step, and the totals after it."""

    outputs: EngineCoreOutputs
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class Reply:
    """Calls the ``reply`` of message ``call_id`` with ``values``, which are encoded by its types."""

    call_id: int
    values: list[Any]


@dataclass(frozen=True, slots=True)
class Status:
    """Sent at a regular interval: ``EngineCore.seconds_since_progress``, and totals that change between steps."""

    seconds_since_progress: float
    weights: WeightStats | None
    data_parallel: DPStats | None


@dataclass(frozen=True, slots=True)
class Leaving:
    """Calls ``CoreListener.on_leaving``."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message: the core has ended, or its model cannot be loaded. ``reason`` is a sentence that says why; None
    after ``Shutdown``.
    """

    reason: str | None


FromCore = Ready | Published | Reply | Status | Leaving | Ended


def not_sent(value: Any) -> Any:
    """Encodes or decodes what is never sent in this direction."""
    raise TypeError(f"{type(value).__name__} is not sent in this direction")


def make_codecs(grammar: Codec, callback: Callable[[Sequence[Codec]], Codec]) -> Codecs:
    """Returns the codecs of one side of the link. ``grammar`` is that of compiled grammars, and ``callback`` makes that
    of a ``reply``.
    """
    special = {
        Grammar: grammar,
        QuireError: Codec(error_to_plain, error_from_plain),
        str | Path: Codec(str, Path),
        Any: Codec(lambda value: value, lambda plain: plain),
    }
    return Codecs(special, callback)


class Link:
    """One end of the socket between the two processes. ``codecs`` belong to this side, ``sent`` and ``received`` the
    types of the messages in each direction.
    """

    def __init__(self, link: socket.socket, codecs: Codecs, sent: Any, received: Any) -> None:
        self.socket = link
        self._encode = codecs.of(sent).encode
        self._decode = codecs.of(received).decode
        self._unread = bytearray()

    def to_bytes(self, message: Any) -> bytes:
        """Returns ``message`` as it is written to the socket. Raises ``ValueError`` if it is too long."""
        text = json.dumps(self._encode(message), separators=(",", ":")).encode()
        if len(text) > MAX_BYTES:
            raise ValueError(f"A message of {len(text)} bytes has more than {MAX_BYTES}.")
        return _LENGTH.pack(len(text)) + text

    def receive(self, flags: int = 0) -> list[Any] | None:
        """Reads from the socket once. Returns the messages that are complete now; None if the other side has closed the
        link. Raises ``OSError``, or ``ValueError`` for what is not a message.
        """
        data = self.socket.recv(_READ_BYTES, flags)
        if not data:
            return None
        self._unread += data
        messages, start = [], 0
        while len(self._unread) >= start + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._unread, start)
            if size > MAX_BYTES:
                raise ValueError(f"A message of {size} bytes has more than {MAX_BYTES}.")
            begin, end = start + _LENGTH.size, start + _LENGTH.size + size
            if len(self._unread) < end:
                break
            messages.append(self._decode(json.loads(self._unread[begin:end])))
            start = end
        del self._unread[:start]
        return messages
