"""What a client received of one response over either API. Equal requests must have equal ``content()``."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any

from google.protobuf.json_format import MessageToDict
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from tests.chaos.cursor import Cursor
from tests.chaos.failure import Failure


@dataclass
class Call:
    """A tool call of one choice."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    """``tokens`` are those that the client received, each with its log-probabilities; behind them the one that ended
    the output, where that is shown.
    """

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=lambda: defaultdict(Call))
    end: str = ""
    score: float | None = None
    has_role: bool = False

    def content(self) -> tuple[Any, ...]:
        """All that must not depend on faults. Ids of calls are left out: they follow from the request's id."""
        calls = [(index, call.name, call.arguments) for index, call in self.calls.items()]
        return self.text, self.tokens, calls, self.end, self.score

    def begins(self, whole: "Choice") -> bool:
        """Whether it is the beginning of ``whole``, or all of it."""
        calls = [call for index, call in self.calls.items() if whole.calls.get(index) is None]
        pairs = [(call, whole.calls[index]) for index, call in self.calls.items() if index in whole.calls]
        called = all(call.name == other.name and other.arguments.startswith(call.arguments) for call, other in pairs)
        text = whole.text.startswith(self.text) and whole.tokens[: len(self.tokens)] == self.tokens
        return not calls and called and text and (self.end, self.score) in (("", None), (whole.end, whole.score))

    def is_at(self, position: int) -> bool:
        """Whether so many tokens were received; the one that ended the output may be shown, but does not count."""
        return position == len(self.tokens) or (self.end == "stop" and position == len(self.tokens) - 1)

    @property
    def length(self) -> int:
        """Characters and tokens received."""
        calls = sum(len(call.name + call.arguments) for call in self.calls.values())
        return len(self.text) + calls + len(self.tokens)


@dataclass
class Answer:
    """``failure`` is a typed error that trying again did not cure, ``untyped`` anything else that is no answer. The
    request is ``known_after_all`` if it was found again after the failure, which was at ``failed_at``. ``repeated`` and
    ``malformed`` are sentences on what no answer may be, whatever died. ``away`` are the times between which no router
    was at work for this client as far as it knows, and ``sent`` those at which it sent the whole request (by
    ``time.monotonic``). ``unended`` says where it was still running when it was read again, from its end to then.
    Of its connections it ``resumed`` so many, and ``broke`` not one of its own accord. ``pause``
    are the most seconds between two of its events, resumed ones included.
    """

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: tuple[int, int] | None = None
    failure: Failure | None = None
    failed_at: float = inf
    known_after_all: bool = False
    untyped: str | None = None
    hung: bool = False
    unended: list[tuple[float, float, str]] = field(default_factory=list)
    resumed: int = 0
    broke: int = 0
    repeated: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    cursor: Cursor | None = None
    pause: float = 0.0
    heard_at: float = inf

    def hear(self) -> None:
        """An event came."""
        now = monotonic()
        self.pause = max(self.pause, now - self.heard_at)
        self.heard_at = now

    def take(self, event: dict[str, Any]) -> None:
        """One event's data, or a whole answer. Raises ``KeyError`` and its kin for what is neither."""
        self.hear()
        for choice in event["choices"]:
            self._take_choice(self.choices[choice["index"]], choice)
        if event.get("usage"):
            usage = event["usage"]
            self._use(usage["prompt_tokens"], usage["completion_tokens"])
            if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
                self.malformed.append(f"a usage that does not add up: {usage}")

    def take_message(self, message: pb.GenerateResponse | pb.ChatResponse) -> None:
        """One message of a gRPC stream."""
        self.hear()
        choice = self.choices[message.index]
        self._write(choice, message.text)
        logprobs: list[Any] = [MessageToDict(each) for each in message.logprobs]
        logprobs = logprobs or [None] * len(message.token_ids)
        choice.tokens += zip(message.token_ids, logprobs, strict=True)
        if message.HasField("stop_token"):
            choice.tokens.append((message.stop_token.token_id, MessageToDict(message.stop_token.logprobs)))
        for call in getattr(message, "tool_calls", ()):
            self._take_call(choice, call.index, Call(call.id, call.name, call.arguments))
        if message.finish_reason:
            name = types_pb2.FinishReason.Name(message.finish_reason)
            self._end(choice, name.removeprefix("FINISH_REASON_").lower())
            choice.score = message.score if message.HasField("score") else None
        if message.HasField("usage"):
            self._use(message.usage.prompt_tokens, message.usage.completion_tokens)

    def reach(self, event_id: str, *, counts_tokens: bool = True) -> None:
        """Checks the cursor of the last event: ahead of any before, and in agreement with what was received."""
        try:
            cursor = Cursor.parse(event_id)
        except ValueError as error:
            self.malformed.append(str(error))
            return
        if self.cursor is not None and not cursor.follows(self.cursor):
            self.malformed.append(f"{cursor} after {self.cursor}")
        self.cursor = cursor
        if cursor.usage != (self.usage is not None):
            self.malformed.append(f"{cursor} disagrees about the usage")
        for index, choice in self.choices.items():
            if index >= len(cursor.positions) or cursor.ended[index] != bool(choice.end):
                self.malformed.append(f"{cursor} disagrees about the end of choice {index}")
            elif counts_tokens and choice.tokens and not choice.is_at(cursor.positions[index]):
                self.malformed.append(f"{cursor} at {len(choice.tokens)} tokens of choice {index}")

    def name(self, **names: Any) -> None:
        """Checks that fields such as the id are equal in all parts of one response."""
        for name, value in names.items():
            if self.names.setdefault(name, value) != value:
                self.malformed.append(f"{name} {value} after {self.names[name]}")

    def content(self) -> tuple[Any, ...]:
        """All that must not depend on faults."""
        return {index: choice.content() for index, choice in self.choices.items()}, self.usage

    def begins(self, whole: "Answer") -> bool:
        """Whether it is the beginning of ``whole``, or all of it, whatever its usage says."""
        known = self.choices.keys() <= whole.choices.keys()
        return known and all(choice.begins(whole.choices[index]) for index, choice in self.choices.items())

    @property
    def length(self) -> int:
        """Characters and tokens received."""
        return sum(choice.length for choice in self.choices.values())

    def without_tokens(self) -> "Answer":
        """The same without token ids, to compare it with a response of an API that does not have them."""
        return replace(self, choices={index: replace(each, tokens=[]) for index, each in self.choices.items()})

    def _take_choice(self, choice: Choice, event: dict[str, Any]) -> None:
        message = event.get("delta") or event.get("message") or {}
        if "role" in message:
            self._repeat(choice.has_role, "role")
            choice.has_role = True
        self._write(choice, event.get("text") or message.get("content") or "")
        choice.tokens += _tokens(event.get("logprobs"))
        for position, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            part = Call(call.get("id", ""), function.get("name", ""), function["arguments"])
            self._take_call(choice, call.get("index", position), part)
        if event.get("finish_reason"):
            self._end(choice, event["finish_reason"])
            choice.score = event.get("score")

    def _write(self, choice: Choice, text: str) -> None:
        self._repeat(bool(text and choice.end), "text after an end")
        choice.text += text

    def _take_call(self, choice: Choice, index: int, part: Call) -> None:
        call = choice.calls[index]
        begins = bool(part.id or part.name)
        self._repeat(begins and bool(call.id), "beginning of a call")
        if begins and not call.id and part.id in ("", *(other.id for other in choice.calls.values())):
            self.malformed.append(f"the id {part.id!r} of a call")
        if not (begins or call.id):
            self.malformed.append("a call without its beginning")
        call.id, call.name = call.id or part.id, call.name or part.name
        call.arguments += part.arguments

    def _end(self, choice: Choice, reason: str) -> None:
        self._repeat(bool(choice.end), "end")
        choice.end = reason

    def _use(self, prompt: int, completion: int) -> None:
        self._repeat(self.usage is not None, "usage")
        self.usage = prompt, completion

    def _repeat(self, again: bool, what: str) -> None:
        if again:
            self.repeated.append(what)


def _tokens(logprobs: dict[str, Any] | None) -> list[Any]:
    """Each token's entry in an object of log-probabilities: its lists zipped, or a chat's one list."""
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return list(logprobs["content"])
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return list(zip(*lists, strict=True))
