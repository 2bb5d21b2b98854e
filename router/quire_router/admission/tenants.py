"""Tenants: what each may use, its weight and priority among the others, and what an API key must look like."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MIN_KEY_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's part of the service.

    ``id`` is its name, or derived from its key. It may use ``models``, all of them if that is empty. Its share of a
    queue is its ``weight`` relative to the other tenants that wait. ``priority`` is that of its requests, smaller
    first; with ``allow_priority`` they may add their own to it. A limit is None if there is none: those a minute hold
    for all routers together, as does ``max_concurrent``, which counts the requests that wait and that run;
    ``max_queued`` bounds those that wait for one model at one router. ``retention`` is for how many seconds a request
    is stored after its end; None for the router's own setting.
    """

    id: str = ""
    models: frozenset[str] = frozenset()
    weight: float = 1.0
    priority: int = 0
    allow_priority: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_queued: int | None = None
    retention: float | None = None

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has any limit that admission has to count."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)

    def may_use(self, model: str) -> bool:
        """Returns whether the tenant may use this model."""
        return not self.models or model in self.models


class Tenants:
    """The configured tenants by their ids; every other tenant has the limits of ``default``, each for itself."""

    def __init__(self, tenants: Iterable[Tenant] = (), default: Tenant | None = None) -> None:
        self._tenants = {tenant.id: tenant for tenant in tenants}
        self._default = default or Tenant()

    def get(self, tenant_id: str) -> Tenant:
        """Returns the tenant with this id."""
        tenant = self._tenants.get(tenant_id)
        return tenant if tenant is not None else replace(self._default, id=tenant_id)


def check_key(key: str) -> str:
    """Returns the key. Raises ``ValueError``, which does not contain it, if it is too short or no header value."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key must have at least {MIN_KEY_CHARACTERS} printable ASCII characters and no spaces, "
            "such as `openssl rand -hex 32` prints"
        )
    return key
