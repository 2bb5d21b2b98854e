"""``FleetSecret``: 32 bytes that all routers of a fleet share and nobody else knows, which key what follows from names
that others could guess. They are in the journal's database, so that they outlive each router.
"""

import asyncio
from secrets import token_bytes
from typing import Final

from quire_proto.errors import QuireError

from quire_router.core.retry import wait_at_most
from quire_router.journal.objects import ObjectStore

SECRET_BYTES: Final = 32
NAME: Final = "fleet-secret"
_TTL = 10 * 365 * 86_400.0  # seconds; each router that runs writes it again where it is gone
_PERIOD, _RETRY_PERIOD = 10.0, 1.0  # seconds between two looks, and until the next after a failure
_MOST_WAIT = 1.0  # seconds that a request waits for the database's answer


class FleetSecret:
    """The secret in ``store``. Until that has answered, ``value`` is one of this router alone."""

    def __init__(self, store: ObjectStore) -> None:
        self.value = token_bytes(SECRET_BYTES)
        self._store = store
        self._agreed = asyncio.Event()

    async def shared(self) -> bytes:
        """Returns the secret, for which it waits a second at most after the start."""
        if not self._agreed.is_set():
            await wait_at_most(self._agreed, _MOST_WAIT)
        return self.value

    async def run(self) -> None:
        """Keeps it the fleet's; never ends. A database that lost it gets it again from the first router that looks."""
        while True:
            has_agreed = await self.agree()
            await asyncio.sleep(_PERIOD if has_agreed else _RETRY_PERIOD)

    async def agree(self) -> bool:
        """Takes over the fleet's secret, or makes this one the fleet's. Returns False where the database is away."""
        try:
            found = await self._store.get(NAME)
            if found is None and not await self._store.put(NAME, self.value, 0, _TTL):
                found = await self._store.get(NAME)
        except QuireError:
            return False
        if found is not None and len(found.data) == SECRET_BYTES:
            self.value = found.data
        self._agreed.set()
        return True
