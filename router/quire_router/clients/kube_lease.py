"""``KubeLease``: which one of several routers does what one is to do, by a Lease of Kubernetes, as client-go elects its
leaders.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from quire_router.clients.kube_client import ClusterError

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

CONFLICT = 409
MERGE_PATCH = "application/merge-patch+json"
DURATION = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the Lease said when it last changed, and when that was seen."""

    holder: str
    renewed: str
    at: float


class KubeLease:
    """The Lease ``name``, which has to be there, for ``holder``. ``holder`` has it if it says so and was renewed within
    ``DURATION``. No clock is compared with another machine's: how long it has not changed is measured by those who
    want it.
    """

    def __init__(self, namespace: str, name: str, holder: str) -> None:
        self.namespace = namespace
        self.name = name
        self._holder = holder
        self._seen: _Seen | None = None
        self._held_until = 0.0

    @property
    def held(self) -> bool:
        """Whether it is certain that nobody else has it."""
        return monotonic() < self._held_until

    async def acquire(self, client: "ApiClient") -> bool:
        """Renews it, or takes it where nobody has it. Returns whether ``holder`` has it. Raises ``ClusterError``, and
        what the client's libraries raise.
        """
        lease = await _read(client, self.namespace, self.name)
        began, spec = monotonic(), lease.get("spec") or {}
        holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
        if self._seen is None or (self._seen.holder, self._seen.renewed) != (holder, renewed):
            self._seen = _Seen(holder, renewed, began)
        if holder not in ("", self._holder) and began < self._seen.at + DURATION:
            return False
        changes: dict[str, Any] = {"holderIdentity": self._holder, "renewTime": _now()}
        if holder != self._holder:
            changes |= {
                "acquireTime": changes["renewTime"],
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1,
            }
        if await self._write(client, lease, changes | {"leaseDurationSeconds": round(DURATION)}):
            self._held_until = began + DURATION
            return True
        return False

    async def release(self, client: "ApiClient") -> None:
        """Leaves it to the next one that wants it. Raises as ``acquire``."""
        self._held_until = 0.0
        lease = await _read(client, self.namespace, self.name)
        if (lease.get("spec") or {}).get("holderIdentity") == self._holder:
            await self._write(client, lease, {"holderIdentity": ""})

    async def _write(self, client: "ApiClient", lease: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
        """Changes the Lease that was read. Returns False where somebody else has changed it since."""
        from kubernetes.aio.client import CoordinationV1Api

        body = {"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": dict(spec)}
        call = CoordinationV1Api(client).patch_namespaced_lease_without_preload_content
        async with await call(self.name, self.namespace, body, _content_type=MERGE_PATCH) as response:
            if response.status == CONFLICT:
                return False
            if response.status != 200:
                raise ClusterError(f"the Lease {self.name} cannot be changed: {response.status} {response.reason}")
            return True


async def _read(client: "ApiClient", namespace: str, name: str) -> Mapping[str, Any]:
    from kubernetes.aio.client import CoordinationV1Api

    call = CoordinationV1Api(client).read_namespaced_lease_without_preload_content
    async with await call(name, namespace) as response:
        if response.status != 200:
            raise ClusterError(f"the Lease {name} cannot be read: {response.status} {response.reason}")
        lease: Mapping[str, Any] = json.loads(await response.read())
        return lease


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
