"""What one tenant may use, and how it stands beside others. Plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's part of the service.

    ``id`` is its name, or what its key gives. It may use ``models``, all of them when that is empty. Its share of a
    queue is its ``weight`` among those who wait. ``priority`` is that of its requests, smaller first; with
    ``allow_priority`` they may add their own to it. Limits are None where there is none: those a minute hold for the
    whole fleet, as does ``max_concurrent``, which counts what waits and what runs; ``max_queued`` is what may wait for
    one model at one router. ``retention`` is for how many seconds what was asked is remembered after its end; None for
    as long as the router says.
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
        """Whether admission has to count anything."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)

    def may_use(self, model: str) -> bool:
        """Whether its keys open this model."""
        return not self.models or model in self.models


class Tenants:
    """The configured tenants by their ids; everyone else has the limits of ``default``, each for itself."""

    def __init__(self, tenants: Iterable[Tenant] = (), default: Tenant | None = None) -> None:
        self._tenants = {tenant.id: tenant for tenant in tenants}
        self._default = default or Tenant()

    def get(self, tenant_id: str) -> Tenant:
        """What holds for this tenant."""
        tenant = self._tenants.get(tenant_id)
        return tenant if tenant is not None else replace(self._default, id=tenant_id)


# What an API key must look like.


MIN_KEY_CHARACTERS = 16


def check_key(key: str) -> str:
    """The key. Raises ``ValueError``, without it, when it is too short to be one or cannot stand in a header."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key must have at least {MIN_KEY_CHARACTERS} printable ASCII characters and no spaces, "
            "such as `openssl rand -hex 32` prints"
        )
    return key
