"""Adapters of real engines: given at the start, loaded and unloaded while they serve, refused in one sentence; and
behind a router, where an engine that dies changes no token of theirs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from openai import OpenAI
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.model.models import greedy_oracle
from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.adapters import write_adapter, write_merged_model
from tests.support.engine_session import EngineSession
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Engine, Router, eventually, fetch

PROMPT = list(range(300, 340))
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders: ``a`` and ``b``; and ``long``, which is refused with a message of that length."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", DEMO, rank=8, seed=1)
    write_adapter(folder / "b", DEMO, rank=2, seed=2, targets=("q_proj", "v_proj"))
    settings = write_adapter(folder / "long", DEMO, rank=2) / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "init_lora_weights": "x" * 50_000}))
    return folder


@pytest.fixture(scope="module")
def engine(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    engine = ForkedEngine(
        DEMO, folder, *SMALL_POOLS, *FLOAT32, *LORA, "--lora-modules", f"a={adapters / 'a'}"
    ).wait_ready()
    yield engine
    assert engine.stop() == 0, engine.text


def expected(adapters: Path, name: str) -> list[int]:
    """What the model with that adapter merged into it makes of the prompt, by transformers."""
    folder = adapters / f"{name}-merged"
    if not folder.exists():
        write_merged_model(folder, DEMO, adapters / name)
    (tokens,) = greedy_oracle(folder if name else DEMO, [PROMPT], 8)
    return tokens


def test_requests_run_with_the_adapters_that_they_name(engine: Engine, adapters: Path) -> None:
    with EngineSession(engine, "lora") as link:
        assert [lora.name for lora in link.snapshot().loras.loras] == ["a"]
        assert link.engine.Describe(pb.DescribeRequest()).max_loras == 2
        loaded = link.engine.LoadLora(pb.LoadLoraRequest(lora_name="b", lora_path=str(adapters / "b"))).lora
        assert len(loaded.digest) == 16
        while not (told := link.batch()).HasField("loras"):
            pass
        assert [lora.name for lora in told.loras.loras] == ["a", "b"]
        made = {}
        for lora in ("a", "b", "a", "b"):
            link.submit(f"with-{lora}", PROMPT, lora=lora)
            made[lora], _ = link.collect(f"with-{lora}")
        link.submit("alone", PROMPT)
        alone, _ = link.collect("alone")
        assert made == {"a": expected(adapters, "a"), "b": expected(adapters, "b")}
        assert made["a"] != alone != made["b"]
        link.engine.UnloadLora(pb.UnloadLoraRequest(lora_name="b"), timeout=10)
        link.submit("late", PROMPT, lora="b")
        _, last = link.collect("late")
        assert last.error.code == types.ERROR_CODE_NOT_FOUND


@pytest.mark.parametrize(
    ("name", "folder", "code", "param"),
    [
        ("c", "nowhere", grpc.StatusCode.INVALID_ARGUMENT, "lora_path"),
        ("c d", "b", grpc.StatusCode.INVALID_ARGUMENT, "lora_name"),
        ("a", "b", grpc.StatusCode.ALREADY_EXISTS, "lora_name"),
        (MODEL, "b", grpc.StatusCode.ALREADY_EXISTS, "lora_name"),
        ("c", "long", grpc.StatusCode.INVALID_ARGUMENT, "lora_path"),
        ("c", "😀" * 4000, grpc.StatusCode.INVALID_ARGUMENT, "lora_path"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    engine: Engine, adapters: Path, name: str, folder: str, code: grpc.StatusCode, param: str
) -> None:
    with EngineSession(engine, "refused") as link:
        link.snapshot()
        with pytest.raises(grpc.RpcError) as caught:
            link.engine.LoadLora(pb.LoadLoraRequest(lora_name=name, lora_path=str(adapters / folder)))
        assert caught.value.code() is code
        assert dict(caught.value.trailing_metadata())["quire-param"] == param


def test_a_wrong_adapter_ends_the_start_in_one_sentence(adapters: Path, tmp_path: Path) -> None:
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, *LORA, "--lora-modules", f"a={adapters / 'nowhere'}")
    assert engine.wait(60) == 1
    assert f"There is no adapter to load: no folder {adapters / 'nowhere'} is here" in engine.text.splitlines()[-1]


def test_an_engine_that_serves_none_says_so(adapters: Path, tmp_path: Path) -> None:
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS).wait_ready()
    with EngineSession(engine, "none") as link:
        link.snapshot()
        assert link.engine.Describe(pb.DescribeRequest()).max_loras == 0
        with pytest.raises(grpc.RpcError, match="start it with --enable-lora"):
            link.engine.LoadLora(pb.LoadLoraRequest(lora_name="a", lora_path=str(adapters / "a")))
    assert engine.stop() == 0


@pytest.fixture(scope="module")
def fleet(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[ForkedEngine], Router]]:
    """Two engines, both with the adapter ``a`` and one with ``b``, and a router that lets clients load more."""
    folder = tmp_path_factory.mktemp("fleet")
    modules = [f"a={adapters / 'a'}", f"a={adapters / 'a'},b={adapters / 'b'}"]
    flags = (*SMALL_POOLS, *FLOAT32, *LORA)
    engines = [ForkedEngine(DEMO, folder, *flags, "--lora-modules", each) for each in modules]
    router = ForkedRouter(DEMO, [engine.address for engine in engines], folder, "--allow-lora-updates")
    for process in (*engines, router):
        process.wait_ready()
    yield engines, router
    for process in (router, *engines):
        if process.popen.poll() is None:
            process.stop()


def client(router: Router) -> OpenAI:
    return OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)


def sampled(router: Router, model: str, **more: object) -> object:
    body = {"ignore_eos": True, "top_k": 50}
    return client(router).completions.create(
        model=model, prompt="Once upon a time", max_tokens=600, temperature=1.2, seed=11, extra_body=body, **more
    )


def test_clients_ask_for_adapters_by_name_load_more_and_unload_them(
    fleet: tuple[list[ForkedEngine], Router], adapters: Path
) -> None:
    _, router = fleet
    eventually(lambda: len(client(router).models.list().data) == 3)
    known = {card.id: getattr(card, "parent", None) for card in client(router).models.list().data}
    assert known == {MODEL: None, "a": MODEL, "b": MODEL}
    body = {"lora_name": "c", "lora_path": str(adapters / "b")}
    loaded = httpx.post(f"{router.url}/v1/load_lora_adapter", json=body, timeout=30)
    assert loaded.status_code == 200, loaded.text
    texts = {name: sampled(router, name).choices[0].text for name in (MODEL, "a", "b", "c")}  # type: ignore[attr-defined]
    assert texts["b"] == texts["c"]
    assert len(set(texts.values())) == 3
    unloaded = httpx.post(f"{router.url}/v1/unload_lora_adapter", json={"lora_name": "c"}, timeout=30)
    assert unloaded.status_code == 200, unloaded.text
    assert fetch(router.http_port, "/v1/models/c")[0] == 404
    with pytest.raises(openai.NotFoundError):
        sampled(router, "c")
    missing = httpx.post(f"{router.url}/v1/load_lora_adapter", json={**body, "lora_path": "/nowhere"}, timeout=30)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
    unnamed = httpx.post(f"{router.url}/v1/load_lora_adapter", json={**body, "lora_name": "c d"}, timeout=30)
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "lora_name")


def test_an_engine_that_is_killed_changes_no_token_of_an_adapters_answer(
    fleet: tuple[list[ForkedEngine], Router],
) -> None:
    engines, router = fleet
    eventually(lambda: len(client(router).models.list().data) == 3)
    undisturbed = sampled(router, "a").choices[0].text  # type: ignore[attr-defined]
    stream = (chunk.choices[0].text for chunk in sampled(router, "a", stream=True) if chunk.choices)  # type: ignore[attr-defined]
    seen = [next(stream) for _ in range(20)]
    busy = next(engine for engine in engines if engine.metric("quire_engine_running_sequences") > 0)
    busy.kill()
    seen += stream
    assert "".join(seen) == undisturbed
