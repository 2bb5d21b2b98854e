"""The stream of the fleet: what viewers see, who may look, and that nothing is done while nobody does."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf

import httpx
import pytest
from pydantic import TypeAdapter
from quire.v1 import engine_pb2
from quire_proto.cli import read_settings
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.fleet_feed import MAX_VIEWERS
from quire_router.api.model_rates import _quantile
from quire_router.app import Router
from quire_router.config import Settings
from quire_router.core.fleet_view import FleetDelta, FleetSnapshot

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.ports import free_port
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until

KEY, OPERATOR = "a-key-of-enough-characters", "the-key-of-an-operator"
PROMPT = "a secret prompt"
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 8}
TENANTS = f"""
[[tenants]]
name = "user"
keys = ["{KEY}"]
[[tenants]]
name = "operator"
keys = ["{OPERATOR}"]
allow_fleet = true
"""
CELLS = bytes([0, 1, 2, 3])


@dataclass
class Stage:
    """A whole router with engines that the test speaks for."""

    router: Router
    engines: list[ScriptedEngine]
    http: httpx.AsyncClient

    def ask(self, **headers: str) -> asyncio.Task[httpx.Response]:
        """Sends a chat; its answer comes once the engine has spoken."""
        return asyncio.create_task(self.http.post("/v1/chat/completions", json=CHAT, headers=headers))

    async def first_submit(self) -> tuple[ScriptedEngine, engine_pb2.Submit, asyncio.Task[engine_pb2.Submit]]:
        """The engine that gets the next request, what it gets, and what another engine may get next."""
        submits = [asyncio.create_task(engine.submit()) for engine in self.engines]
        [done], others = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
        return self.engines[submits.index(done)], done.result(), next(iter(others), done)

    @asynccontextmanager
    async def viewer(self, key: str = "") -> AsyncIterator["Viewer"]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.http.stream("GET", "/v1/fleet/events", headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            yield Viewer(response.aiter_lines())


@dataclass
class Viewer:
    """Reads the stream."""

    lines: AsyncIterator[str]
    text: str = ""

    async def next(self) -> tuple[str, FleetSnapshot | FleetDelta]:
        """The next event, with its name; the schema takes exactly what was sent."""
        name = ""
        async with asyncio.timeout(20):
            async for line in self.lines:
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    self.text += value
                    kind = FleetSnapshot if name == "snapshot" else FleetDelta
                    found = TypeAdapter(kind).validate_json(value)
                    assert json.loads(TypeAdapter(kind).dump_json(found)) == json.loads(value)
                    return name, found
        raise AssertionError("the stream ended")

    async def until(self, condition) -> FleetSnapshot | FleetDelta:
        """The first event for which that is true."""
        while True:
            _, found = await self.next()
            if condition(found):
                return found


@asynccontextmanager
async def open_stage(*flags: str, engines: int = 1) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        scripted = [ScriptedEngine(models=("m",), vocab_size=byte_level().get_vocab_size()) for _ in range(engines)]
        ports = [str(free_port()) for _ in range(3)]
        words = ["--http-port", ports[0], "--grpc-port", ports[1], "--metrics-port", ports[2], "--model", "m=/nowhere"]
        for engine in scripted:
            words += ["--engine", await engine.start()]
            stack.push_async_callback(engine.stop)
        tokenizers = {"m": ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
        router = Router(read_settings(Settings, [*words, *flags]), tokenizers)
        running = asyncio.create_task(router.run())
        for engine in scripted:
            await asyncio.wait_for(engine.opened.get(), 20)
        pool = router._components.fleet
        await until(lambda: pool.ready("m") == engines)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http:
            try:
                yield Stage(router, scripted, http)
            finally:
                router.stop()
                router.stop()
                await running


async def test_a_viewer_gets_a_snapshot_and_then_what_changes():
    async with open_stage() as stage, stage.viewer() as viewer:
        [engine] = stage.engines
        name, first = await viewer.next()
        assert (name, [each.condition for each in first.engines]) == ("snapshot", ["ready"])
        assert [(model.name, model.ready_engines) for model in first.models] == [("m", 1)]

        engine.inspection = engine_pb2.InspectResponse(
            device=engine_pb2.KvPool(total=4, used=2, cached=1, cells=CELLS, blocks_per_cell=1),
            prompt_tokens=4,
            cached_prompt_tokens=1,
        )
        delta = await viewer.until(lambda found: any(each.device.cells for each in found.engines))
        [seen] = delta.engines
        assert (seen.device.total, seen.device.used, seen.device.cached) == (4, 2, 1)
        assert seen.hit_rate == 0.25

        engine.inspection.preemptions = 3
        delta = await viewer.until(lambda found: found.events)
        assert [(event.kind, event.count) for event in delta.events] == [("preempted", 3)]


async def test_a_request_is_seen_with_why_it_went_where_and_without_what_it_says():
    async with open_stage(engines=2) as stage, stage.viewer() as viewer:
        await viewer.next()
        answer = stage.ask()
        engine, submit, _ = await stage.first_submit()
        engine.send(output(submit.request_id, [80], 0))
        delta = await viewer.until(lambda found: found.events)
        [event] = delta.events
        assert (event.kind, event.engine, event.model, event.attempt) == ("placed", engine.address, "m", 1)
        assert {scored for scored, _ in event.scores} == {each.address for each in stage.engines}
        if not (delta.requests and delta.requests[0].output_tokens):
            delta = await viewer.until(lambda found: found.requests and found.requests[0].output_tokens)
        assert (delta.requests[0].engine, delta.requests[0].id) == (engine.address, event.request)
        engine.send(output(submit.request_id, [], 1, STOP))
        await viewer.until(lambda found: found.requests == [])
        request_id = (await answer).headers["x-request-id"]

    assert request_id.startswith(event.request)
    assert request_id not in viewer.text
    assert PROMPT not in viewer.text


async def test_an_engine_that_dies_is_seen_and_so_is_where_its_request_goes_on():
    async with open_stage(engines=2) as stage, stage.viewer() as viewer:
        await viewer.next()
        answer = stage.ask()
        dead, submit, other = await stage.first_submit()
        [alive] = [engine for engine in stage.engines if engine is not dead]
        dead.send(output(submit.request_id, [80], 0))
        await dead.stop()
        again = await asyncio.wait_for(other, 20)
        alive.send(output(again.request_id, [80], 1), output(again.request_id, [], 2, STOP))
        seen: set[tuple[str, str]] = set()
        expected = {("engine_lost", dead.address), ("attempt_lost", dead.address), ("placed", alive.address)}
        incident = None
        while not (expected <= seen and incident is not None and incident.continued):
            _, found = await viewer.next()
            seen |= {(event.kind, event.engine) for event in found.events}
            [incident] = found.incidents or [incident]
        assert (await answer).status_code == 200

        assert (incident.engine, incident.moved, incident.continued) == (dead.address, 1, 1)
        assert (incident.on, incident.back) == ([alive.address], 0)
        assert incident.reason
        await dead.start()
        found = await viewer.until(lambda found: found.incidents)
        assert [each.back >= incident.lost for each in found.incidents] == [True]


async def test_a_loss_that_nobody_saw_is_an_incident_and_says_who_continued():
    async with open_stage(engines=2) as stage:
        answer = stage.ask()
        dead, submit, other = await stage.first_submit()
        [alive] = [engine for engine in stage.engines if engine is not dead]
        dead.send(output(submit.request_id, [80], 0))
        await dead.stop()
        again = await asyncio.wait_for(other, 20)
        alive.send(output(again.request_id, [], 1, STOP))
        assert (await answer).status_code == 200
        async with stage.viewer() as viewer:
            _, snapshot = await viewer.next()
    [incident] = snapshot.incidents
    assert (incident.engine, incident.on, incident.back) == (dead.address, [alive.address], 0)


async def test_a_model_has_the_quantiles_and_rates_of_the_last_seconds():
    async with open_stage() as stage, stage.viewer() as viewer:
        _, snapshot = await viewer.next()
        [model] = snapshot.models
        assert (model.tokens_per_second, model.ttft, model.itl) == (0, None, None)
        [engine] = stage.engines
        answer = stage.ask()
        submit = await engine.submit()
        for position in range(4):  # one after the other: tokens that come at once have no time between them
            engine.send(output(submit.request_id, [80], position))
            await asyncio.sleep(0.02)
        found = await viewer.until(lambda found: found.models and found.models[0].itl and found.models[0].ttft)
        [model] = found.models
        engine.send(output(submit.request_id, [], 4, STOP))
        await answer
    assert model.tokens_per_second > 0
    for p50, p95, p99 in (model.ttft, model.itl):
        assert 0 < p50 <= p95 <= p99


async def test_quantiles_are_those_of_prometheus():
    counts = [0.0, 5.0, 9.0, 10.0, 10.0]  # at most 1, 2, 4 and 8, and all
    found = [_quantile((1.0, 2.0, 4.0, 8.0, inf), counts, share) for share in (0.5, 0.7, 0.95, 1.0)]
    assert found == [2.0, 3.0, 6.0, 8.0]
    assert _quantile((1.0, inf), [0.0, 3.0], 0.5) == 1.0


@pytest.mark.parametrize(("key", "named"), [(KEY, False), (OPERATOR, True)], ids=["a tenant", "an operator"])
async def test_a_client_is_told_that_its_answer_moved_and_the_engines_if_it_may_know_them(tmp_path, key, named):
    (tmp_path / "tenants.toml").write_text(TENANTS)
    async with open_stage("--tenants", str(tmp_path / "tenants.toml"), engines=2) as stage:
        answer = stage.ask(authorization=f"Bearer {key}", **{"idempotency-key": "a-key"})
        dead, submit, other = await stage.first_submit()
        [alive] = [engine for engine in stage.engines if engine is not dead]
        dead.send(output(submit.request_id, [80], 0))
        await dead.stop()
        again = await asyncio.wait_for(other, 20)
        alive.send(output(again.request_id, [81], 1), output(again.request_id, [], 2, STOP))
        lines = (await answer).text.splitlines()

    [told] = [line for line in lines if line.startswith(": engine")]
    pattern = r": engine {} lost \(.+\), continued on {}" if named else ": engine lost, continued on another one"
    assert re.fullmatch(pattern.format(dead.address, alive.address) + r" after \d+\.\d s", told)
    texts = [index for index, line in enumerate(lines) if re.search('"content":"[^"]', line)]
    assert texts[0] < lines.index(told) < texts[1]


async def test_nothing_is_done_while_nobody_looks():
    async with open_stage() as stage:
        [engine] = stage.engines
        components = stage.router._components
        answer = stage.ask()
        _, submit, _ = await stage.first_submit()
        engine.send(output(submit.request_id, [80], 0), output(submit.request_id, [], 1, STOP))
        assert (await answer).status_code == 200
        assert (components._fleet_log.last, engine.inspections) == (0, 0)

        async with stage.viewer() as viewer:
            await viewer.next()
            await until(lambda: engine.inspections > 0)
        await until(lambda: not components._fleet_log.watched)
        asked = engine.inspections
        await asyncio.sleep(1.2)  # two samples, if any were taken
        assert (engine.inspections, components.feed._task, components._fleet_log.explain) == (asked, None, 0)


async def test_viewers_share_one_sample_and_are_not_too_many():
    async with open_stage() as stage, AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(stage.viewer()) for _ in range(MAX_VIEWERS)]
        firsts = [await viewer.next() for viewer in viewers]
        assert {name for name, _ in firsts} == {"snapshot"}
        refused = await stage.http.get("/v1/fleet/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "viewers")
        later = [(await viewer.until(lambda found: isinstance(found, FleetDelta))).time for viewer in viewers]
        assert len(set(later)) < MAX_VIEWERS / 2


async def test_with_keys_only_tenants_that_may_see_the_fleet_do(tmp_path):
    (tmp_path / "tenants.toml").write_text(TENANTS)
    async with open_stage("--tenants", str(tmp_path / "tenants.toml")) as stage:
        without = await stage.http.get("/v1/fleet/events")
        user = await stage.http.get("/v1/fleet/events", headers={"authorization": f"Bearer {KEY}"})
        async with stage.viewer(OPERATOR) as viewer:
            name, _ = await viewer.next()

    assert (without.status_code, user.status_code, name) == (401, 403, "snapshot")
    assert user.json()["error"]["code"] == "fleet"


async def test_every_key_sees_the_fleet_if_the_router_allows_it():
    async with open_stage("--api-key", KEY, "--allow-fleet") as stage, stage.viewer(KEY) as viewer:
        name, _ = await viewer.next()

    assert name == "snapshot"


async def test_a_router_that_stops_ends_the_stream():
    async with open_stage() as stage, stage.viewer() as viewer:
        await viewer.next()
        stage.router.stop()
        stage.router.stop()
        async with asyncio.timeout(10):
            assert [line async for line in viewer.lines][-2:] == [": end", ""]
