"""Plain types of the core to protobuf and back. No state."""

import re
from collections.abc import Sequence

from quire.v1 import engine_pb2 as pb
from quire_proto.convert import error_to_proto, finish_to_proto, sampling_from_proto
from quire_proto.errors import QuireError, invalid
from quire_proto.sampling import FinishReason

from quire_engine.kv.events import KvEvent, Stored, Tier
from quire_engine.request import Request
from quire_engine.scheduling.output import Load, Output

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TIER = {Tier.DEVICE: pb.KV_TIER_DEVICE, Tier.HOST: pb.KV_TIER_HOST}


def request_from_proto(message: pb.Submit, key: str) -> Request:
    """The request under the core's ``key``, with id and parameters checked. Raises ``QuireError`` INVALID."""
    if not _REQUEST_ID.fullmatch(message.request_id):
        raise invalid("request_id", "A request id is 1 to 64 letters, digits, dashes or underscores.")
    return Request(
        request_id=key,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        output_token_ids=tuple(message.output_token_ids),
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
    )


def output_to_proto(output: Output, request_id: str) -> pb.SequenceOutput:
    """One request's part of a step, under the id that the router chose."""
    message = pb.SequenceOutput(
        request_id=request_id,
        token_ids=output.token_ids,
        position=output.position,
        finish_reason=finish_to_proto(output.finish_reason),
        cached_tokens=output.cached_tokens,
    )
    if output.error is not None:
        message.error.CopyFrom(error_to_proto(output.error))
    return message


def refusal_to_proto(request_id: str, error: QuireError) -> pb.SequenceOutput:
    """The answer to a request that never reached the core."""
    return output_to_proto(Output("", finish_reason=FinishReason.ERROR, error=error), request_id)


def load_to_proto(load: Load) -> pb.Load:
    """The load, field by field."""
    return pb.Load(
        running=load.running,
        waiting=load.waiting,
        swapped=load.swapped,
        uncomputed_tokens=load.uncomputed_tokens,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        host_blocks_total=load.host_blocks_total,
        host_blocks_free=load.host_blocks_free,
    )


def event_to_proto(event: KvEvent) -> pb.KvEvent:
    """One change of the prefix cache."""
    if isinstance(event, Stored):
        return pb.KvEvent(stored=pb.KvStored(block_hashes=[event.block_hash], tier=_TIER[event.tier]))
    return pb.KvEvent(removed=pb.KvRemoved(block_hashes=[event.block_hash], tier=_TIER[event.tier]))


def cached_to_proto(names: Sequence[bytes]) -> list[pb.KvStored]:
    """Everything on the device that can be hit."""
    return [pb.KvStored(block_hashes=names, tier=pb.KV_TIER_DEVICE)] if names else []
