"""How a record is stored: a hash of few fields, and its token log as packed little-endian int32.

The request is JSON in one field of the hash. It is read field by field, so that each value has the type that it had;
its prompt is packed in another field, its conversation, where it has one, is text in a third, and a checksum over all
of them (``seal``) detects a damaged record. Routers of other versions write and read the same records: ``records``
has the rule.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from dataclasses import fields as fields_of
from math import isfinite
from sys import byteorder
from time import monotonic, time
from typing import Any
from zlib import crc32

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured_output import Structured, StructuredKind

from quire_router.core.generation import NO_USAGE, GenerationRequest, LoRA, Usage
from quire_router.core.model_version import ModelVersion
from quire_router.core.usage import Account
from quire_router.journal.base import RecordUpdate, RequestRecord

TOKEN_BYTES = 4
MAX_EPOCH_DIGITS = 15
MAX_LEASE = 10_000  # ms; see ``common.lua``
STATUS_FIELDS = ("request", "owner", "epoch", "reason", "error", "usage", "lease_expires", "told")
_PARAMS = tuple(each.name for each in fields(SamplingParams))
# What reading something else than a record raises; parameters out of range are refused as if a client had sent them.
_DECODE_ERRORS = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError, QuireError)
MIN_RETENTION = 10  # seconds: routers that follow a record, or were frozen while they held it, see its end
MIN_RUNNING_TTL = 60  # seconds in which a client may resume the request of a router that died


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Times of a journal in Redis, in seconds. Raises ``ValueError`` if the lease is longer than ``MAX_LEASE``.

    A router holds a ``lease`` on each record it writes and renews it four times as often, so that a late heartbeat does
    not lose it. A record is deleted ``retention`` after it was finished or, if it is no background request, released,
    or ``running_ttl`` after its last write. A ``pause`` between two flushes lets tokens gather, and the more streams
    run, the longer: half a millisecond or so for each. A router that dies costs at most that many seconds of tokens,
    which are generated again. For ``settle`` after Redis was unavailable, routers may still have to write what they
    buffer. What tenants used in an hour is kept for ``usage_retention``. An answer that can be read again waits with
    its end for ``end_timeout`` at most until that is written. A router that asks another one for an end waits for
    ``ask_timeout`` at most.
    """

    lease: float = 4.0
    settle: float = 4.0
    retention: float = 3600.0
    running_ttl: float = 86_400.0
    pause: float = 0.02
    usage_retention: float = 400 * 86_400.0
    end_timeout: float = 0.2
    ask_timeout: float = 0.5

    def __post_init__(self) -> None:
        if self.lease_ms > MAX_LEASE:
            raise ValueError(f"a lease of more than {MAX_LEASE} ms is longer than the scripts take for one")

    @property
    def lease_ms(self) -> int:
        """Milliseconds."""
        return int(self.lease * 1000)

    @property
    def retention_s(self) -> int:
        """Whole seconds, of requests that have no retention of their own."""
        return max(1, round(self.retention))

    def retention_of(self, generation: GenerationRequest) -> int:
        """Seconds for which the record of this request is kept after its end, or after it was released."""
        if generation.retention is None:
            return self.retention_s
        return max(MIN_RETENTION, round(generation.retention))

    def running_ttl_of(self, generation: GenerationRequest) -> int:
        """Seconds for which its record is kept after its last write. One that is to go soon after its end is not kept
        for long where its router dies either, unless another one is going to end it.
        """
        if generation.retention is None or generation.background:
            return self.running_ttl_s
        return min(self.running_ttl_s, max(MIN_RUNNING_TTL, self.retention_of(generation)))

    @property
    def running_ttl_s(self) -> int:
        """Whole seconds."""
        return max(1, round(self.running_ttl))


class CorruptRecordError(ValueError):
    """What is stored is not a record."""


class NewerRecordError(CorruptRecordError):
    """A record whose answer depends on what only newer routers know. It is left to them."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Four bytes for each token, or other value of a ``TokenLog``."""
    packed = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    if byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """The tokens again. Raises ``CorruptRecordError`` when the last one is cut off."""
    if len(packed) % TOKEN_BYTES:
        raise CorruptRecordError("the tokens end within a token")
    token_ids = array("i", packed)
    if byteorder == "big":
        token_ids.byteswap()
    return token_ids


def encode_request(generation: GenerationRequest) -> bytes:
    """Everything of a request but its prompt and its conversation, as JSON. Equal requests give equal bytes."""
    stored = {
        "request_id": generation.request_id,
        "model": generation.model,
        "params": {name: getattr(generation.params, name) for name in _PARAMS},
        "stop": generation.stop,
        "include_stop": generation.include_stop,
        "skip_special_tokens": generation.skip_special_tokens,
        "echo": generation.echo,
        "priority": generation.priority,
        "operation": generation.operation,
        "tenant": generation.tenant,
        "cache_salt": generation.cache_salt.hex(),
        "stream": generation.stream,
        "created": generation.created,
        "shape": generation.response_options,  # stored under its first name, which older routers read
        "parts": generation.parts,
        "digest": generation.digest,
        "background": generation.background,
        "session": generation.session,
        "deadline": generation.deadline,
    }
    if generation.lora is not None:
        stored["lora"] = (generation.lora.name, generation.lora.digest.hex())
    if generation.served_name:
        stored["served_name"] = generation.served_name
    if newer := [name for name in _PARAMS if name not in _KNOWN_TO_ALL and _is_set(generation.params, name)]:
        stored["needs"] = [f"params.{name}" for name in newer]
    return json.dumps(stored, separators=(",", ":"), default=asdict).encode()


@dataclass(frozen=True, slots=True)
class RequestFields:
    """What never changes in a record: the request, its prompt, its conversation (empty: none), and their checksum."""

    request: bytes
    prompt: bytes
    conversation: bytes
    seal: int


def encode_request_fields(generation: GenerationRequest) -> RequestFields:
    """What never changes in a record."""
    request, prompt = encode_request(generation), pack_tokens(generation.prompt_token_ids)
    conversation = generation.conversation.encode("utf-8", "surrogatepass")
    return RequestFields(request, prompt, conversation, request_checksum(request, prompt, conversation))


def request_checksum(request: bytes, prompt: bytes, conversation: bytes = b"") -> int:
    """The checksum of what never changes in a record. Without a conversation it is that of routers that know none."""
    return crc32(conversation, crc32(prompt, crc32(request)))


def verify_checksum(fields: Mapping[bytes, bytes], length: int, checksum: int) -> None:
    """Raises ``CorruptRecordError`` unless a log of ``length`` bytes and this checksum is the record's."""
    if fields.get(b"sum", b"" if length else b"0") != b"%d" % checksum:
        raise CorruptRecordError("the log is not the one that was written")


def decode_record(
    request_id: str, fields: Mapping[bytes, bytes], length: int, checksum: int, now: int = 0
) -> RequestRecord:
    """The record without its deltas, from its hash; its log has ``length`` bytes and this checksum, and ``now`` is the
    database's time in ms. Raises ``CorruptRecordError``.
    """
    try:
        request, prompt, conversation = fields[b"request"], fields[b"prompt"], fields.get(b"conversation", b"")
        if fields[b"seal"] != b"%d" % request_checksum(request, prompt, conversation):
            raise CorruptRecordError("the request is not the one that was written")
        verify_checksum(fields, length, checksum)
        generation = decode_request(json.loads(request), unpack_tokens(prompt))
        generation = replace(
            generation,
            retention=decode_retention(fields.get(b"retention", b"")),
            conversation=conversation.decode("utf-8", "surrogatepass"),
        )
        return _to_record(request_id, generation, fields, now)
    except NewerRecordError:
        raise
    except _DECODE_ERRORS as error:
        raise CorruptRecordError(f"the record is damaged ({type(error).__name__})") from error


def decode_status(request_id: str, fields: Mapping[bytes, bytes], prompt: int, now: int) -> RequestRecord | None:
    """The record without deltas and prompt (of ``prompt`` bytes), from its ``STATUS_FIELDS``. None if they do not say
    how many tokens it has, as those of an older version. Raises ``CorruptRecordError``.
    """
    try:
        generation = decode_request(json.loads(fields[b"request"]), array("i"))
        record = _to_record(request_id, generation, fields, now)
        if record.usage != NO_USAGE:
            return record
        if b"told" not in fields:
            return None
        return replace(record, usage=Usage(prompt // TOKEN_BYTES, int(fields[b"told"])))
    except NewerRecordError:
        raise
    except _DECODE_ERRORS as error:
        raise CorruptRecordError(f"the record is damaged ({type(error).__name__})") from error


def _to_record(
    request_id: str, generation: GenerationRequest, fields: Mapping[bytes, bytes], now: int
) -> RequestRecord:
    """The record without its deltas. Raises what ``_DECODE_ERRORS`` names, and ``CorruptRecordError``."""
    if generation.request_id != request_id:
        raise CorruptRecordError("the record is another request's")
    end = decode_state(fields, now)
    return RequestRecord(
        generation=generation,
        owner=fields[b"owner"].decode(),
        epoch=decode_epoch(fields[b"epoch"]),
        deltas=[],
        finish_reason=end.finish_reason,
        error=end.error,
        usage=end.usage,
        leased=end.leased,
        version=ModelVersion.parse(fields.get(b"version", b"").decode(errors="replace")),
    )


def decode_start(generation: GenerationRequest, fields: Mapping[bytes, bytes], now: int) -> float:
    """When the request began, by this process' monotonic clock. How long ago that is, the database's clock says
    (``now`` in ms); of a record that does not say when it was opened, the clocks of two machines.
    """
    opened = fields.get(b"opened", b"")
    known = opened.isdigit() and len(opened) <= MAX_EPOCH_DIGITS
    over = (now - int(opened)) / 1000 if known else time() - generation.created
    return monotonic() - max(0.0, over)


def decode_epoch(text: bytes) -> int:
    """The epoch. Raises ``CorruptRecordError`` if the scripts would not accept it."""
    if not is_epoch(text):
        raise CorruptRecordError("the epoch is not a number")
    return int(text)


def is_epoch(text: bytes) -> bool:
    """Whether the scripts accept it as an epoch."""
    return text.isdigit() and len(text) <= MAX_EPOCH_DIGITS


def decode_state(fields: Mapping[bytes, bytes], now: int) -> RecordUpdate:
    """A record's end and whether it is leased, without deltas. Raises ``CorruptRecordError``."""
    try:
        remains = int(fields.get(b"lease_expires", now)) - now
        return RecordUpdate(
            deltas=[],
            finish_reason=FinishReason(fields[b"reason"].decode()) if b"reason" in fields else None,
            error=fields.get(b"error", b"").decode("utf-8", "surrogatepass"),
            usage=decode_usage(fields.get(b"usage", b"")),
            leased=b"reason" not in fields and 0 < remains <= MAX_LEASE,
        )
    except (TypeError, ValueError) as error:
        raise CorruptRecordError(f"the record is damaged ({type(error).__name__})") from error


def decode_retention(text: bytes) -> float | None:
    """The request's own retention in seconds; None if it has none. It is not covered by the checksum: older routers do
    not know the field, and no answer depends on it.
    """
    return float(text) if text.isdigit() and len(text) < 10 else None


def encode_usage(usage: Usage) -> str:
    """Its numbers in the order of its fields."""
    return " ".join(map(str, astuple(usage)))


def decode_usage(text: bytes) -> Usage:
    """The usage. Raises ``ValueError`` if it is none. Newer routers may count more, behind what is known here."""
    counts = [int(count) for count in text.split()][: len(fields_of(Usage))]
    if not all(0 <= count < 2**31 for count in counts):
        raise ValueError("no request uses that many tokens")
    return Usage(*counts) if counts else NO_USAGE


def decode_account(request: bytes) -> Account:
    """Who pays for a stored request, and for which model or adapter. Raises ``CorruptRecordError``."""
    try:
        fields = json.loads(request)
        name = fields.get("served_name") or fields["model"]
        model = name if "lora" not in fields else _as_lora(fields["lora"]).name
        return Account(_as_str(fields["tenant"]), _as_str(model))
    except NewerRecordError:
        raise
    except _DECODE_ERRORS as error:
        raise CorruptRecordError(f"the record is damaged ({type(error).__name__})") from error


def decode_num_choices(request: bytes) -> int:
    """How many choices the client of a stored request gets. Raises ``CorruptRecordError``."""
    try:
        return decode_params(json.loads(request)["params"]).n
    except NewerRecordError:
        raise
    except _DECODE_ERRORS as error:
        raise CorruptRecordError(f"the record is damaged ({type(error).__name__})") from error


def decode_request(fields: dict[str, Any], prompt: "array[int]") -> GenerationRequest:
    """The request. Raises ``NewerRecordError``; and ``ValueError``, ``TypeError``, ``KeyError``, ``AttributeError`` or
    ``QuireError`` if it is none.
    """
    if unknown := [name for name in map(_as_str, fields.get("needs", ())) if name not in _KNOWN]:
        raise NewerRecordError(f"the record needs what this version does not know: {', '.join(unknown)[:256]}")
    if min(prompt, default=0) < 0:
        raise ValueError("the prompt is not made of tokens")
    plain = {name: read(fields[name]) for name, read in _FIELD_DECODERS.items() if name in fields}
    return GenerationRequest(
        response_options=_as_str(fields.get("shape", "")),
        prompt_token_ids=prompt,
        params=decode_params(fields["params"]),
        stop=tuple(map(_as_str, fields["stop"])),
        parts=tuple(map(_as_str, fields.get("parts", ()))),
        cache_salt=bytes.fromhex(fields["cache_salt"]),
        **plain,
    )


def decode_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The request's parameters. Raises as ``decode_request``."""
    plain = _PARAM_DEFAULTS.keys() - {"structured"}
    read = {name: _decode_param(name, value) for name, value in fields.items() if name in plain}
    structured = fields.get("structured")
    if structured is not None:
        structured = Structured(StructuredKind(structured["kind"]), _as_str(structured["text"]))
    return SamplingParams(**read, structured=structured)


def _decode_param(name: str, value: Any) -> Any:
    """A parameter that has the type of its default; the ranges are the parameters' own to check."""
    default = _PARAM_DEFAULTS[name]
    if isinstance(default, tuple):
        return tuple(map(_as_int_or_tuple, value))
    if name == "early_stopping":
        return value if value == "never" else _as_bool(value)
    if isinstance(default, bool):
        return _as_bool(value)
    if default is None:
        return None if value is None else _as_int(value)
    return _as_int(value) if isinstance(default, int) else _as_float(value)


def _as_int_or_tuple(value: Any) -> Any:
    """A number, or several: JSON has no tuples, and parameters have no lists."""
    return tuple(map(_as_float, value)) if isinstance(value, list) else _as_int(value)


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("this is not text")
    return value


def _as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("this is not true or false")
    return value


def _as_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("this is not a whole number")
    return value


def _as_float(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise TypeError("this is not a number")
    return value


def _as_lora(value: Any) -> LoRA:
    name, digest = value
    return LoRA(_as_str(name), bytes.fromhex(digest))


def _as_optional_float(value: Any) -> float | None:
    return None if value is None else _as_float(value)


def _is_set(params: SamplingParams, name: str) -> bool:
    return bool(getattr(params, name) != _PARAM_DEFAULTS[name])


_PARAM_DEFAULTS = {each.name: each.default for each in fields_of(SamplingParams)}
_KNOWN_TO_ALL = frozenset(
    {
        "temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "min_p",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens", "n",
        "best_of", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "structured",
    }
)  # fmt: skip
"""The parameters that the first routers knew which read ``needs``. Others are needed where they have been set."""
_FIELD_DECODERS: dict[str, Callable[[Any], Any]] = {
    "request_id": _as_str,
    "model": _as_str,
    "include_stop": _as_bool,
    "skip_special_tokens": _as_bool,
    "echo": _as_bool,
    "priority": _as_int,
    "operation": _as_str,
    "tenant": _as_str,
    "stream": _as_bool,
    "created": _as_float,
    "digest": _as_str,
    "background": _as_bool,
    "session": _as_str,
    "deadline": _as_optional_float,
    "lora": _as_lora,
    "served_name": _as_str,
}
_KNOWN = frozenset({*_FIELD_DECODERS, "shape", "params", "stop", "parts", "cache_salt"}) | {
    f"params.{name}" for name in _PARAMS
}
"""The fields of a request, and its parameters, that this router reads."""
