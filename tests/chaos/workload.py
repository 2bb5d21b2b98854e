"""The requests that clients make, mixed: sampled, penalised, structured, several choices, log-probabilities, greedy,
searched, each in one of several ways.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chaos.stack import MODEL

PROMPTS = (
    "Once upon a time there was a",
    "The old house at the end of the road",
    "In the morning the children",
    "A small bird sat on",
    "Nobody in the village knew why",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


STREAM, WHOLE, RPC, BACKGROUND, POLLING = "stream", "whole", "rpc", "background", "polling"
_WAYS = (STREAM, RPC, STREAM, WHOLE, BACKGROUND, STREAM, POLLING)
_WAYS_OF_SEARCHES = (WHOLE, RPC, POLLING)  # nothing of them can be streamed over REST
Body = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """``way`` is how the client asks for it."""

    way: str
    kind: str
    path: str
    body: dict[str, Any]


def requests(count: int, seed: int) -> list[Request]:
    """So many requests, every kind in every way; equal seeds, equal requests."""
    chance = random.Random(seed)
    return [_request(number, chance) for number in range(count)]


def _request(number: int, chance: random.Random) -> Request:
    make = _KINDS[number % len(_KINDS)]
    ways = _WAYS_OF_SEARCHES if make in (_best_of, _beams) else _WAYS
    return Request(ways[number // len(_KINDS) % len(ways)], make.__name__.strip("_"), *make(chance))


def _completion(chance: random.Random, **more: Any) -> Body:
    body = {
        "model": MODEL,
        "prompt": chance.choice(PROMPTS) + " " + chance.choice(PROMPTS).lower(),
        "max_tokens": chance.randint(100, 400),
        "seed": chance.getrandbits(32),
        "ignore_eos": True,
    }
    return "/v1/completions", body | more


def _greedy(chance: random.Random) -> Body:
    return _completion(chance, temperature=0)


def _sampled(chance: random.Random) -> Body:
    return _completion(chance, temperature=1.1, top_p=0.95, top_k=40, min_p=0.01)


def _penalised(chance: random.Random) -> Body:
    return _completion(
        chance, temperature=0.9, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=20
    )


def _several(chance: random.Random) -> Body:
    return _completion(chance, n=3, temperature=1.0, max_tokens=chance.randint(50, 150))


def _logprobs(chance: random.Random) -> Body:
    return _completion(chance, logprobs=3, temperature=0.8, max_tokens=chance.randint(50, 150))


def _stopped(chance: random.Random) -> Body:
    return _completion(chance, temperature=1.0, stop=["the end", ". The", "king"])


def _structured(chance: random.Random) -> Body:
    return _chat(chance, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})


def _chat(chance: random.Random, **more: Any) -> Body:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": chance.choice(PROMPTS)}],
        "max_tokens": chance.randint(100, 300),
        "temperature": 1.0,
        "seed": chance.getrandbits(32),
    }
    return "/v1/chat/completions", body | more


def _best_of(chance: random.Random) -> Body:
    return _completion(chance, n=2, best_of=4, temperature=1.0, max_tokens=chance.randint(30, 80))


def _beams(chance: random.Random) -> Body:
    return _completion(chance, n=2, beam_width=3, temperature=0, max_tokens=chance.randint(20, 50))


_KINDS: tuple[Callable[[random.Random], Body], ...] = (
    _greedy, _sampled, _penalised, _several, _logprobs, _stopped, _structured, _chat, _best_of, _beams,
)  # fmt: skip
