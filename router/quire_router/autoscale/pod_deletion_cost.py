"""Which engine's pod goes first when their number falls: ``PodDeletionCosts`` writes what the end of each would cost
into its annotation ``controller.kubernetes.io/pod-deletion-cost``, by which a ReplicaSet chooses.

Kubernetes asks not to write it often, so costs are classes, twice as large from one to the next; only what has another
one is written, the cheapest pods first, and so many in a period. One router writes at a time: that which has the Lease.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, log2
from time import monotonic
from typing import TYPE_CHECKING

from quire_router.clients.kube_client import ClusterError, KubeAccess, kube_client, own_namespace
from quire_router.clients.kube_lease import MERGE_PATCH, KubeLease

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

    from quire_router.engines.engine import Engine
    from quire_router.engines.pool import EnginePool
    from quire_router.placement.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
PERIOD = 10.0  # seconds: a third of the Lease's
MAX_WRITES = 20  # in a period
BUSY = 1_000
"""Class of the cheapest engine that runs something: above all that run nothing, whose clients no one keeps waiting."""

HALF_LIFE = 300.0
"""Seconds after which half of what an idle engine has cached is not expected to be asked for again."""

_LEAST = 0.01  # seconds of computing
_TIMEOUT = 10.0  # seconds for what is written at once
_NOT_FOUND = 404
_MAX_PROBLEM = 200  # characters that are logged


@dataclass(frozen=True, slots=True)
class EngineValue:
    """What ends with the engine in ``pod`` (``NAMESPACE/NAME``): ``requests`` that run or wait there, ``held`` seconds
    of computing in what they hold, and ``cached`` seconds in its prefix cache, that did nothing for ``idle`` seconds.
    """

    pod: str
    requests: int
    held: float
    cached: float
    idle: float

    @property
    def cost(self) -> int:
        """Its class."""
        if self.requests:
            return BUSY + _class(self.held)
        return _class(self.cached * 0.5 ** (self.idle / HALF_LIFE))


def _class(seconds: float) -> int:
    """0 for a hundredth of a second or less, and one more for each doubling."""
    return 0 if seconds <= _LEAST else ceil(log2(seconds / _LEAST))


def value_of(engine: "Engine", pool: "EnginePool", index: "PrefixIndex", now: float) -> EngineValue | None:
    """What ends with an engine; None where it is in no pod, or nothing is known of it now."""
    pod, row, table = engine.endpoint.pod, engine.row, pool.table
    if pod is None or engine.retired or not engine.connection.ready:
        return None
    token_seconds = float(table.token_seconds[row] + table.step_seconds[row] / table.step_tokens[row])
    block_seconds = float(table.block_size[row]) * token_seconds
    used = float(table.blocks_total[row] - table.blocks_free[row])
    work = engine.in_flight + table.requests[row] + table.decoding[row] + table.waiting[row] + table.swapped[row]
    return EngineValue(
        pod,
        requests=int(work),
        held=used * block_seconds + float(table.pending_tokens[row]) * token_seconds,
        cached=index.num_blocks(row) * block_seconds,
        idle=max(0.0, now - float(table.stepped[row])),
    )


class CostChanges:
    """The costs that were written, and which ones to write."""

    def __init__(self) -> None:
        self._written: dict[str, int] = {}
        self._refused: set[str] = set()

    def forget_all(self) -> None:
        """Somebody else may have written others."""
        self._written.clear()

    def on_written(self, pod: str, cost: int) -> None:
        """A pod has this cost now."""
        self._written[pod] = cost
        self._refused.discard(pod)

    def on_refused(self, pod: str) -> None:
        """A pod could not be written: it is tried again after all others."""
        self._refused.add(pod)

    def next(self, wanted: Mapping[str, int], most: int = MAX_WRITES) -> list[tuple[str, int]]:
        """Returns the pods whose cost is another one, at most so many. Those go first that are, or would be taken for,
        the cheapest: a fall of the number takes these. Forgets pods that are gone.
        """
        self._written = {pod: cost for pod, cost in self._written.items() if pod in wanted}
        self._refused.intersection_update(wanted)
        changed = [(pod, cost) for pod, cost in wanted.items() if self._written.get(pod) != cost]
        # A pod without the annotation costs 0.
        changed.sort(key=lambda change: (min(change[1], self._written.get(change[0], 0)), change[1], change[0]))
        changed.sort(key=lambda change: change[0] in self._refused)
        return changed[:most]


class PodDeletionCosts:
    """Writes the costs of the pods of ``pool``'s engines for as long as this router, ``holder``, has the Lease."""

    def __init__(self, pool: "EnginePool", index: "PrefixIndex", lease: str, holder: str, access: KubeAccess) -> None:
        self._pool = pool
        self._index = index
        self._name = lease
        self._holder = holder
        self._access = access
        self._changes = CostChanges()
        self._problem = ""

    async def run(self) -> None:
        """Takes part in it until it is cancelled, and leaves the Lease to others then."""
        from aiohttp import ClientError
        from kubernetes.aio.config import ConfigException

        lease = KubeLease(own_namespace(self._access), self._name, self._holder)
        try:
            while True:
                try:
                    async with asyncio.timeout(_TIMEOUT), kube_client(self._access) as client:
                        await self.update(client, lease)
                    self._problem = ""
                except (ClusterError, ConfigException, ClientError, OSError, ValueError) as error:  # or a TimeoutError
                    self._on_problem(str(error) or type(error).__name__)
                await asyncio.sleep(PERIOD)
        finally:
            if lease.held:
                with suppress(Exception):
                    async with asyncio.timeout(1.0), kube_client(self._access) as client:
                        await lease.release(client)

    async def update(self, client: "ApiClient", lease: KubeLease) -> None:
        """Writes what has changed, if this router has the Lease. A pod that cannot be written holds up no other: its
        problem, a ``ClusterError``, is raised when all were tried. Raises also what the client's libraries raise.
        """
        had = lease.held
        if not await lease.acquire(client):
            return
        if not had:
            self._changes.forget_all()
        problem: ClusterError | None = None
        for pod, cost in self._changes.next(self._wanted()):
            if not lease.held:
                break
            try:
                await self._write(client, pod, cost)
            except ClusterError as error:
                self._changes.on_refused(pod)
                problem = error
        if problem is not None:
            raise problem

    def _wanted(self) -> dict[str, int]:
        now = monotonic()
        values = (value_of(engine, self._pool, self._index, now) for engine in self._pool.engines())
        return {value.pod: value.cost for value in values if value is not None}

    async def _write(self, client: "ApiClient", pod: str, cost: int) -> None:
        from kubernetes.aio.client import CoreV1Api

        namespace, _, name = pod.partition("/")
        body = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        call = CoreV1Api(client).patch_namespaced_pod_without_preload_content
        async with await call(name, namespace, body, _content_type=MERGE_PATCH) as response:
            if response.status not in (200, _NOT_FOUND):  # one that is gone will be gone from the fleet soon
                raise ClusterError(f"the pod {pod} cannot be marked: {response.status} {response.reason}")
        self._changes.on_written(pod, cost)

    def _on_problem(self, problem: str) -> None:
        problem = " ".join(problem.split())[:_MAX_PROBLEM]
        level = logging.DEBUG if problem == self._problem else logging.WARNING
        log.log(level, "which pod should go first when there are too many cannot be written: %s", problem)
        self._problem = problem
