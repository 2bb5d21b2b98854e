"""What a real server of vLLM answered to the requests that a router makes, and what counts as the same answer.

``recordings/vllm.json`` holds it. Stand-ins are compared with the recording, and the recording with a server of today
where one is installed (``tests/service/test_vllm_servers.py``). To record it again, with a server of the demo model:
``.venv/bin/python -m tests.support.vllm_contract http://127.0.0.1:8000``.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from quire.v1 import engine_pb2
from quire_proto.convert import sampling_to_proto
from quire_proto.sampling import SamplingParams
from quire_proto.structured_output import choice
from quire_router.engines.external.server_kind import ChoiceRequest, split_choices
from quire_router.engines.external.vllm_server import VllmServer

ROOT = Path(__file__).parents[2]
RECORDING = Path(__file__).parent / "recordings" / "vllm.json"
MODEL = "demo"
TOKENIZE = {"model": MODEL, "prompt": "Once upon a time", "add_special_tokens": False}
PROMPT = (20, 1001, 342)  # of the demo model, which goes on with 289
EOS = 2
_METRICS = ("vllm:num_requests_", "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "process_start_time")

Answer = dict[str, Any]

CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=3),
    "sampled": SamplingParams(temperature=1, top_p=0.9, top_k=50, min_p=0.01, seed=7, max_tokens=3),
    "log-probabilities": SamplingParams(temperature=0, logprobs=2, max_tokens=3),
    "end of sequence": SamplingParams(temperature=0, logit_bias=((EOS, 100.0),), max_tokens=3),
    "stop token": SamplingParams(temperature=0, stop_token_ids=(289,), max_tokens=3),
    "stop token with log-probabilities": SamplingParams(temperature=0, stop_token_ids=(289,), logprobs=0, max_tokens=3),
    "penalties": SamplingParams(temperature=0, presence_penalty=1, frequency_penalty=1, repetition_penalty=1.5),
    "structured": SamplingParams(temperature=0, structured=choice(["no"]), max_tokens=3),
    "refused at once": SamplingParams(temperature=0, max_tokens=100_000),
    "refused in the stream": SamplingParams(temperature=0, logit_bias=((99_999, 1.0),), max_tokens=3),
}


def choice_of(params: SamplingParams) -> ChoiceRequest:
    """The request of a case, with one token that was delivered and a salt."""
    message = engine_pb2.Submit(
        request_id="recorded",
        prompt_token_ids=PROMPT[:-1],
        output_token_ids=PROMPT[-1:],
        sampling=sampling_to_proto(params),
        cache_salt=b"salt",
    )
    return next(split_choices(message, MODEL))


async def ask(url: str, body: Answer) -> Answer:
    """The status of an answer, and its events, or the object that it is."""
    async with aiohttp.ClientSession() as session, session.post(url + VllmServer.path, json=body) as response:
        text = await response.text()
        if response.content_type == "application/json":
            return {"status": response.status, "json": json.loads(text)}
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        return {"status": response.status, "events": [json.loads(event) for event in events if event != "[DONE]"]}


async def ask_all(url: str) -> dict[str, Answer]:
    """The answers to all cases, with what was asked."""
    server, answers = VllmServer(), {}
    for name, params in CASES.items():
        body = server.body(choice_of(params))
        answers[name] = {"request": body, **await ask(url, body)}
    return answers


async def ask_about(url: str) -> Answer:
    """What a router asks besides."""
    async with aiohttp.ClientSession(url) as session:
        metrics = await (await session.get("/metrics")).text()
        return {
            "/version": await (await session.get("/version")).json(),
            "/v1/models": await (await session.get("/v1/models")).json(),
            "/metrics": [line for line in metrics.splitlines() if line.startswith(_METRICS)],
            "/health": (await session.get("/health")).status,
            "/tokenize": await (await session.post("/tokenize", json=TOKENIZE)).json(),
        }


def recorded() -> Answer:
    """The recording: ``about`` and ``answers``."""
    recording: Answer = json.loads(RECORDING.read_text())
    return recording


def shapes(answer: Answer) -> set[tuple[str, str]]:
    """Each field of an answer by its path, with the type of its value; entries of lists, and of maps from tokens, count
    as one. What an event may leave out or have as null is no difference, so neither are listed.
    """
    return set(_shapes("", {key: value for key, value in answer.items() if key != "request"}))


def _shapes(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "token_id" if key.startswith("token_id:") else key
            yield from _shapes(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _shapes(f"{path}[]", inner)
    elif value is not None:
        yield path, "number" if type(value) in (int, float) else type(value).__name__


async def _record(url: str) -> None:
    recording = {"about": await ask_about(url), "answers": await ask_all(url)}
    RECORDING.write_text(json.dumps(recording, indent=1).replace(f"{ROOT}/", "") + "\n")


if __name__ == "__main__":
    asyncio.run(_record(sys.argv[1]))
