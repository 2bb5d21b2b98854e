"""Protobuf messages to and from the plain types of this package."""

from quire.v1 import types_pb2 as pb

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason, SamplingParams


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Every field set, as ``Submit`` asks for."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults of ``SamplingParams``. Raises ``QuireError`` where a value is out of range."""
    given = {field.name: value for field, value in message.ListFields() if field.name != "stop_token_ids"}
    return SamplingParams(stop_token_ids=tuple(message.stop_token_ids), **given)


def error_to_proto(error: QuireError) -> pb.Error:
    """The error as it travels beside ``FINISH_REASON_ERROR``."""
    return pb.Error(
        code=pb.ErrorCode.ValueType(error.code),
        message=error.message,
        param=error.param or "",
        retry_after=error.retry_after,
    )


def error_from_proto(message: pb.Error) -> QuireError:
    """The error as it is raised on the receiving side; a code that this version does not know becomes INTERNAL."""
    try:
        code = ErrorCode(message.code)
    except ValueError:
        return internal()
    retry_after = message.retry_after if message.HasField("retry_after") else None
    return QuireError(code, message.message, param=message.param or None, retry_after=retry_after)


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """UNSPECIFIED for an output that goes on."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_from_proto(reason: pb.FinishReason.ValueType) -> FinishReason | None:
    """None for UNSPECIFIED; a reason that this version does not know counts as an error."""
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_PROTO.get(reason, FinishReason.ERROR)


_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}
