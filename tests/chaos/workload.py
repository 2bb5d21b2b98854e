"""The requests that clients make, mixed: sampled, penalised, structured, several choices and several prompts,
log-probabilities, greedy, searched, tool calls, conversations of responses, messages, batches, each in one of several
ways, of one of two tenants.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chaos.demo import CALL
from tests.chaos.stack import KEYS, MODEL

PROMPTS = (
    "Once upon a time there was a",
    "The old house at the end of the road",
    "In the morning the children",
    "A small bird sat on",
    "Nobody in the village knew why",
)
HEROES = ("duck", "fox", "boat", "bear")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


STREAM, WHOLE, RPC, BACKGROUND, POLLING = "stream", "whole", "rpc", "background", "polling"
CROSSING = "crossing"
CONVERSATION = "conversation"
MESSAGES = "messages"
BATCH = "batch"
UNWATCHED = (BACKGROUND, POLLING)
_WAYS = (STREAM, RPC, STREAM, WHOLE, BACKGROUND, CROSSING, POLLING)
_WAYS_OF_SEARCHES = (WHOLE, RPC, POLLING)  # nothing of them can be streamed over REST
_WAYS_OF_LISTS = (STREAM, WHOLE, CROSSING)  # the gRPC API takes one prompt, but streams such a response to its end
_WAYS_OF_CONVERSATIONS = (CONVERSATION,)
_ALWAYS_KEYED = (*UNWATCHED, MESSAGES, BATCH)  # whose events have no ids without one, or that have their own names
_WITHOUT_KEY = 0.25
Body = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """``way`` is how the client asks for it, ``keyed`` whether with an idempotency key, and ``turns`` the inputs of a
    conversation, or the prompts of a batch.
    """

    way: str
    kind: str
    path: str
    body: dict[str, Any]
    keyed: bool = True
    tenant: str = ""
    turns: tuple[str, ...] = ()

    @property
    def credentials(self) -> dict[str, str]:
        """The headers with the client's key."""
        return {"Authorization": f"Bearer {KEYS[self.tenant]}"} if self.tenant else {}

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.path.endswith("chat/completions")

    @property
    def id_prefix(self) -> str:
        """What the REST API puts before the ids of such requests."""
        return "chatcmpl-" if self.is_chat else "cmpl-"

    @property
    def crosses(self) -> bool:
        """Whether its answer comes in events of both APIs, of which only one has token ids."""
        return self.way == CROSSING

    @property
    def searches(self) -> bool:
        """Whether more outputs are generated than returned."""
        return "best_of" in self.body or "beam_width" in self.body

    @property
    def prompts(self) -> int:
        """How many."""
        prompt = self.body.get("prompt", "")
        return len(prompt) if isinstance(prompt, list) else 1

    @property
    def choices(self) -> int:
        """How many the answer has to have."""
        return len(self.turns) or self.prompts * int(self.body.get("n", 1))


def requests(count: int, seed: int) -> list[Request]:
    """So many requests, every kind in every way; equal seeds, equal requests."""
    chance = random.Random(seed)
    return [_request(number, chance) for number in range(count)]


def _request(number: int, chance: random.Random) -> Request:
    turn, kind = divmod(number, len(_KINDS))
    make = _KINDS[kind]
    ways = _OTHER_WAYS.get(make, _WAYS)
    way = ways[(turn + kind) % len(ways)]
    keyed = way in _ALWAYS_KEYED or chance.random() >= _WITHOUT_KEY
    path, body = make(chance)
    turns = tuple(body.pop("turns", ()))
    return Request(way, make.__name__.strip("_"), path, body, keyed, chance.choice(list(KEYS)), turns)


def _completion(chance: random.Random, **more: Any) -> Body:
    body = {
        "model": MODEL,
        "prompt": _prompt(chance),
        "max_tokens": chance.randint(100, 400),
        "seed": chance.getrandbits(32),
        "ignore_eos": True,
    }
    return "/v1/completions", body | more


def _prompt(chance: random.Random) -> str:
    return chance.choice(PROMPTS) + " " + chance.choice(PROMPTS).lower()


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


def _prompts(chance: random.Random) -> Body:
    prompts = [_prompt(chance) for _ in range(3)]
    return _completion(chance, prompt=prompts, n=chance.randint(1, 2), max_tokens=chance.randint(50, 150))


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


def _unlimited(chance: random.Random) -> Body:
    """As long as the model likes."""
    story = {"role": "user", "content": f"Tell me a story about a {chance.choice(HEROES)}."}
    path, body = _chat(chance, messages=[story], temperature=1.6)
    del body["max_tokens"]
    return path, body


def _forced(chance: random.Random) -> Body:
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    return _chat(chance, **_calling(chance.choice(choices)), temperature=1.5)


def _called(chance: random.Random) -> Body:
    """The model begins calls of its own accord. A grammar holds those of strict tools to their schema, and others are
    what the model makes of them, so mostly none: the reader holds back what may become one, and emits it as text.
    """
    tools = _calling("auto", strict=chance.random() < 0.7)
    return _chat(chance, **tools, temperature=1.5, logit_bias={str(CALL): chance.choice([15, 16, 17])})


def _calling(choice: Any, **more: Any) -> dict[str, Any]:
    functions = [{"name": "weather", "parameters": WEATHER, **more}, {"name": "now", **more}]
    return {"tools": [{"type": "function", "function": each} for each in functions], "tool_choice": choice}


def _best_of(chance: random.Random) -> Body:
    return _completion(chance, n=2, best_of=4, temperature=1.0, max_tokens=chance.randint(30, 80))


def _beams(chance: random.Random) -> Body:
    return _completion(chance, n=2, beam_width=3, temperature=0, max_tokens=chance.randint(20, 50))


def _conversation(chance: random.Random) -> Body:
    body = {
        "model": MODEL,
        "max_output_tokens": chance.randint(40, 120),
        "temperature": 1.0,
        "seed": chance.getrandbits(32),
        "ignore_eos": True,
        "turns": [f"Tell me a story about a {chance.choice(HEROES)}.", "And then?", chance.choice(PROMPTS)],
    }
    return "/v1/responses", body


def _message(chance: random.Random) -> Body:
    body = {
        "model": MODEL,
        "max_tokens": chance.randint(60, 250),
        "temperature": 1.0,
        "seed": chance.getrandbits(32),
        "ignore_eos": True,
        "messages": [{"role": "user", "content": chance.choice(PROMPTS)}],
    }
    return "/v1/messages", body


def _batch(chance: random.Random) -> Body:
    path, body = _completion(chance, temperature=1.0, max_tokens=chance.randint(20, 80))
    del body["prompt"]
    return path, body | {"turns": [f"{number}: {_prompt(chance)}" for number in range(chance.randint(2, 12))]}


_OTHER_WAYS = {
    _best_of: _WAYS_OF_SEARCHES,
    _beams: _WAYS_OF_SEARCHES,
    _prompts: _WAYS_OF_LISTS,
    _conversation: _WAYS_OF_CONVERSATIONS,
    _message: (MESSAGES,),
    _batch: (BATCH,),
}
_KINDS: tuple[Callable[[random.Random], Body], ...] = (
    _greedy, _forced, _sampled, _prompts, _penalised, _called, _several, _unlimited, _logprobs, _stopped, _structured,
    _chat, _conversation, _best_of, _beams, _message, _batch,
)  # fmt: skip
