"""What is long for servers of others is written on threads, in the turns of tenants; what is short, at once."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from quire_proto.cli import read_settings
from quire_router.api.tokenizer_pool import THREADS_PER_TENANT, TokenizerPool
from quire_router.components import Components
from quire_router.config import Settings
from quire_router.engines.external.server_kind import ChoiceRequest
from quire_router.engines.external.vllm_server import VllmServer

from tests.support import http_engines
from tests.support.http_engines import DEMO, VllmEngine, continuation, demo_tokenizer
from tests.unit.router.engines.external.test_client import address_of, fleet, read, submit

LONG, SHORT = [7] * 5_000, [7] * 500


@pytest.fixture(autouse=True)
def long_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engines, "MODEL_LENGTH", 10_000)


async def test_a_long_body_waits_for_its_tenants_turn_and_others_do_not() -> None:
    engine, threads, release = VllmEngine(), TokenizerPool(), threading.Event()
    async with fleet(engine, offload=threads.run_admitted) as pool:
        work = [asyncio.create_task(threads.run("many", 1, release.wait)) for _ in range(THREADS_PER_TENANT)]
        await asyncio.sleep(0)
        long, short = submit("long", prompt=LONG, n=2), submit("short", prompt=SHORT)
        with pool.dispatch(address_of(engine), long, pending_tokens=1, tenant="many") as waiting:
            for message, tenant in ((short, "many"), (submit("other", prompt=LONG), "other")):
                with pool.dispatch(address_of(engine), message, pending_tokens=1, tenant=tenant) as outputs:
                    prompt = list(message.prompt_token_ids)
                    assert await read(outputs) == {0: continuation(prompt, 5)}
            assert len(engine.requests) == 2
            release.set()
            assert await read(waiting) == dict.fromkeys(range(2), continuation(LONG, 5))
        await asyncio.gather(*work)
    threads.close()


async def test_only_long_bodies_leave_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[int, bool] = {}
    body = VllmServer.body

    def spy(self: VllmServer, choice: ChoiceRequest) -> Mapping[str, Any]:
        written[len(choice.token_ids)] = threading.current_thread() is threading.main_thread()
        return body(self, choice)

    monkeypatch.setattr(VllmServer, "body", spy)
    engine = VllmEngine()
    async with fleet(engine) as pool:
        for number, prompt in enumerate((SHORT, LONG)):
            message = submit(str(number), prompt=prompt)
            with pool.dispatch(address_of(engine), message, pending_tokens=1) as outputs:
                await read(outputs)
    assert written == {len(SHORT): True, len(LONG): False}


async def test_clients_and_servers_of_others_share_the_threads_of_a_router() -> None:
    settings = read_settings(Settings, [f"--model=m={DEMO}", "--engine=vllm+http://192.0.2.1:1"])
    components = Components(settings, {"m": demo_tokenizer()})
    assert components.fleet._registry._offload == components.service._tokenizer_pool.run_admitted
    components.service.close()
