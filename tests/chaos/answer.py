"""What a client has of one answer, whichever way it came: the same request has to lead to the same ``told()``."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import inference_pb2 as pb


@dataclass
class Answer:
    """``error`` is a typed error that trying again did not cure, ``untyped`` anything else that is no answer. The
    request is ``known_after_all`` if it was found again after the error, which was at ``failed_at``. ``away`` are the
    times between which no router was at work for this client as far as it knows (by ``time.monotonic``).
    """

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str | None = None
    failed_at: float = 0.0
    known_after_all: bool = False
    untyped: str | None = None
    hung: bool = False
    resumed: int = 0
    repeated_ends: int = 0
    away: list[tuple[float, float]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """One event's data, or a whole answer."""
        for choice in event["choices"]:
            index, said = choice["index"], choice.get("delta") or choice.get("message") or {}
            self.texts[index] += choice.get("text") or said.get("content") or ""
            if choice.get("logprobs"):
                logprobs = choice["logprobs"]
                self.tokens[index] += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
            if choice.get("finish_reason"):
                self._end(index, choice["finish_reason"])
        if event.get("usage"):
            self._use(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])

    def take_message(self, message: pb.GenerateResponse | pb.ChatResponse) -> None:
        """One message of a gRPC stream."""
        self.texts[message.index] += message.text
        asked = bool(message.logprobs)
        logprobs = [logprob.logprob for logprob in message.logprobs] if asked else [0.0] * len(message.token_ids)
        self.tokens[message.index] += zip(message.token_ids, logprobs, strict=True)
        if message.finish_reason:
            self._end(message.index, str(message.finish_reason))
        if message.HasField("usage"):
            self._use(message.usage.prompt_tokens, message.usage.completion_tokens)

    def told(self) -> tuple[Any, ...]:
        """All that must not depend on what died."""
        tokens = {index: some for index, some in self.tokens.items() if some}
        return dict(self.texts), tokens, self.ends, self.usage

    def _end(self, index: int, reason: str) -> None:
        self.repeated_ends += index in self.ends
        self.ends[index] = reason

    def _use(self, prompt: int, completion: int) -> None:
        self.repeated_ends += self.usage is not None
        self.usage = prompt, completion
