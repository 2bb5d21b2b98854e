"""Conversion between the core's types and protobuf."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from quire.v1 import engine_pb2 as pb
from quire_proto.convert import (
    error_to_proto,
    finish_to_proto,
    logprobs_to_proto,
    pooling_from_proto,
    sampling_from_proto,
    stop_token_to_proto,
)
from quire_proto.errors import QuireError, invalid
from quire_proto.priority import BEST_EFFORT, SHADOW
from quire_proto.sampling import FinishReason

from quire_engine.core.block_pool import BlockStored, KVCacheEvent, Tier
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad
from quire_engine.core.request import Request, ResumedOutput
from quire_engine.core.step_time_model import Pace

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PROMPT_LOGPROBS_PER_MESSAGE = 1024  # prompt tokens; at most 0.25 MiB
_TIER = {Tier.DEVICE: pb.KV_TIER_DEVICE, Tier.HOST: pb.KV_TIER_HOST}


def request_from_proto(message: pb.Submit, key: str) -> Request:
    """Returns the request under the core's ``key``, with id and parameters checked, without its adapter. Raises
    ``QuireError`` INVALID.
    """
    if not _REQUEST_ID.fullmatch(message.request_id):
        raise invalid("request_id", "A request id is 1 to 64 letters, digits, dashes or underscores.")
    return Request(
        request_id=key,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        output_token_ids=tuple(message.output_token_ids),
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        tracestate=message.tracestate,
        resumed_outputs=tuple(
            ResumedOutput(each.index, tuple(each.token_ids), each.finished) for each in message.delivered
        ),
        priority=SHADOW if message.shadow and message.priority == BEST_EFFORT else message.priority,
        pooling=pooling_from_proto(message.pooling) if message.HasField("pooling") else None,
    )


def output_to_proto(output: EngineCoreOutput, request_id: str) -> list[pb.SequenceOutput]:
    """Returns the messages for one choice's output of a step, under the router's request id. Many prompt
    log-probabilities need several messages; the last one has everything else.
    """
    starts = range(0, len(output.prompt_logprobs), PROMPT_LOGPROBS_PER_MESSAGE)
    *earlier, last = [_prompt_logprobs_message(output, request_id, start) for start in starts or [0]]
    last.token_ids.extend(output.token_ids)
    last.position = output.position
    last.finish_reason = finish_to_proto(output.finish_reason)
    last.cached_tokens = output.cached_tokens
    last.logprobs.extend(map(logprobs_to_proto, output.logprobs))
    last.pooled = output.pooled
    if output.score is not None:
        last.score = output.score
    if output.stop_token is not None:
        last.stop_token.CopyFrom(stop_token_to_proto(output.stop_token))
    if output.error is not None:
        last.error.CopyFrom(error_to_proto(output.error))
    return [*earlier, last]


def is_tokens(output: EngineCoreOutput) -> bool:
    """Whether an output has only tokens, so that each can be a line of ``TokenColumns``."""
    return (
        bool(output.token_ids)
        and output.finish_reason is None
        and not output.logprobs
        and not output.prompt_logprobs
        and output.score is None
    )


def refusal_to_proto(request_id: str, error: QuireError) -> list[pb.SequenceOutput]:
    """Returns the output that refuses a request which was not sent to the core."""
    return output_to_proto(EngineCoreOutput("", finish_reason=FinishReason.ERROR, error=error), request_id)


def abort_to_proto(request_id: str, request: Request) -> list[pb.SequenceOutput]:
    """Returns the final outputs of all choices of a request that was cancelled before it was sent to the core."""
    resumed = {delivered.index: delivered for delivered in request.all_resumed_outputs}
    outputs: list[pb.SequenceOutput] = []
    for index in range(request.sampling.num_returned):
        delivered = resumed.get(index, ResumedOutput(index, ()))
        if not delivered.finished:
            end = EngineCoreOutput("", position=len(delivered.token_ids), index=index, finish_reason=FinishReason.ABORT)
            outputs += output_to_proto(end, request_id)
    return outputs


def pool_to_proto(states: bytes, max_cells: int) -> pb.KvPool:
    """Returns a pool whose blocks have these ``BlockPool.block_states``, in at most ``max_cells`` cells. A cell of
    several blocks has the state of most of them; ties go to the higher state.
    """
    size = -(-len(states) // max_cells) or 1
    counts = [states.count(state) for state in range(4)]
    cells = states
    if size > 1:
        parts = (states[start : start + size] for start in range(0, len(states), size))
        cells = bytes([max((part.count(state), state) for state in range(4))[1] for part in parts])
    return pb.KvPool(total=len(states), used=counts[2] + counts[3], cached=counts[1], cells=cells, blocks_per_cell=size)


def load_to_proto(load: EngineLoad) -> pb.Load:
    """Returns the load, with its ``pace`` unless that is None."""
    return pb.Load(
        running=load.running,
        waiting=load.waiting,
        swapped=load.swapped,
        uncomputed_tokens=load.uncomputed_tokens,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        host_blocks_total=load.host_blocks_total,
        host_blocks_free=load.host_blocks_free,
        pace=None if load.pace is None else _pace_to_proto(load.pace),
        prompt_tokens_per_step=load.prompt_tokens_per_step,
        best_effort=load.best_effort,
        sleep_state=pb.SLEEP_STATE_ASLEEP if load.is_sleeping else pb.SLEEP_STATE_AWAKE,
    )


def events_to_proto(events: Iterable[KVCacheEvent]) -> list[pb.KvEvent]:
    """Returns changes of the prefix cache, in order. Consecutive changes of one kind and tier are one message."""
    return [
        changes_to_proto(kind, tier, [event.block_hash for event in alike])
        for (kind, tier), alike in groupby(events, key=lambda event: (type(event), event.tier))
    ]


def changes_to_proto(kind: type[KVCacheEvent], tier: Tier, hashes: Sequence[bytes]) -> pb.KvEvent:
    """Returns the message for blocks of one tier that were all stored, or all removed."""
    if kind is BlockStored:
        return pb.KvEvent(stored=pb.KvStored(block_hashes=hashes, tier=_TIER[tier]))
    return pb.KvEvent(removed=pb.KvRemoved(block_hashes=hashes, tier=_TIER[tier]))


def cached_to_proto(stored: Sequence[BlockStored]) -> list[pb.KvStored]:
    """Returns all cached blocks, one message for each tier that has any."""
    hashes = {tier: [each.block_hash for each in stored if each.tier is tier] for tier in Tier}
    return [pb.KvStored(block_hashes=cached, tier=_TIER[tier]) for tier, cached in hashes.items() if cached]


def _pace_to_proto(pace: Pace) -> pb.Pace:
    return pb.Pace(
        step_seconds=pace.step_seconds,
        token_seconds=pace.token_seconds,
        sequence_seconds=pace.sequence_seconds,
        host_block_seconds=pace.host_block_seconds,
    )


def _prompt_logprobs_message(output: EngineCoreOutput, request_id: str, start: int) -> pb.SequenceOutput:
    logprobs = output.prompt_logprobs[start : start + PROMPT_LOGPROBS_PER_MESSAGE]
    return pb.SequenceOutput(
        request_id=request_id,
        index=output.index,
        prompt_logprobs=map(logprobs_to_proto, logprobs),
        prompt_position=output.prompt_position + start if logprobs else 0,
    )
