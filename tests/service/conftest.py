"""A whole Quire for the tests of this folder: Redis, two engines on the demo model, and a router. All of it real."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.certificates import one_authority
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.observed_answers import Observed, observed_answers
from tests.support.processes import Router
from tests.support.redis_server import RedisServer, redis_server

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
MODEL = "quire-demo"
# Where texts of different batches are compared: in bfloat16 the last bit of a logit may differ between them.
FLOAT32 = ("--dtype", "float32")
SMALL_POOLS = ("--kv-cache-memory", str(64 << 20), "--swap-space", "0.0625")


@dataclass(frozen=True)
class Stack:
    redis: RedisServer
    engines: list[ForkedEngine]
    router: Router

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session", autouse=True)
def observed() -> Iterator[Observed]:
    with observed_answers() as observed:
        yield observed


@pytest.fixture(autouse=True)
def official_documents(observed: Observed) -> Iterator[None]:
    """Holds every answer of these tests against the official documents, whatever they ask it for."""
    yield
    assert not (problems := observed.take()), "\n".join(problems)


@pytest.fixture(scope="module", autouse=True)
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(one_authority(tmp_path_factory.mktemp("authorities"))))
        yield


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with redis_server() as redis:
        engines = [ForkedEngine(DEMO, folder, *SMALL_POOLS) for _ in range(2)]
        router = ForkedRouter(DEMO, [engine.address for engine in engines], folder, "--redis-url", redis.router_url)
        try:
            for process in (*engines, router):
                process.wait_ready()
            yield Stack(redis, engines, router)
        finally:
            codes = [process.stop() for process in (router, *engines)]
            refusals = redis.refusals()
    assert codes == [0, 0, 0], [process.text for process in (router, *engines)]
    assert refusals == [], "the rights in docs/durability.md are too few"
