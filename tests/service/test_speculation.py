"""Engines that guess tokens answer as one that does not, also when one is killed in mid-stream and another that guesses
by another method goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.service.conftest import DEMO, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.redis_server import redis_server

PLAIN = "plain"
METHODS = ("ngram", "suffix")
_TRIES = 10  # on a busy machine drafts may seem not to pay, and an answer may end before it is looked at
# The same bits of logits in any batch, drafts included.
FLAGS = (*SMALL_POOLS, "--dtype", "float32", "--deterministic")
FEW_WORDS = {"logit_bias": {str(token_id): 60 for token_id in (300, 301, 302)}}
"""Draws are among three tokens, so that some guesses are right by chance."""
REFRAIN = "((the fox saw the owl|the owl saw the fox) and ){30}"
SAMPLED = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 5}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "You said: la la la la", "temperature": 0, "max_tokens": 200},
    "sampled": {**SAMPLED, **FEW_WORDS, "max_tokens": 120},
    "several": {**SAMPLED, **FEW_WORDS, "max_tokens": 60, "n": 3},
    "penalised": {**SAMPLED, **FEW_WORDS, "max_tokens": 60, "frequency_penalty": 0.2, "presence_penalty": 0.5},
    "logprobs": {**SAMPLED, **FEW_WORDS, "max_tokens": 40, "logprobs": 2},
    "structured": {**SAMPLED, "max_tokens": 400, "extra_body": {"structured_outputs": {"regex": REFRAIN}}},
}


@dataclass
class Fleet:
    """One engine that does not guess, and two that do."""

    folder: Path
    engines: list[ForkedEngine]
    client: OpenAI

    def accepted(self) -> float:
        return sum(engine.metric("quire_engine_accepted_draft_tokens_total") for engine in self.engines[1:])

    def start_again(self, number: int) -> None:
        port = self.engines[number].port
        self.engines[number] = _start_guessing(self.folder, METHODS[number - 1], port)
        self.engines[number].wait_ready()


def _start_guessing(folder: Path, method: str, port: int = 0) -> ForkedEngine:
    return ForkedEngine(DEMO, folder, *FLAGS, "--speculative-method", method, port=port)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("speculation")
    engines = [ForkedEngine(DEMO, folder, *FLAGS, name=PLAIN)]
    engines += [_start_guessing(folder, method) for method in METHODS]
    with redis_server() as redis:
        addresses = [engine.address for engine in engines]
        router = ForkedRouter(DEMO, addresses, folder, "--model", f"{PLAIN}={DEMO}", "--redis-url", redis.url)
        try:
            for process in (*engines, router):
                process.wait_ready()
            client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120)
            yield Fleet(folder, engines, client)
        finally:
            for process in (router, *engines):
                if process.popen.poll() is None:
                    process.stop()


@pytest.mark.parametrize("style", REQUESTS)
def test_the_answer_is_that_of_an_engine_without_drafts(fleet: Fleet, style: str) -> None:
    expected = fleet.client.completions.create(model=PLAIN, **REQUESTS[style]).choices
    accepted = fleet.accepted()
    for _ in range(_TRIES):
        for _ in fleet.engines[1:]:  # which take turns
            choices = fleet.client.completions.create(model=MODEL, **REQUESTS[style]).choices
            assert [choice.model_dump() for choice in choices] == [choice.model_dump() for choice in expected]
        if fleet.accepted() > accepted:
            return
    raise AssertionError("no draft was right")


def test_an_engine_that_is_killed_while_it_guesses_changes_no_token(fleet: Fleet) -> None:
    request = {**REQUESTS["structured"], "max_tokens": 1000}
    undisturbed = fleet.client.completions.create(model=PLAIN, **request).choices[0].text
    for _ in range(_TRIES):
        chunks = fleet.client.completions.create(model=MODEL, stream=True, **request)
        texts = (chunk.choices[0].text for chunk in chunks if chunk.choices)
        seen = [next(texts) for _ in range(20)]
        running = [n for n in (1, 2) if fleet.engines[n].metric("quire_engine_running_sequences") > 0]
        if not running:  # it has ended
            assert "".join([*seen, *texts]) == undisturbed
            continue
        left = fleet.engines[3 - running[0]]
        generated = left.metric("quire_engine_generation_tokens_total")
        fleet.engines[running[0]].kill()
        try:
            assert "".join([*seen, *texts]) == undisturbed
        finally:
            fleet.start_again(running[0])
        if left.metric("quire_engine_generation_tokens_total") > generated:
            return
    raise AssertionError("the answer always ended before an engine could die")
