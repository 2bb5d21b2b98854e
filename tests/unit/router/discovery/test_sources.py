"""What ``--engine`` takes, alone and mixed, and what it refuses in one sentence."""

import asyncio
import subprocess
import sys
import time
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import ValidationError
from quire_router.autoscale.proxy_auth import from_cluster
from quire_router.config import Settings
from quire_router.core.retry import CpuThrottle
from quire_router.discovery import combined
from quire_router.discovery.base import Address, DnsName, Endpoint, KubernetesService, merge_endpoints, parse_source
from quire_router.discovery.combined import CombinedDiscovery, ExternalDiscovery, StaticDiscovery, create_discovery

from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("host:1", Address("host:1")),
        ("10.0.0.1:9000", Address("10.0.0.1:9000")),
        ("[fd00::1]:9000", Address("[fd00::1]:9000")),
        ("[FD00:0:0::0001]:09000", Address("[fd00::1]:9000")),
        ("dns://engines:9000", DnsName("engines", 9000)),
        ("dns://engines.prod.svc.cluster.local.:9000", DnsName("engines.prod.svc.cluster.local.", 9000)),
        ("kubernetes://engines", KubernetesService(None, "engines", "grpc")),
        ("kubernetes://engines:rpc", KubernetesService(None, "engines", "rpc")),
        ("kubernetes://engines:9000", KubernetesService(None, "engines", 9000)),
        ("kubernetes://prod/engines:9000", KubernetesService("prod", "engines", 9000)),
        ("vllm+http://host:8000", Address("vllm+http://host:8000")),
        ("sglang+http://[FD00:0::1]:30000/", Address("sglang+http://[fd00::1]:30000")),
        ("openai+https://api.example.com/base/path", Address("openai+https://api.example.com:443/base/path")),
        ("vllm+http://host", Address("vllm+http://host:80")),
        ("vllm+dns://engines:8000", DnsName("engines", 8000, "vllm")),
        ("sglang+kubernetes://prod/engines", KubernetesService("prod", "engines", "http", "sglang")),
        ("vllm+kubernetes://engines:8000", KubernetesService(None, "engines", 8000, "vllm")),
    ],
)
def test_an_entry_names_an_engine_or_where_engines_are_found(entry: str, source: object) -> None:
    assert parse_source(entry) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "entry",
    [
        "", "nowhere", "host:0", "host:65536", "http://host:1", "dns://engines", "dns://engines:0", "dns://:1",
        "dns://a b:1", "kubernetes://", "kubernetes:///engines", "kubernetes://a/b/c", "kubernetes://Engines",
        "kubernetes://engines:", "kubernetes://engines:0", "kubernetes://engines:65536", "kubernetes://-engines",
        "kubernetes://e:UPPER", "k8s://e", "[fd00::1::2]:9000", "[10.0.0.1]:9000",
    ],
)  # fmt: skip
def test_an_unknown_kind_of_source_is_refused_with_those_that_exist(entry: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT, dns://NAME:PORT or kubernetes://"):
        parse_source(entry)


@pytest.mark.parametrize(
    "entry",
    [
        "vllm+", "vllm+host:1", "vllm+http://", "vllm+http://host:0", "vllm+http://host:1?a=b", "vllm+http://u:p@host:1",
        "vllm+http://host:1/a b", "vllm+ftp://host:1", "vllm+vllm+http://host:1", "sglang+kubernetes://a/b/c",
    ],
)  # fmt: skip
def test_a_server_that_is_not_quires_is_named_by_a_plain_url(entry: str) -> None:
    with pytest.raises(ValueError, match=rf"is not {entry.partition('+')[0]}\+ before http"):
        parse_source(entry)


@pytest.mark.parametrize("entry", ["tgi+http://host:1", "VLLM+http://host:1"])
def test_an_unknown_kind_of_server_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_source(entry)


async def test_a_source_of_servers_that_are_not_quires_finds_urls() -> None:
    source = ScriptedDiscovery()
    source.publish(Endpoint("10.0.0.1:8000", ready=False, zone="a"))
    views = ExternalDiscovery(source, "vllm").watch()
    assert await anext(views) == [Endpoint("vllm+http://10.0.0.1:8000", ready=False, zone="a")]
    await views.aclose()


def test_settings_take_all_kinds_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    entries = "a:1,kubernetes://e,dns://n:2,a:1,kubernetes://e:grpc"
    settings = Settings(model=["/m"], engine=entries)
    assert settings.engine == ["a:1", "kubernetes://e:grpc", "dns://n:2"]


def test_a_kubernetes_service_is_refused_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValidationError, match="from a pod only"):
        Settings(model=["/m"], engine="kubernetes://e")
    with pytest.raises(ValueError, match="from a pod only"):
        create_discovery(["kubernetes://e"], dns_period=1)


def test_without_the_library_for_kubernetes_what_needs_it_is_refused_and_all_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"kubernetes://e:grpc needs .* pip install 'kubernetes"):
        create_discovery(["kubernetes://e"], dns_period=1)
    with pytest.raises(ValueError, match=r"--scaling-port .* pip install 'kubernetes"):
        from_cluster()
    create_discovery(["host:1", "dns://engines:9000"], dns_period=1)


def test_libraries_are_loaded_only_for_what_is_used() -> None:
    script = (
        "import sys\n"
        "from quire_router.components import Components\n"
        "from quire_router.discovery.combined import create_discovery\n"
        "create_discovery(['host:1'], dns_period=1)\n"
        "print([name for name in ('kubernetes', 'aiohttp', 'dns') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"


ENDPOINTS = st.lists(
    st.builds(
        Endpoint,
        st.sampled_from(["a:1", "b:1", "c:1"]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, "z"]),
    )
)


@given(ENDPOINTS)
def test_of_several_entries_for_one_address_the_best_counts(endpoints: list[Endpoint]) -> None:
    found = merge_endpoints(endpoints)
    assert [each.address for each in found] == list(dict.fromkeys(each.address for each in endpoints))
    for each in found:
        said = [other for other in endpoints if other.address == each.address]
        assert each in said
        assert each.terminating == all(other.terminating for other in said)
        alive = [other for other in said if other.terminating == each.terminating]
        assert each.ready == any(other.ready for other in alive)


async def test_a_source_that_failed_is_retried() -> None:
    class Failing:
        times = 0

        async def watch(self):
            self.times += 1
            if self.times < 3:
                raise ZeroDivisionError
            yield [Endpoint("f:1")]

    async with aclosing(CombinedDiscovery({"test": Failing()}).watch()) as views:
        assert await anext(views) == (Endpoint("f:1"),)


async def test_the_engines_of_one_name_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(combined, "MAX_ENGINES", 2)
    async with aclosing(CombinedDiscovery({"static": StaticDiscovery(["a:1", "b:1", "c:1"])}).watch()) as views:
        assert await anext(views) == (Endpoint("a:1"), Endpoint("b:1"))
    assert "3 engines are named" in caplog.text


async def test_views_that_change_all_the_time_are_yielded_at_the_consumers_pace() -> None:
    announced, heard = ScriptedDiscovery(), 0

    async def flap() -> None:
        for number in range(200):
            announced.publish(Endpoint(f"e:{number}"))
            await asyncio.sleep(0)

    async with aclosing(CombinedDiscovery({"told": announced}).watch()) as views, asyncio.TaskGroup() as tasks:
        tasks.create_task(flap())
        async for view in views:
            heard += 1
            if view == (Endpoint("e:199"),):
                break
            burn(0.03)
    assert heard <= 5


async def test_frequent_triggers_run_at_once_then_at_a_bounded_rate_and_once_after_the_last() -> None:
    asked, done = 0, []

    def work() -> None:
        done.append(asked)
        burn(0.03)

    paced = CpuThrottle(work)
    for asked in range(100):  # noqa: B007 - ``work`` notes how far it came
        paced.request()
        await asyncio.sleep(0)
    await until(lambda: done[-1] == 99)
    assert done[0] == 0
    assert len(done) <= 5


def burn(seconds: float) -> None:
    """Takes so much of the processor."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


async def test_a_source_that_fails_keeps_its_last_view_beside_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        async def watch(self):
            yield [Endpoint("f:1")]
            raise ZeroDivisionError

    announced = ScriptedDiscovery()
    found = CombinedDiscovery({"static": StaticDiscovery(["s:1"]), "test": Failing(), "told": announced})
    seen: list[list[str]] = []

    async def follow() -> None:
        async for view in found.watch():
            seen.append([each.address for each in view])

    task = asyncio.create_task(follow())
    await until(lambda: bool(seen) and seen[-1] == ["s:1", "f:1"])
    announced.publish(Endpoint("t:1", ready=False), Endpoint("u:1", terminating=True), Endpoint("s:1"))
    await until(lambda: seen[-1] == ["s:1", "f:1", "t:1", "u:1"])
    counts = {
        state: REGISTRY.get_sample_value("quire_discovery_engines", {"source": "told", "state": state})
        for state in ("ready", "not_ready", "terminating")
    }
    assert counts == {"ready": 1, "not_ready": 1, "terminating": 1}
    assert "engine source of test failed; restarting it" in caplog.text
    task.cancel()
    await asyncio.wait([task])
    names = {each.get_name() for each in asyncio.all_tasks()}
    assert not any(name.startswith("engines of") for name in names)
