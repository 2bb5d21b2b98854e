"""``ResponseQuota``: how many bytes of responses that can be gone on from a tenant may have stored at once. Each has
its whole conversation in its record, so that few requests of much text would fill a database.
"""

from quire_router.admission.limits import counting_refusals
from quire_router.api.prepared_request import PreparedRequest
from quire_router.core.errors import RefusalReason, too_much_stored
from quire_router.journal.objects import RESPONSES, ObjectStore, Quota, account_of

RECORD_BYTES = 2048  # of a record, beside what clients can multiply
BYTES_PER_TOKEN = 4
DEFAULT_RETENTION = 3600.0  # seconds, where neither the tenant nor the router says it


class ResponseQuota:
    """A tenant's stored responses have ``max_bytes`` at most, as they are when they begin: without their answers."""

    def __init__(self, store: ObjectStore, max_bytes: int = 2 * 2**30) -> None:
        self._store = store
        self._quota = Quota(max_bytes=max_bytes)

    async def charge(self, prepared: PreparedRequest) -> None:
        """Counts a response that begins, if it can be gone on from, until its record expires. The same one again counts
        once. Raises ``QuireError`` OVERLOADED if its tenant has too many bytes of them, and UNAVAILABLE.
        """
        first = prepared.first
        if not first.conversation.partition("\n")[2]:
            return
        seconds = DEFAULT_RETENTION if first.retention is None else first.retention
        seconds += first.seconds_left or 0.0
        size = RECORD_BYTES + BYTES_PER_TOKEN * first.stored_size
        if await self._store.charge(account_of(RESPONSES, first.tenant), first.request_id, size, seconds, self._quota):
            message = (
                f"The stored responses of this key would have more than {self._quota.max_bytes} bytes "
                "(--max-tenant-response-bytes): delete some, or send store: false."
            )
            with counting_refusals():
                raise too_much_stored(message, RefusalReason.MAX_RESPONSES)

    async def discharge(self, request_id: str, tenant: str) -> None:
        """A response is not stored, or not any more. Raises ``QuireError`` UNAVAILABLE."""
        await self._store.discharge(account_of(RESPONSES, tenant), request_id)
