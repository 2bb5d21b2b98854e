"""What TLS costs a link, beside plain text: processor time of both of its ends together, for a token, and for starting
an engine's end and connecting to it.

``GRPC_VERBOSITY=ERROR .venv/bin/python -m tests.bench.tls`` prints the least of several rounds in turns.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.v1 import engine_pb2
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.tls import ClientTls, ServerTls
from quire_router.engines.connection import EngineConnection
from quire_router.engines.settings import ConnectionSettings

from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority
from tests.support.scripted_engine import LENGTH, ScriptedEngine, output
from tests.support.waiting import until

Linked = tuple[ScriptedEngine, EngineConnection]
ROUNDS, STEPS, REQUESTS, LINKS = 7, 400, 64, 40


@asynccontextmanager
async def linked(server: ServerTls | None, client: ClientTls | None) -> AsyncIterator[Linked]:
    engine = ScriptedEngine(credentials=None if server is None else ReloadingServerCredentials(server).credentials())
    link = EngineConnection(await engine.start(), replace(ConnectionSettings(), tls=client))
    link.start()
    try:
        await engine.opened.get()
        await until(lambda: link.ready)
        yield engine, link
    finally:
        await link.close()
        await engine.stop()


async def seconds_of_a_token(server: ServerTls | None, client: ClientTls | None) -> float:
    """Processor time of both ends, in one process with all of its threads."""
    async with linked(server, client) as (engine, link):
        streams = [link.submit(engine_pb2.Submit(request_id=str(each))) for each in range(REQUESTS)]
        for _ in streams:
            await engine.submit()
        began = time.process_time()
        for step in range(STEPS):
            more = {"finish_reason": LENGTH} if step == STEPS - 1 else {}
            engine.send(*(output(str(each), [step], step, **more) for each in range(REQUESTS)))
            await asyncio.sleep(0)  # the batches go out one by one, as an engine's steps do
        for stream in streams:
            async for _ in stream:
                pass
        return (time.process_time() - began) / (STEPS * REQUESTS)


async def seconds_of_a_connection(server: ServerTls | None, client: ClientTls | None) -> float:
    """Processor time of both ends, until a link is ready."""
    began = time.process_time()
    for _ in range(LINKS):
        async with linked(server, client):
            pass
    return (time.process_time() - began) / LINKS


async def main() -> None:
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        server = ServerTls(authority.issue(ENGINE_NAME), authority.ca)
        client = ClientTls(authority.ca, authority.issue(ROUTER_NAME), ENGINE_NAME)
        kinds = {"plain": (None, None), "TLS": (server, client)}
        for what, measure in (("token", seconds_of_a_token), ("connection", seconds_of_a_connection)):
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(ROUNDS):
                for kind, files in kinds.items():
                    taken[kind].append(await measure(*files))
            plain, secure = (min(taken[kind]) * 1e6 for kind in kinds)
            print(f"a {what}: {plain:,.1f} us in plain text, {secure:,.1f} us over TLS: {secure / plain:.2f} times")


if __name__ == "__main__":
    asyncio.run(main())
