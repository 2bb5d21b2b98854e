"""Which pod goes first when there are too many engines: what its end would cost, who writes that, and how often."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2, types_pb2
from quire_router.autoscale import pod_deletion_cost
from quire_router.autoscale.pod_deletion_cost import (
    ANNOTATION,
    BUSY,
    HALF_LIFE,
    CostChanges,
    EngineValue,
    PodDeletionCosts,
)
from quire_router.clients import kube_lease
from quire_router.clients.kube_client import ClusterError, KubeAccess, kube_client
from quire_router.clients.kube_lease import DURATION, KubeLease
from quire_router.core.retry import supervise

from tests.kube.helm_api import Cluster, HelmApi, Key
from tests.support.engines_in_pods import fleet
from tests.support.waiting import until

IDLE = EngineValue("default/a", requests=0, held=0.0, cached=1.0, idle=0.0)
SECONDS = st.floats(0, 1e6)


# What an end costs


@given(held=SECONDS, cached=SECONDS, idle=SECONDS)
def test_who_runs_nothing_goes_before_who_runs_something(held: float, cached: float, idle: float) -> None:
    busy = EngineValue("default/b", requests=1, held=held, cached=0.0, idle=0.0)
    assert 0 <= replace(IDLE, cached=cached, idle=idle).cost < BUSY <= busy.cost < 2**31


@given(cached=SECONDS, more=SECONDS, idle=SECONDS, longer=SECONDS)
def test_what_is_cached_costs_and_what_nobody_asks_for_costs_less(
    cached: float, more: float, idle: float, longer: float
) -> None:
    value = replace(IDLE, cached=cached, idle=idle)
    assert replace(value, cached=cached + more).cost >= value.cost
    assert replace(value, idle=idle + longer).cost <= value.cost


def test_a_class_is_for_twice_as_much_as_the_one_below() -> None:
    assert [replace(IDLE, cached=cached).cost for cached in (0.0, 0.01, 0.015, 0.02, 0.03, 0.05)] == [0, 0, 1, 1, 2, 3]
    assert replace(IDLE, idle=HALF_LIFE).cost == replace(IDLE, cached=0.5).cost == IDLE.cost - 1


def test_only_what_changed_is_written_the_cheapest_first() -> None:
    changes = CostChanges()
    wanted = {f"default/{number}": number for number in (5, 3, 0, 9)}
    assert changes.next(wanted, most=2) == [("default/0", 0), ("default/3", 3)]
    for pod, cost in wanted.items():
        changes.on_written(pod, cost)
    assert not changes.next(wanted)
    assert changes.next({**wanted, "default/9": 10, "default/0": 7}) == [("default/0", 7), ("default/9", 10)]
    changes.next({"default/9": 9})  # the others are gone, and one comes back
    assert changes.next({"default/9": 9, "default/3": 3}) == [("default/3", 3)]
    changes.forget_all()
    assert changes.next({"default/9": 9}) == [("default/9", 9)]


# Who writes it


class Kubernetes:
    """A cluster that routers can reach, with a Lease and some pods."""

    def __init__(self, api: HelmApi, folder: Path) -> None:
        self.cluster = Cluster()
        self.access = KubeAccess(str(folder / "kubeconfig"))
        (folder / "kubeconfig").write_text(api.add(self.cluster))
        self.create("coordination.k8s.io/v1", "Lease", "marks")

    def create(self, api_version: str, kind: str, name: str) -> None:
        self.cluster.create(self.cluster.kind(api_version, kind), "default", {"metadata": {"name": name}})

    @property
    def holder(self) -> str:
        return str(self.cluster.objects[Key("Lease", "default", "marks")].get("spec", {}).get("holderIdentity", ""))

    def cost(self, pod: str) -> str | None:
        annotations: dict[str, str] = self.cluster.objects[Key("Pod", "default", pod)]["metadata"].get(
            "annotations", {}
        )
        return annotations.get(ANNOTATION)

    @property
    def writes(self) -> list[str]:
        """The pods that were written, since it was asked last."""
        paths = [path for method, path in self.cluster.requests if method == "PATCH" and "/pods/" in path]
        self.cluster.requests.clear()
        return [path.rpartition("/")[2] for path in paths]


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    with HelmApi() as api:
        yield Kubernetes(api, tmp_path)


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kube_lease, "monotonic", clock)
    return clock


async def test_one_holds_the_lease_until_it_does_not_renew_it(kubernetes: Kubernetes, clock: Clock) -> None:
    first, second = (KubeLease("default", "marks", name) for name in ("first", "second"))
    async with kube_client(kubernetes.access) as client:
        assert await first.acquire(client)
        for _ in range(3):
            clock.now += 0.7 * DURATION
            assert not await second.acquire(client)
            assert await first.acquire(client)
            assert (first.held, second.held) == (True, False)
        assert not await second.acquire(client)
        clock.now += DURATION
        assert not first.held  # which it knows by itself
        assert await second.acquire(client)
        assert not await first.acquire(client)
    assert kubernetes.holder == "second"


async def test_a_lease_that_was_released_is_taken_at_once(kubernetes: Kubernetes, clock: Clock) -> None:
    first, second = (KubeLease("default", "marks", name) for name in ("first", "second"))
    async with kube_client(kubernetes.access) as client:
        assert await first.acquire(client)
        assert not await second.acquire(client)
        await first.release(client)
        assert not first.held
        assert await second.acquire(client)
        await first.release(client)  # which is not its own
    assert kubernetes.holder == "second"


async def test_of_two_that_take_it_at_once_one_gets_it(
    kubernetes: Kubernetes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (KubeLease("default", "marks", name) for name in ("first", "second"))
    read = kube_lease._read

    async def read_late(client: Any, *where: str) -> Any:
        lease = await read(client, *where)
        monkeypatch.setattr(kube_lease, "_read", read)
        assert await second.acquire(client)  # between reading and writing
        return lease

    monkeypatch.setattr(kube_lease, "_read", read_late)
    async with kube_client(kubernetes.access) as client:
        assert not await first.acquire(client)
    assert (first.held, second.held) == (False, True)


async def test_a_lease_that_is_not_there_is_named(kubernetes: Kubernetes) -> None:
    async with kube_client(kubernetes.access) as client:
        with pytest.raises(ClusterError, match="Lease other cannot be read: 404"):
            await KubeLease("default", "other", "first").acquire(client)


# What is written


async def test_pods_are_marked_by_who_has_the_lease_and_again_where_it_changed(kubernetes: Kubernetes) -> None:
    for pod in "abd":
        kubernetes.create("v1", "Pod", pod)
    async with (
        fleet(["default/a", "default/b", "default/d"]) as (pool, index),
        kube_client(kubernetes.access) as client,
    ):
        first, second = (PodDeletionCosts(pool, index, "marks", name, kubernetes.access) for name in ("1", "2"))
        leases = [KubeLease("default", "marks", name) for name in ("1", "2")]
        await first.update(client, leases[0])
        await second.update(client, leases[1])
        assert kubernetes.writes == ["a", "b", "d"]
        costs = [int(kubernetes.cost(pod) or -1) for pod in "abd"]
        assert 0 < costs[0] < costs[1] < costs[2] < BUSY
        await first.update(client, leases[0])
        assert kubernetes.writes == []

        busy = next(engine.id for engine in pool.engines() if engine.endpoint.pod == "default/a")
        message = engine_pb2.Submit(
            request_id="r", prompt_token_ids=[1], sampling=types_pb2.SamplingParams(max_tokens=9)
        )
        with pool.dispatch(busy, message, pending_tokens=1):
            await first.update(client, leases[0])
            assert kubernetes.writes == ["a"]
            assert int(kubernetes.cost("a") or -1) >= BUSY
        await leases[0].release(client)
        await second.update(client, leases[1])  # it does not know what was written
        assert kubernetes.writes == ["a", "b", "d"]
        assert [int(kubernetes.cost(pod) or -1) for pod in "abd"] == costs


async def test_a_pod_that_is_gone_holds_up_no_other(kubernetes: Kubernetes) -> None:
    kubernetes.create("v1", "Pod", "b")
    async with fleet(["default/a", "default/b"]) as (pool, index), kube_client(kubernetes.access) as client:
        costs = PodDeletionCosts(pool, index, "marks", "1", kubernetes.access)
        await costs.update(client, KubeLease("default", "marks", "1"))
    assert kubernetes.cost("b") is not None


async def test_a_pod_that_cannot_be_marked_holds_up_no_other(
    kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes.create("v1", "Pod", "b")
    tried: list[str] = []
    write = PodDeletionCosts._write

    async def refuse_a(costs: PodDeletionCosts, client: Any, pod: str, cost: int) -> None:
        tried.append(pod)
        if pod == "default/a":
            raise ClusterError("the pod default/a cannot be marked: 403 Forbidden")
        await write(costs, client, pod, cost)

    monkeypatch.setattr(PodDeletionCosts, "_write", refuse_a)
    async with fleet(["default/a", "default/b"]) as (pool, index), kube_client(kubernetes.access) as client:
        costs = PodDeletionCosts(pool, index, "marks", "1", kubernetes.access)
        lease = KubeLease("default", "marks", "1")
        for _ in range(2):
            with pytest.raises(ClusterError, match="403"):
                await costs.update(client, lease)
    assert tried == ["default/a", "default/b", "default/a"]
    assert kubernetes.cost("b") is not None


def test_pods_that_cannot_be_marked_are_tried_after_all_others() -> None:
    changes, wanted = CostChanges(), {"default/a": 0, "default/b": 1, "default/c": 2}
    changes.on_refused("default/a")
    assert [pod for pod, _ in changes.next(wanted, most=2)] == ["default/b", "default/c"]
    changes.on_written("default/a", 5)
    assert next(iter(changes.next(wanted))) == ("default/a", 0)


async def test_an_engine_that_leaves_is_not_expected_to_have_anything_cached(kubernetes: Kubernetes) -> None:
    async with fleet(["default/a", "default/b"]) as (pool, index):
        rows = {engine.endpoint.pod: engine.row for engine in pool.engines()}
        left = next(engine for engine in pool.engines() if engine.endpoint.pod == "default/b")
        left.update(replace(left.endpoint, terminating=True))
        pool._registry.remove_if_idle(left)
        assert (index.num_blocks(rows["default/a"]), index.num_blocks(rows["default/b"])) == (100, 0)


async def test_a_router_that_may_not_mark_pods_says_so_once(
    kubernetes: Kubernetes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_deletion_cost, "PERIOD", 0.02)
    async with fleet(["default/a"]) as (pool, index):
        costs = PodDeletionCosts(pool, index, "other", "1", kubernetes.access)
        task = supervise("deletion costs", costs.run, vital=False)
        await until(lambda: len(kubernetes.cluster.requests) > 3)
        await task.stop()
    said = [record.getMessage() for record in caplog.records if "pod should go first" in record.getMessage()]
    assert said == [said[0]]
    assert "the Lease other cannot be read: 404 Not Found" in said[0]
