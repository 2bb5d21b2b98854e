"""What a server streamed back, and what it says: the pieces of a body as they were read (``Recording``), the events in
them (``read_events``), and the tokens, times and errors in those (``read_output``).

Nothing here reads a clock or a socket. A piece is only stored while the server is measured and understood afterwards,
so that the client takes as little of the processor as it can while the server needs it.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_ERROR = 500  # characters of a server's error that are kept


@dataclass(slots=True)
class Recording:
    """One request as the client saw it. Times are seconds of the client's clock.

    ``intended`` is when the request should have been sent, ``began`` when its turn came in the client, ``start`` when
    it was sent, later than ``began`` if it waited for others to end (``--max-concurrency``). ``times[i]`` is when
    ``pieces[i]`` of the body was read. ``failure`` is why the answer is incomplete.
    """

    intended: float = 0.0
    began: float = 0.0
    start: float = 0.0
    end: float = 0.0
    status: int = 0
    retry_after: str = ""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    pieces: list[bytes] = field(default_factory=list)
    failure: str = ""


@dataclass(slots=True)
class RequestOutput:
    """One request's figures, in seconds, by the definitions of ``metrics``; ``ttft`` and ``latency`` count from
    ``start_time``, when the request was sent. ``client_queue_time`` is the time from its intended time to that, and
    ``lag`` the part of it in which only the client itself was late. ``output_tokens`` is 0 if the server did not say.
    """

    success: bool = False
    error: str = ""
    prompt_len: int = 0
    output_tokens: int = 0
    num_events: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    start_time: float = 0.0
    client_queue_time: float = 0.0
    lag: float = 0.0
    generated_text: str = ""


class StreamError(Exception):
    """A stream is not what an OpenAI-compatible server sends, or says that the request failed."""


def read_output(recording: Recording, prompt_len: int) -> RequestOutput:
    """The figures of a request whose prompt has ``prompt_len`` tokens by the client's count, unless the server says
    otherwise. Never raises: a problem is the output's ``error``, and what came before is kept.
    """
    output = RequestOutput(
        prompt_len=prompt_len,
        start_time=recording.start,
        client_queue_time=max(0.0, recording.start - recording.intended),  # a timer may be early by a millisecond
        lag=max(0.0, recording.began - recording.intended),
    )
    try:
        if recording.status not in (0, 200):
            raise StreamError(_describe_refusal(recording))
        complete = _read_tokens(recording, output)
        if recording.failure:
            raise StreamError(recording.failure)
        if not complete:
            raise StreamError("The stream ended without a finish_reason or [DONE].")
        if not output.num_events:
            raise StreamError("The stream ended without a token.")
    except StreamError as error:
        output.error = str(error)
    output.success = not output.error
    return output


def _describe_refusal(recording: Recording) -> str:
    body = b"".join(recording.pieces)
    try:
        text = _error_message(json.loads(body))
    except (ValueError, TypeError):
        text = body[:MAX_ERROR].decode(errors="replace").strip()
    wait = f" (Retry-After: {recording.retry_after})" if recording.retry_after else ""
    return f"HTTP {recording.status}{wait}: {text}".rstrip(": ")


def _read_tokens(recording: Recording, output: RequestOutput) -> bool:
    """Fills the output with the stream's tokens; whether the stream came to its end."""
    last, texts, complete = recording.start, [], False
    for time, data in read_events(recording):
        if data == b"[DONE]":
            complete = True
            continue
        event = _parse(data)
        if usage := event.get("usage"):
            output.output_tokens = usage.get("completion_tokens") or output.output_tokens
            output.prompt_len = usage.get("prompt_tokens") or output.prompt_len
        for choice in event.get("choices") or ():
            text, is_token = _read_choice(choice)
            complete = complete or choice.get("finish_reason") is not None
            if not is_token:
                continue
            texts.append(text)
            if output.num_events:
                output.itl.append(time - last)
            else:
                output.ttft = time - recording.start
            output.num_events += 1
            last = time
    output.latency = last - recording.start
    output.generated_text = "".join(texts)
    return complete


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise StreamError(f"An event is not a JSON object: {data[:80]!r}.")
    if event.get("error"):
        raise StreamError(f"The server ended the stream: {_error_message(event)}")
    return event


def _error_message(body: dict[str, Any]) -> str:
    """The message in an error of OpenAI's shape, or the whole of any other."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body)[:MAX_ERROR]


def _read_choice(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of an event's choice, and whether it counts as one that carries tokens: a completion's always does, as
    a token may have no text yet. Of a chat the event that only names the role does not, which some servers send before
    there is a token, and one with only a finish_reason does not either.
    """
    if "delta" not in choice:
        return choice.get("text") or "", True
    delta = choice["delta"] or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = thought + (delta.get("content") or "")
    silent = "role" in delta or choice.get("finish_reason") is not None
    return text, bool(text or delta.get("tool_calls")) or not silent


def read_events(recording: Recording) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which the piece that completed it was read. Comments and
    other fields are skipped. An event that is not complete where the body ends counts as read with the last piece.
    """
    rest, data, time = b"", [], recording.start
    for time, piece in zip(recording.times, recording.pieces, strict=True):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                data.append(text[5:].removeprefix(b" "))
            elif not text and data:
                yield time, b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data and not recording.failure:
        yield time, b"\n".join(data)
