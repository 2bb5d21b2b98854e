"""Conversion of this package's types to and from protobuf messages."""

from quire.v1 import types_pb2 as pb

from quire_proto.errors import ErrorCode, QuireError, internal, invalid
from quire_proto.pooling import PoolingParams, Task
from quire_proto.sampling import EarlyStopping, FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind, choice


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """The message with every field set that has a default, as ``Submit`` requires."""
    return pb.SamplingParams(
        stop_token_ids=params.stop_token_ids,
        logit_bias=dict(params.logit_bias),
        bad_words=[pb.TokenIds(ids=word) for word in params.bad_words],
        early_stopping=_EARLY_TO_PROTO[params.early_stopping],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured=None if params.structured is None else structured_to_proto(params.structured),
        **{name: getattr(params, name) for name in _SCALARS},
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields get the defaults of ``SamplingParams``. Raises ``QuireError`` INVALID for a value out of range."""
    given = {field.name: value for field, value in message.ListFields() if field.name in _PLAIN}
    return SamplingParams(
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        early_stopping=_EARLY_FROM_PROTO.get(message.early_stopping, False),
        structured=structured_from_proto(message.structured) if message.HasField("structured") else None,
        **given,
    )


def structured_to_proto(structured: Structured) -> pb.Structured:
    """The same grammar as a message."""
    match structured.kind:
        case StructuredKind.JSON_OBJECT:
            return pb.Structured(json_object=True)
        case StructuredKind.CHOICE:
            return pb.Structured(choice=pb.Choice(options=structured.options))
        case StructuredKind.JSON_SCHEMA:
            return pb.Structured(json_schema=structured.text)
        case StructuredKind.REGEX:
            return pb.Structured(regex=structured.text)
        case StructuredKind.GRAMMAR:
            return pb.Structured(grammar=structured.text)


def structured_from_proto(message: pb.Structured) -> Structured:
    """Raises ``QuireError`` as ``Structured`` does, and if no kind is set."""
    match message.WhichOneof("kind"):
        case "json_object" if message.json_object:
            return Structured(StructuredKind.JSON_OBJECT)
        case None | "json_object":
            raise invalid("structured", "structured says nothing: set one of its fields.")
        case "choice":
            return choice(list(message.choice.options))
        case kind:
            return Structured(StructuredKind(kind), getattr(message, kind))


def pooling_to_proto(params: PoolingParams) -> pb.PoolingParams:
    """The inverse of ``pooling_from_proto``."""
    return pb.PoolingParams(
        task=TASK_TO_PROTO[params.task],
        dimensions=params.dimensions or 0,
        use_activation=params.use_activation,
        second_text_start=params.second_text_start,
    )


def pooling_from_proto(message: pb.PoolingParams) -> PoolingParams:
    """Raises ``QuireError`` INVALID for a value out of range, and for a task that is none of pooling."""
    task = task_from_proto(message.task)
    if task is None:
        raise invalid("task", "The task of a prompt that is pooled must be to embed or to classify.")
    return PoolingParams(
        task=task,
        dimensions=message.dimensions or None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
        second_text_start=message.second_text_start,
    )


def task_from_proto(task: pb.Task.ValueType) -> Task | None:
    """None for UNSPECIFIED, and for a task that this version does not know."""
    return _TASK_FROM_PROTO.get(task)


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """One position's log-probabilities as a message."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    """One position's log-probabilities. Top ids without a log-probability, and the reverse, are dropped."""
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=False)))


def stop_token_to_proto(stop_token: StopToken) -> pb.StopToken:
    """The inverse of ``stop_token_from_proto``."""
    logprobs = None if stop_token.logprobs is None else logprobs_to_proto(stop_token.logprobs)
    return pb.StopToken(token_id=stop_token.token_id, logprobs=logprobs)


def stop_token_from_proto(message: pb.StopToken) -> StopToken:
    """The token that ended an output."""
    known = message.HasField("logprobs")
    return StopToken(message.token_id, logprobs_from_proto(message.logprobs) if known else None)


def error_to_proto(error: QuireError) -> pb.Error:
    """The error as a message, which is sent with ``FINISH_REASON_ERROR``."""
    return pb.Error(
        code=pb.ErrorCode.ValueType(error.code),
        message=error.message,
        param=error.param or "",
        retry_after=error.retry_after,
    )


def error_from_proto(message: pb.Error) -> QuireError:
    """The error of a message. A code that this version does not know becomes INTERNAL."""
    try:
        code = ErrorCode(message.code)
    except ValueError:
        return internal()
    retry_after = message.retry_after if message.HasField("retry_after") else None
    return QuireError(code, message.message, param=message.param or None, retry_after=retry_after)


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """UNSPECIFIED for an output that has not ended."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_from_proto(reason: pb.FinishReason.ValueType) -> FinishReason | None:
    """None for UNSPECIFIED; a reason that this version does not know counts as an error."""
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_PROTO.get(reason, FinishReason.ERROR)


_SCALARS = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "n", "best_of", "beam_width", "length_penalty",
)  # fmt: skip
_PLAIN = {*_SCALARS, "logprobs", "prompt_logprobs"}
_EARLY_TO_PROTO: dict[EarlyStopping, pb.EarlyStopping.ValueType] = {
    False: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_FIRST,
    "never": pb.EARLY_STOPPING_NEVER,
}
_EARLY_FROM_PROTO = {number: meaning for meaning, number in _EARLY_TO_PROTO.items()}
TASK_TO_PROTO = {
    Task.GENERATE: pb.TASK_GENERATE,
    Task.EMBED: pb.TASK_EMBED,
    Task.CLASSIFY: pb.TASK_CLASSIFY,
}
_TASK_FROM_PROTO = {number: task for task, number in TASK_TO_PROTO.items()}
_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}
