"""Embeddings and scores of a router with two engines, asked by the openai package and plain HTTP, and compared with
sentence-transformers.
"""

import asyncio
import json
import os
import signal
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc, types_pb2
from quire_engine import LLM, AsyncLLM, PoolingParams
from quire_proto.errors import QuireError

from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Router, at_rest, eventually
from tests.support.sentence_folders import cross_encoder_folder, decoder_folder, encoder_folder

if find_spec("sentence_transformers") is None:  # imported by those alone that run: it takes a while
    pytest.skip("sentence_transformers is not installed", allow_module_level=True)

MODEL = "quire-demo"
TEXTS = ["the fox runs", "a lazy dog sleeps under the river", "paris is the capital of france", "the cat", "fox " * 40]
TOLERANCE = 1e-4
COLUMNS = ("num_model_requests", "input_tokens", "output_tokens")
FLAGS = ("--dtype", "float32", "--kv-cache-memory", str(32 << 20), "--swap-space", "0.01")


@dataclass
class Stack:
    folder: Path
    engines: list[ForkedEngine]
    router: Router

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.router.url}{path}", json={"model": MODEL, **body}, timeout=60)


@contextmanager
def running(folder: Path, logs: Path, engines: int = 1) -> Iterator[Stack]:
    started = [ForkedEngine(folder, logs, *FLAGS) for _ in range(engines)]
    router = ForkedRouter(folder, [engine.address for engine in started], logs)
    try:
        for process in (*started, router):
            process.wait_ready()
        yield Stack(folder, started, router)
    finally:
        for process in (router, *started):
            process.stop()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = decoder_folder(tmp_path_factory.mktemp("decoder"))
    with running(folder, tmp_path_factory.mktemp("logs")) as stack:
        yield stack


def oracle(folder: Path, **settings: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", **settings)


def test_the_openai_package_gets_what_sentence_transformers_makes(decoder: Stack) -> None:
    """By default it asks for base64."""
    answer = decoder.openai.embeddings.create(model=MODEL, input=TEXTS)
    got = np.array([each.embedding for each in answer.data])
    model = oracle(decoder.folder)
    assert np.abs(got - model.encode(TEXTS)).max() < TOLERANCE
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert (
        answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(model.tokenizer(t).input_ids) for t in TEXTS)
    )
    floats = decoder.openai.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert np.array_equal(np.float32([each.embedding for each in floats.data]), np.float32(got))


def test_tokens_prompts_and_dimensions(decoder: Stack) -> None:
    model, client = oracle(decoder.folder), decoder.openai
    ids = [model.tokenizer(text).input_ids for text in TEXTS[:2]]
    wanted = model.encode(TEXTS[:2])
    for given, rows in ((ids, wanted), (ids[0], wanted[:1]), (TEXTS[0], wanted[:1])):
        got = [each.embedding for each in client.embeddings.create(model=MODEL, input=given).data]
        assert np.abs(np.array(got) - rows).max() < TOLERANCE
    few = [each.embedding for each in client.embeddings.create(model=MODEL, input=TEXTS, dimensions=16).data]
    assert (
        np.abs(np.array(few) - oracle(decoder.folder, truncate_dim=16).encode(TEXTS, normalize_embeddings=True)).max()
        < TOLERANCE
    )
    named = client.embeddings.create(model=MODEL, input=TEXTS[:1], extra_body={"prompt_name": "query"}).data[0]
    assert np.abs(np.array(named.embedding) - model.encode(TEXTS[:1], prompt_name="query")[0]).max() < TOLERANCE
    cut = client.embeddings.create(model=MODEL, input="fox " * 900, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 256
    assert np.abs(np.array(cut.data[0].embedding) - model.encode(["fox " * 900])[0]).max() < TOLERANCE


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/completions", {"prompt": "x"}, "makes no text, only embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "makes no text, only embeddings"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "embeddings have 64 numbers"),
        ("/v1/embeddings", {"input": "fox " * 900}, "maximum context length"),
        ("/v1/embeddings", {"input": [999]}, "outside of this model's vocabulary"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "other"}, "it has document, query"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 300}, "between 1 and 256"),
        ("/v1/embeddings", {"input": []}, "The prompt is empty"),
        ("/v1/embeddings", {"input": {}}, "a list of at most 2048"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "normalize": True}, "use use_activation"),
        ("/rerank", {"query": "x", "documents": []}, "1 to 2048 texts"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "must be one, or as many"),
    ],
)
def test_what_cannot_be_is_a_400_that_says_so(decoder: Stack, path: str, body: dict[str, Any], sentence: str) -> None:
    answer = decoder.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]


def test_what_is_pooled_is_in_the_ledger(decoder: Stack) -> None:
    def counted() -> tuple[int, int, int]:
        page = httpx.get(f"{decoder.router.url}/v1/usage", params={"start_time": int(time()) - 7200}, timeout=60).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        return tuple(sum(each[name] for each in results) for name in COLUMNS)  # type: ignore[return-value]

    before = at_rest(counted)
    usage = decoder.openai.embeddings.create(model=MODEL, input=TEXTS).usage
    decoder.post("/v1/embeddings", input="fox " * 900)  # is refused
    scored = decoder.post("/score", text_1=TEXTS[0], text_2=TEXTS[1:3]).json()["usage"]
    more = (len(TEXTS) + 3, usage.prompt_tokens + scored["prompt_tokens"], 0)
    eventually(lambda: counted() == tuple(map(sum, zip(before, more, strict=True))))


def test_the_model_says_what_it_does(decoder: Stack) -> None:
    assert httpx.get(f"{decoder.router.url}/v1/models", timeout=60).json()["data"][0]["supported_tasks"] == ["embed"]


def test_an_embedding_model_scores_by_the_cosine(decoder: Stack) -> None:
    embeddings = oracle(decoder.folder).encode(TEXTS)
    cosines = embeddings[1:] @ embeddings[0]
    scores = decoder.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:]).json()
    assert np.abs(np.array([each["score"] for each in scores["data"]]) - cosines).max() < TOLERANCE
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = decoder.post(path, query=TEXTS[0], documents=TEXTS[1:], top_n=2).json()
        ranked, tokens = answer["results"], answer["usage"]["total_tokens"]
        assert tokens > 0
        assert answer["meta"] == {"tokens": {"input_tokens": tokens, "output_tokens": 0}}  # where Cohere's clients look
        assert [each["index"] for each in ranked] == np.argsort(-cosines)[:2].tolist()
        assert [each["document"]["text"] for each in ranked] == [TEXTS[1:][each["index"]] for each in ranked]
    bare = decoder.post("/rerank", query="x", documents=[{"text": "a"}], return_documents=False).json()
    assert "document" not in bare["results"][0]


def test_grpc_embeds_and_scores(decoder: Stack) -> None:
    with grpc.insecure_channel(decoder.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        inputs = [pb.EmbedInput(text=TEXTS[0]), pb.EmbedInput(text=TEXTS[1])]
        answer = stub.Embed(pb.EmbedRequest(model=MODEL, inputs=inputs))
        wanted = oracle(decoder.folder).encode(TEXTS[:2])
        assert np.abs(np.array([each.values for each in answer.embeddings]) - wanted).max() < TOLERANCE
        scores = stub.Score(pb.ScoreRequest(model=MODEL, query=TEXTS[0], documents=TEXTS[1:2])).scores
        assert abs(scores[0] - wanted[0] @ wanted[1]) < TOLERANCE
        assert stub.ListModels(pb.ListModelsRequest()).models[0].supported_tasks == [types_pb2.TASK_EMBED]
        with pytest.raises(grpc.RpcError) as refused:
            stub.Embed(pb.EmbedRequest(model=MODEL, inputs=inputs, dimensions=999))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_engine_that_dies_changes_no_number(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One engine is frozen, so that it has some of the prompts, and then killed."""
    folder = decoder_folder(tmp_path_factory.mktemp("dies"), pooling="mean")
    texts = [f"the fox number {number} runs over the river" * (1 + number % 4) for number in range(60)]
    with running(folder, tmp_path, engines=2) as stack:
        wanted = oracle(folder).encode(texts)
        client = AsyncOpenAI(base_url=f"{stack.router.url}/v1", api_key="none", max_retries=0, timeout=60)

        async def embed() -> Any:
            asked = asyncio.create_task(client.embeddings.create(model=MODEL, input=texts))
            placed = partial(stack.router.metric, "quire_route_decisions_total", result="placed")
            while await asyncio.to_thread(placed) < 4:  # noqa: ASYNC110 - a process of its own counts
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # so that what was placed is at its engine
            assert not asked.done(), "no prompt was at the engine that is killed"
            stack.engines[0].kill()
            return await asked

        os.kill(stack.engines[0].popen.pid, signal.SIGSTOP)
        answer = asyncio.run(embed())
        got = np.array([each.embedding for each in answer.data])
        assert np.abs(got - wanted).max() < TOLERANCE
        assert stack.router.metric("quire_attempts_lost_total") > 0


def test_an_encoder_embeds(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = encoder_folder(tmp_path_factory.mktemp("encoder"))
    with running(folder, tmp_path) as stack:
        answer = stack.post("/v1/embeddings", input=TEXTS, encoding_format="base64").json()
        got = np.stack([np.frombuffer(b64decode(each["embedding"]), "<f4") for each in answer["data"]])
        assert np.abs(got - oracle(folder).encode(TEXTS)).max() < TOLERANCE


def test_a_cross_encoder_ranks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from sentence_transformers import CrossEncoder

    folder = cross_encoder_folder(tmp_path_factory.mktemp("cross"))
    documents = TEXTS[1:]
    wanted = CrossEncoder(str(folder), device="cpu").predict([(TEXTS[0], each) for each in documents])
    with running(folder, tmp_path) as stack:
        ranked = stack.post("/v1/rerank", query=TEXTS[0], documents=documents).json()["results"]
        assert [each["index"] for each in ranked] == np.argsort(-wanted).tolist()
        assert np.abs(np.array([each["relevance_score"] for each in ranked]) - np.sort(wanted)[::-1]).max() < TOLERANCE
        with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
            stack.openai.embeddings.create(model=MODEL, input="x")
        assert httpx.get(f"{stack.router.url}/v1/models", timeout=60).json()["data"][0]["supported_tasks"] == [
            "classify"
        ]


def test_async_llm_embeds_as_llm_does_and_raises_what_a_prompt_fails_with(tmp_path: Path) -> None:
    folder, settings = decoder_folder(tmp_path), {"dtype": "float32", "kv_cache_memory": 32 << 20}
    with LLM(folder, **settings) as llm:
        wanted = llm.embed(TEXTS, use_tqdm=False)

    async def embed() -> None:
        async with AsyncLLM(folder, **settings) as llm:
            got = await asyncio.gather(*map(llm.embed, TEXTS))
            for one, other in zip(got, wanted, strict=True):
                assert np.abs(np.array(one.outputs.embedding) - other.outputs.embedding).max() < TOLERANCE
                assert one.prompt_token_ids == other.prompt_token_ids
            few = await llm.embed(TEXTS[0], PoolingParams(dimensions=16), "named")
            assert (len(few.outputs.embedding), few.request_id) == (16, "named")
            for refused, words in (
                (llm.embed("fox " * 900), "maximum context length"),
                (llm.embed(TEXTS[0], PoolingParams(dimensions=65)), "64 numbers"),
                (llm.classify(TEXTS[0]), "classifies no texts"),
            ):
                with pytest.raises(QuireError, match=words):
                    await refused
            running = asyncio.create_task(llm.embed(TEXTS[4], None, "left"))
            await asyncio.sleep(0)
            await llm.abort("left")
            with pytest.raises(QuireError, match="aborted"):
                await running
            assert await llm.embed(TEXTS[0]), "the next one runs"

    asyncio.run(embed())


def test_a_batch_of_embeddings_answers_as_the_route_does(decoder: Stack) -> None:
    bodies = [
        {"model": MODEL, "input": TEXTS[0], "encoding_format": "float"},
        {"model": MODEL, "input": TEXTS * 4},
        {"model": MODEL, "input": "x", "dimensions": 65},
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
        for number, body in enumerate(bodies)
    ]
    client = decoder.openai
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    found = [json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()]
    for each, body in zip(found, bodies[:2], strict=True):
        direct = httpx.post(f"{decoder.router.url}/v1/embeddings", json=body, timeout=60).json()
        answer = each["response"]["body"]
        assert (answer["usage"], answer["object"], answer["model"]) == (direct["usage"], "list", MODEL)
        for one, other in zip(answer["data"], direct["data"], strict=True):
            assert np.abs(numbers(one["embedding"]) - numbers(other["embedding"])).max() < TOLERANCE
    (failed,) = [json.loads(each) for each in client.files.content(done.error_file_id).text.splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("2", 400)


def numbers(embedding: str | list[float]) -> np.ndarray:
    return np.frombuffer(b64decode(embedding), "<f4") if isinstance(embedding, str) else np.array(embedding, np.float32)
