"""``ExternalEngine`` against stand-ins over HTTP: what runs there, what is lost with it, and when it is ready."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from quire.v1 import engine_pb2
from quire_proto.convert import sampling_to_proto
from quire_proto.errors import ErrorCode
from quire_proto.hashing import extra_key, hash_chain, pack
from quire_proto.pooling import Task
from quire_proto.sampling import SamplingParams
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.discovery.base import Endpoint
from quire_router.engines.attempt import EngineFull, EngineLost, Output, RequestUnsupported, StreamEnd
from quire_router.engines.base import Offload, on_any_thread
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.external.client import ExternalEngine
from quire_router.engines.load_messages import SpeculativeBlocks, SpeculativePrefix
from quire_router.engines.model_matcher import ModelIdentity
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings, KnownModel, ServedModelLimits
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

from tests.support.http_engines import (
    DEMO,
    HttpEngine,
    OpenAIEngine,
    SglangEngine,
    VllmEngine,
    continuation,
    demo_tokenizer,
    serving,
)
from tests.support.model_folders import byte_level
from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.waiting import until

QUICK = ConnectionSettings(backoff=0.01, max_backoff=0.02, poll_silence=600, stall=600)
PROMPT = [7, 8, 9]
LIMITS = ServedModelLimits(max_model_len=512, vocab_size=1024)


def submit(request_id: str = "a", **fields: Any) -> engine_pb2.Submit:
    """A request; ``fields`` are those of ``SamplingParams``, or of the message where they are messages' own."""
    own = {name: fields.pop(name) for name in ("output_token_ids", "delivered", "cache_salt") if name in fields}
    prompt = fields.pop("prompt", PROMPT)
    sampling = sampling_to_proto(SamplingParams(**{"temperature": 0, "max_tokens": 5, **fields}))
    return engine_pb2.Submit(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **own)


@asynccontextmanager
async def connected(
    engine: HttpEngine, settings: ConnectionSettings = QUICK, **callbacks: Any
) -> AsyncIterator[ExternalEngine]:
    """The stand-in, started, and a client of it that is ready."""
    async with serving(engine):
        model = KnownModel(demo_tokenizer(), LIMITS)
        client = ExternalEngine(
            engine.url,
            settings,
            url=engine.url,
            kind=engine.kind,
            models={"m": model},
            poll_period=0.02,
            **callbacks,
        )
        client.start()
        try:
            await until(lambda: client.ready)
            yield client
        finally:
            await client.close()
            assert not client._running


async def read(stream: OutputStream) -> dict[int, list[int]]:
    """The tokens of each choice."""
    tokens: dict[int, list[int]] = {}
    async for output in stream:
        if output.error is not None:
            raise output.error
        tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def idle(client: ExternalEngine) -> None:
    await until(lambda: not client._running)


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_tokens_go_in_and_come_out(kind: type[HttpEngine]) -> None:
    engine = kind()
    async with connected(engine) as client:
        stream = client.submit(submit())
        assert await read(stream) == {0: continuation(PROMPT, 5)}
        assert stream.end is StreamEnd.COMPLETED
        stream.close()
        await idle(client)
    assert engine.aborted == 0


async def test_an_answer_with_more_values_than_the_request_asks_for_loses_the_attempt() -> None:
    class Lengthy(VllmEngine):
        def event(self, body: Any, written: list[int], *end: Any) -> dict[str, Any]:
            more = {} if len(written) == 1 else {"more": [1] * 40_000}  # the first has the prompt
            return super().event(body, written, *end) | more

    for prompt, is_lost in (([7] * 1_000, True), ([7] * 30_000, False)):
        engine = Lengthy()
        engine.refuse = lambda _: None  # type: ignore[method-assign]
        async with connected(engine) as client:
            stream = client.submit(submit(prompt=prompt))
            if is_lost:
                with pytest.raises(EngineLost, match="too many values"):
                    await read(stream)
            else:
                assert len((await read(stream))[0]) == 5
            stream.close()
            await idle(client)


async def test_text_goes_in_and_comes_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = OpenAIEngine()
    prompt = engine.tokenizer.encode_plain("Once upon a time")
    async with connected(engine) as client:
        assert "is connected (a server of the OpenAI API)" in caplog.text
        stream = client.submit(submit(prompt=prompt, max_tokens=50))
        assert await read(stream) == {0: engine.continuation(prompt, 50)}


async def test_the_server_learns_the_requests_id_and_trace() -> None:
    engine = VllmEngine()
    message = submit("an-id")
    message.traceparent = "00-1-2-01"
    async with connected(engine) as client:
        await read(client.submit(message))
    assert engine.headers[0]["x-request-id"].startswith("an-id-0-")
    assert engine.headers[0]["traceparent"] == "00-1-2-01"


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_an_attempt_is_not_taken_for_the_one_before(kind: type[HttpEngine]) -> None:
    """Which the server may still run: it refuses an id that it knows, and that would be the client's error."""
    async with connected(kind()) as client:
        client.submit(submit("a")).close()
        await idle(client)
        for _ in range(2):
            assert await read(client.submit(submit("a"))) == {0: continuation(PROMPT, 5)}
            await idle(client)


async def test_choices_are_requests_of_their_own_and_go_on_where_each_of_them_was() -> None:
    engine = VllmEngine()
    delivered = [
        engine_pb2.Delivered(index=0, token_ids=[5], finished=True),
        engine_pb2.Delivered(index=1, token_ids=[11, 12]),
    ]
    async with connected(engine) as client:
        tokens = await read(client.submit(submit(n=3, seed=5, temperature=1.0, delivered=delivered)))
    assert tokens == {1: continuation([*PROMPT, 11, 12], 3), 2: continuation(PROMPT, 5)}
    assert sorted(len(body["prompt"]) for body in engine.requests) == [3, 5]
    assert len({body["seed"] for body in engine.requests}) == 2


async def test_a_lost_attempt_may_still_be_ending_when_the_next_one_begins() -> None:
    """Where there is one server, and one of several choices failed there."""

    class Failing(VllmEngine):
        def refuse(self, body: Any) -> dict[str, Any] | None:
            if len(self.requests) == 2:
                raise web.HTTPInternalServerError
            return None

    engine = Failing()
    engine.hold_after = 0
    async with connected(engine) as client:
        message = submit(n=2)
        first = client.submit(message)
        with pytest.raises(EngineLost):
            await first.__anext__()
        engine.released.set()
        assert await read(client.submit(message)) == dict.fromkeys((0, 1), continuation(PROMPT, 5))


async def test_a_request_that_is_closed_ends_at_the_server() -> None:
    engine = VllmEngine()
    engine.hold_after = 2
    async with connected(engine) as client:
        stream = client.submit(submit(n=2))
        await until(lambda: engine.running == 2)
        await anext(stream)
        stream.close()
        await until(lambda: engine.running == 0)
        await idle(client)
    assert engine.aborted == 2


async def test_a_request_that_is_closed_before_it_began_is_never_sent() -> None:
    engine = VllmEngine()
    async with connected(engine) as client:
        client.submit(submit()).close()
        await idle(client)
    assert engine.requests == []


async def test_one_choice_can_be_cancelled_alone() -> None:
    engine = VllmEngine()
    engine.hold_after = 2
    async with connected(engine) as client:
        stream = client.submit(submit(n=2))
        await until(lambda: engine.running == 2)
        stream.cancel(0)
        await until(lambda: engine.running == 1)
        engine.released.set()
        assert len((await read(stream))[1]) == 5


async def test_a_reader_that_ends_its_choice_within_a_push_ends_the_request() -> None:
    """As at a stop string, which is found in the text of the token that is just being passed on."""
    engine = VllmEngine(seconds_per_token=0.002)

    async with connected(engine) as client:
        stream = client.submit(submit(max_tokens=1000))

        def stop(output: Output) -> bool:
            if output.position >= 3:
                stream.cancel(output.index)
            return False

        stream.sink = stop
        assert 4 <= len((await read(stream))[0]) < 1000
        assert stream.end is StreamEnd.STOPPED
        await idle(client)
        await until(lambda: engine.running == 0)
    assert engine.aborted == 1


async def test_a_connection_that_breaks_loses_its_requests_and_nothing_new_comes_before_the_server_answers() -> None:
    engine = VllmEngine()
    engine.break_after = 2
    async with connected(engine) as client:
        stream = client.submit(submit())
        with pytest.raises(EngineLost, match="the connection broke"):
            await read(stream)
        assert stream.end is StreamEnd.LOST
        assert not client.ready
        await until(lambda: client.ready)
        assert client.generation == 1


async def test_a_stream_that_ends_too_early_is_lost() -> None:
    class Short(VllmEngine):
        async def _stream(self, request: Any, response: Any, body: Any) -> None:
            await response.write(b"data: [DONE]\n\n")

    async with connected(Short()) as client:
        with pytest.raises(EngineLost, match="ended the stream at token 0"):
            await read(client.submit(submit()))
        assert not client.ready


async def test_a_server_that_gives_a_request_back_gets_no_other_before_it_was_asked() -> None:
    class Leaving(VllmEngine):
        def event(self, body: Any, written: list[int], reason: str | None, matched: int | None) -> dict[str, Any]:
            return super().event(body, written, "abort" if len(written) == 3 else reason, matched)

    async with connected(Leaving()) as client:
        with pytest.raises(EngineLost, match="abort"):
            await read(client.submit(submit()))
        assert not client.ready
        await until(lambda: client.ready)


async def test_a_server_that_answers_nonsense_loses_the_request() -> None:
    class Odd(VllmEngine):
        def event(self, *_: Any) -> dict[str, Any]:
            return {"choices": [{}]}

    async with connected(Odd()) as client:
        with pytest.raises(EngineLost, match="cannot be used"):
            await read(client.submit(submit()))


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_is_full_refuses(status: int) -> None:
    engine = VllmEngine()
    engine.refusal = status, {"error": {"message": "busy"}}
    async with connected(engine) as client:
        stream = client.submit(submit())
        with pytest.raises(EngineFull, match="busy"):
            await read(stream)
        assert stream.end is StreamEnd.REFUSED
        assert client.ready


async def test_a_server_that_is_full_in_the_middle_of_an_answer_has_lost_it() -> None:
    class Overloaded(VllmEngine):
        def event(self, body: Any, written: list[int], reason: str | None, matched: int | None) -> dict[str, Any]:
            if len(written) == 3:
                return {"error": {"message": "busy", "code": 503}}
            return super().event(body, written, reason, matched)

    async with connected(Overloaded()) as client:
        stream = client.submit(submit())
        with pytest.raises(EngineLost, match="busy"):
            await read(stream)
        assert stream.end is StreamEnd.LOST


async def test_more_choices_than_a_server_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_router.engines.external.client.MAX_CHOICES", 3)
    engine = VllmEngine()
    engine.hold_after = 1
    async with connected(engine) as client:
        first = client.submit(submit("a", n=2))
        with pytest.raises(EngineFull):
            client.submit(submit("b", n=2))
        client.submit(submit("c")).close()
        first.close()


async def test_what_the_server_finds_wrong_is_the_clients_error() -> None:
    async with connected(VllmEngine()) as client:
        with pytest.raises(Exception, match="cannot be greater than max_model_len") as refused:
            await read(client.submit(submit(max_tokens=3000)))
        assert getattr(refused.value, "code", None) is ErrorCode.INVALID
        assert getattr(refused.value, "reason", None) == "context_length_exceeded"
        assert client.ready


async def test_what_the_server_finds_wrong_in_its_stream_is_the_clients_error_too() -> None:
    async with connected(VllmEngine()) as client:
        with pytest.raises(Exception, match="out-of-vocab"):
            await read(client.submit(submit(logit_bias=((99_999, 1.0),))))


async def test_what_sglang_finds_wrong_is_the_clients_error_though_it_names_no_code() -> None:
    async with connected(SglangEngine()) as client:
        with pytest.raises(Exception, match="maximum context length") as refused:
            await read(client.submit(submit(max_tokens=3000)))
        assert getattr(refused.value, "code", None) is ErrorCode.INVALID
        assert getattr(refused.value, "reason", None) == "context_length_exceeded"
        assert client.ready
        with pytest.raises(EngineLost, match="maximum context length"):
            await read(client.submit(submit(max_tokens=3000, output_token_ids=[4])))


async def test_a_request_that_another_engine_began_cannot_be_wrong() -> None:
    engine = VllmEngine()
    engine.refusal = 400, {"error": {"message": "odd"}}
    async with connected(engine) as client:
        with pytest.raises(EngineLost, match="odd"):
            await read(client.submit(submit(output_token_ids=[4])))


async def test_an_error_of_the_server_is_not_the_clients() -> None:
    engine = VllmEngine()
    engine.refusal = 500, {"error": {"message": "out of memory"}}
    async with connected(engine) as client:
        with pytest.raises(EngineLost, match="out of memory"):
            await read(client.submit(submit()))


async def test_what_cannot_be_run_is_said_before_anything_is_sent() -> None:
    engine = VllmEngine()
    async with connected(engine) as client:
        with pytest.raises(RequestUnsupported) as refused:
            client.submit(submit(beam_width=2))
        assert refused.value.error.param == "beam_width"
        assert not client._running
    assert engine.requests == []


async def test_a_server_that_is_not_there_takes_nothing_and_is_found_when_it_comes() -> None:
    engine = VllmEngine()
    client = ExternalEngine(
        engine.url, QUICK, url=engine.url, kind="vllm", models={"m": KnownModel()}, poll_period=0.02
    )
    client.start()
    assert client.condition == "connecting"
    with pytest.raises(EngineLost):
        client.submit(submit())
    async with serving(engine):
        await until(lambda: client.ready)
        assert client.condition == "ready"
    await until(lambda: not client.ready)
    assert client.condition == "lost"
    async with serving(engine):
        await until(lambda: client.ready)
        assert client.generation == 2
    await client.close()


async def test_a_server_that_ends_in_order_gets_nothing_new_and_its_streams_go_on() -> None:
    engine = VllmEngine()
    engine.hold_after = 2
    async with connected(engine) as client:
        stream = client.submit(submit())
        await until(lambda: engine.running == 1)
        engine.healthy = False
        await until(lambda: client.condition == "reconnecting")
        with pytest.raises(EngineLost):
            client.submit(submit("b"))
        engine.released.set()
        assert await read(stream) == {0: continuation(PROMPT, 5)}


async def test_a_server_that_says_nothing_more_loses_its_requests() -> None:
    engine = VllmEngine()
    engine.hold_after = 2
    settings = ConnectionSettings(backoff=0.01, max_backoff=0.02, poll_silence=0.1, stall=0.2, connect_timeout=0.2)
    async with connected(engine, settings) as client:
        stream = client.submit(submit())
        await until(lambda: engine.running == 1)
        engine.thawed.clear()
        with pytest.raises(EngineLost, match="said nothing"):
            await read(stream)
        assert not client.ready
        engine.thawed.set()
        await until(lambda: client.ready)


async def test_a_server_that_answers_polls_late_is_silent_and_stays_connected() -> None:
    engine = VllmEngine()
    async with connected(engine, ConnectionSettings(poll_silence=0.1, stall=600.0)) as client:
        engine.thawed.clear()
        await until(lambda: client.condition == "silent")
        polls = engine.polls
        await asyncio.sleep(0.15)  # a poll's time is over
        engine.thawed.set()
        await until(lambda: client.ready)
        assert client.generation == 1
        assert engine.polls > polls


async def test_a_server_that_is_merely_slow_to_stream_loses_nothing() -> None:
    engine = VllmEngine()
    engine.hold_after = 2
    settings = ConnectionSettings(poll_silence=0.15, stall=0.3)
    async with connected(engine, settings) as client:
        stream = client.submit(submit())
        await until(lambda: engine.running == 1)
        await asyncio.sleep(0.6)  # twice what it may be silent: polls are answered
        engine.released.set()
        assert await read(stream) == {0: continuation(PROMPT, 5)}


async def test_a_key_is_sent_and_a_wrong_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = VllmEngine()
    engine.api_key = "secret-of-vllm"
    patient = {"backoff": 0.01, "max_backoff": 0.02, "start_patience": 0.0, "poll_silence": 600.0, "stall": 600.0}
    async with connected(engine, ConnectionSettings(api_key="secret-of-vllm", **patient)) as client:
        assert await read(client.submit(submit())) == {0: continuation(PROMPT, 5)}
    wrong = VllmEngine()
    wrong.api_key = "another"
    async with serving(wrong):
        settings = ConnectionSettings(api_key="secret-of-vllm", **patient)
        client = ExternalEngine(wrong.url, settings, url=wrong.url, kind="vllm", models={"m": KnownModel()})
        with caplog.at_level(logging.WARNING):
            client.start()
            await until(lambda: "Unauthorized" in caplog.text)
        await client.close()
    assert "secret-of-vllm" not in caplog.text


# What is reported


def hashes(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return list(hash_chain(pack(tokens), 16 * 4, extra_key("vllm:/models/m", salt)))


async def test_what_was_sent_there_and_written_there_is_expected_to_be_cached() -> None:
    engine = VllmEngine()
    stored: list[bytes] = []

    def listen(change: engine_pb2.Snapshot | engine_pb2.KvEvent) -> None:
        if isinstance(change, engine_pb2.KvEvent):
            stored.extend(change.stored.block_hashes)

    prompt = list(range(3, 43))
    async with connected(engine, on_kv_event=listen) as client:
        await read(client.submit(submit(prompt=prompt, max_tokens=10, cache_salt=b"tenant")))
        await idle(client)
    whole = prompt + continuation(prompt, 10)
    assert stored == hashes(whole, b"tenant")
    assert len(stored) == 3


async def test_what_other_routers_sent_there_is_expected_to_be_cached_too() -> None:
    engine, sent, index = VllmEngine(), list(range(3, 83)), PrefixIndex()
    async with fleet(engine, index=index) as pool:
        table = pool.table
        others = SpeculativeBlocks(table, index, lambda: 0.0)
        others.on_remote = pool.expect_cached
        others.apply_remote([SpeculativePrefix(address_of(engine), tuple(hashes(sent)))])
        others.apply_remote([SpeculativePrefix("gone", tuple(hashes(sent)))])
        row, long_after = table.row_of(address_of(engine)), 1e6  # what is merely speculative has expired by then
        assert index.match(hashes(sent), long_after, len(table)).device[row] == 5


async def test_load_is_reported_with_how_fast_the_server_was() -> None:
    engine = VllmEngine()
    reports: list[engine_pb2.Load] = []
    async with connected(
        engine, on_load=lambda load: reports.append(engine_pb2.Load.FromString(load.SerializeToString()))
    ) as client:
        assert (reports[0].blocks_total, reports[0].blocks_free) == (400, 300)
        assert not reports[0].HasField("pace")
        for number in range(2):
            await read(client.submit(submit(str(number), prompt=list(range(3 + number, 203 + number)), max_tokens=20)))
            await idle(client)
        await until(lambda: reports[-1].HasField("pace"))
    assert reports[-1].pace.step_seconds > 0


async def test_how_much_runs_there_at_once_is_learned_from_what_waits() -> None:
    engine = VllmEngine()
    engine.hold_after = 1
    async with connected(engine) as client:
        streams = [client.submit(submit(str(number))) for number in range(3)]
        await until(lambda: engine.running == 3)
        polls = engine.polls
        await until(lambda: engine.polls > polls + 4)  # two rounds
        assert client.description is not None
        assert client.description.max_num_seqs == 0
        engine.waiting = 2
        await until(lambda: client.description is not None and client.description.max_num_seqs == 3)
        for stream in streams:
            stream.close()


# In a fleet


@asynccontextmanager
async def fleet(
    *engines: HttpEngine, index: PrefixIndex | None = None, offload: Offload = on_any_thread
) -> AsyncIterator[EnginePool]:
    """A pool that finds the stand-ins, and writes down in an ``index`` what they have cached."""
    discovery, table = ScriptedDiscovery(), EngineTable()
    tokenizers = {"m": demo_tokenizer()}
    pool = EnginePool(
        discovery,
        ["m"],
        QUICK,
        on_kv_event=CacheEvents(PrefixIndex() if index is None else index, table),
        table=table,
        assumed={"m": LIMITS},
        tokenizers=tokenizers,
        offload=offload,
    )
    async with serving(*engines):
        await pool.start()
        discovery.publish(*(Endpoint(address_of(engine)) for engine in engines))
        await until(lambda: pool.ready("m") == len(engines))
        try:
            yield pool
        finally:
            await pool.close()


def address_of(engine: HttpEngine) -> str:
    return f"{engine.kind}+{engine.url}"


async def test_a_fleet_may_mix_kinds_whose_blocks_are_told_apart() -> None:
    vllm, sglang = VllmEngine(), SglangEngine()
    async with fleet(vllm, sglang) as pool:
        namespaces = {pool.namespace(row) for row in pool.rows("m").tolist()}
        assert len(namespaces) == 2
        for engine in (vllm, sglang):
            with pool.dispatch(address_of(engine), submit(), pending_tokens=3) as outputs:
                assert await read(outputs) == {0: continuation(PROMPT, 5)}


async def test_limits_are_the_servers_and_what_it_does_not_say_is_the_folders() -> None:
    async with fleet(VllmEngine()) as pool:
        limits = pool.limits("m")
    assert limits == ServedModelLimits(max_model_len=2048, vocab_size=1024, supported_tasks=(Task.GENERATE,))


async def test_prompts_count_until_their_first_token_whatever_the_server_reports() -> None:
    engine = VllmEngine()
    engine.hold_after = 0
    async with fleet(engine) as pool:
        row = pool.table.row_of(address_of(engine))
        with pool.dispatch(address_of(engine), submit(), pending_tokens=500) as outputs:
            await until(lambda: engine.running == 1)
            load = pool.engines()[0].load
            for _ in range(3):  # which would take all that is older for computed
                load._unreported._turned = float("-inf")
                load.report(engine_pb2.Load(running=1))
            assert pool.table.pending_tokens[row] == 500
            engine.released.set()
            await read(outputs)
            assert pool.table.pending_tokens[row] == 0


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_with_another_tokenizer_gets_no_requests(
    kind: type[HttpEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine, discovery = kind(), ScriptedDiscovery()
    own = ModelTokenizer(byte_level(), None)
    vocabularies = {"m": ModelIdentity(DEMO, own.vocabulary_digest)}
    pool = EnginePool(discovery, ["m"], QUICK, vocabularies=vocabularies, tokenizers={"m": own})
    async with serving(engine):
        await pool.start()
        with caplog.at_level(logging.ERROR):
            discovery.publish(Endpoint(address_of(engine)))
            await until(lambda: "another tokenizer" in caplog.text)
        assert pool.ready("m") == 0
        await pool.close()


async def test_a_server_that_does_not_tokenize_is_not_compared() -> None:
    class Silent(VllmEngine):
        async def _tokenize(self, _: web.Request) -> web.Response:
            return web.json_response({"error": "Not Found"}, status=404)

    async with connected(Silent()) as client:
        assert client.description is not None
        assert client.description.tokenizer_digest == b""


async def test_a_server_of_another_model_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    engine, discovery = VllmEngine("other"), ScriptedDiscovery()
    pool = EnginePool(discovery, ["m"], QUICK)
    async with serving(engine):
        await pool.start()
        with caplog.at_level(logging.WARNING):
            discovery.publish(Endpoint(address_of(engine)))
            await until(lambda: "serves 'other'" in caplog.text)
        assert pool.ready("m") == 0
        await pool.close()
