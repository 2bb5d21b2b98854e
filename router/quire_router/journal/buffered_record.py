"""What readers get of a request that has ended at this router, while the database does not have its end: the record as
it is about to be written.
"""

from quire_router.journal.base import RequestRecord
from quire_router.journal.codec import encode_request, encode_usage, pack_tokens
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.token_log import TokenLogReader, log_checksum, read_log
from quire_router.journal.write_buffer import BufferedRequest


async def read_buffered(request: BufferedRequest, *, tokens_only: bool) -> RequestRecord:
    """The record of a request that has ended here, as it is about to be written."""
    assert request.end is not None
    reader = TokenLogReader(request.generation.params.n, tokens_only=tokens_only)
    deltas, _ = await read_log(reader, request.log.values)
    return RequestRecord(
        generation=request.generation,
        owner=request.lease.owner,
        epoch=request.lease.epoch,
        deltas=deltas,
        finish_reason=request.end.reason,
        error=request.end.error,
        usage=request.end.usage,
        version=request.version,
    )


async def read_buffered_update(request: BufferedRequest, offset: int) -> RawRecordUpdate:
    """As ``RecordStore.read_update``, of a request that has ended here."""
    assert request.end is not None
    packed, end = pack_tokens(request.log.values), request.end
    fields = {
        b"request": encode_request(request.generation),
        b"epoch": b"%d" % request.lease.epoch,
        b"reason": end.reason.value.encode(),
        b"error": end.error.encode("utf-8", "surrogatepass"),
        b"usage": encode_usage(end.usage).encode(),
        b"sum": b"%d" % await log_checksum(packed),
    }
    return RawRecordUpdate(fields, len(packed), packed[offset:], 0, pending=True)
