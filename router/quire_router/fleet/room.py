"""Whether engines have room for one more request: for anybody's, and for one that leaves room to others."""

from collections.abc import Sequence

from quire_router.fleet.account import EngineLoad

_KEPT_PART = 4
"""One engine in so many is kept clear. In the fleet simulator, one in two hardly helps those any more whom it is kept
for, and makes whom it is kept from wait several times as long.
"""


def has_room(accounts: Sequence[EngineLoad]) -> bool:
    """Whether some engine could begin with a request soon."""
    return any(account.has_capacity for account in accounts)


def has_spare_room(accounts: Sequence[EngineLoad]) -> bool:
    """Whether an engine would have next to no prompts before a request, and a quarter of them none even after it."""
    return sum(account.is_mostly_idle for account in accounts) > len(accounts) // _KEPT_PART
