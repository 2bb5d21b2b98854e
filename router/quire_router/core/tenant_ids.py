"""Ids of tenants that no file names: they are derived from a key, or from the claim of a token, and have 16 bytes.
Formerly they were the first 6 of these, and what is stored under such an id is still its tenant's until it expires.
"""

import re
from typing import Final

ID_BYTES: Final = 16
FORMER_BYTES: Final = 6
OIDC: Final = "oidc-"
_DERIVED = re.compile(rf"({OIDC})?[0-9a-f]{{{2 * FORMER_BYTES}}}([0-9a-f]{{{2 * (ID_BYTES - FORMER_BYTES)}}})?")


def is_derived(tenant: str) -> bool:
    """Returns whether an id looks like one that is derived, now or formerly: no tenant of a file may have it."""
    return _DERIVED.fullmatch(tenant) is not None


def former_id(tenant: str) -> str:
    """Returns the id that a tenant had before; empty if it is the same."""
    found = _DERIVED.fullmatch(tenant)
    return tenant[: found.start(2)] if found is not None and found.group(2) else ""


def ids_of(tenant: str) -> tuple[str, ...]:
    """Returns the ids that a tenant has things stored under, the present one first."""
    former = former_id(tenant)
    return (tenant, former) if former else (tenant,)


def owns(tenant: str, owner: str) -> bool:
    """Returns whether what ``owner`` has stored is the tenant's."""
    return owner in ids_of(tenant)
