"""How a record is stored: a hash of few fields, and what was told as packed little-endian int32. Knows no database."""

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from sys import byteorder
from typing import Any

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured import Structured, StructuredKind

from quire_router.generation import NO_USAGE, Generation, Usage
from quire_router.journal.base import Record, Tail
from quire_router.journal.deliveries import RowReader

TOKEN_BYTES = 4
# What reading something else than a record raises; parameters out of range are refused as if a client had sent them.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError, QuireError)


class DamagedRecordError(ValueError):
    """What is stored is not a record."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Four bytes for each token, or other value of ``Deliveries``."""
    packed = array("i", token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """The tokens again. Raises ``DamagedRecordError`` when the last one is cut off."""
    if len(packed) % TOKEN_BYTES:
        raise DamagedRecordError("the tokens end within a token")
    token_ids = array("i", packed)
    if byteorder == "big":
        token_ids.byteswap()
    return token_ids


def encode_request(generation: Generation) -> bytes:
    """Everything of a request but its prompt, as JSON. Equal requests give equal bytes."""
    fields = {
        "request_id": generation.request_id,
        "model": generation.model,
        "params": asdict(generation.params),
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
        "shape": generation.shape,
        "parts": generation.parts,
        "digest": generation.digest,
        "background": generation.background,
        "session": generation.session,
        "deadline": generation.deadline,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(fields: Mapping[bytes, bytes], row: bytes, now: int = 0) -> Record:
    """The record from its hash and its row, ``now`` being the database's time in ms. Raises ``DamagedRecordError``."""
    try:
        generation = _decode_request(json.loads(fields[b"request"]), unpack_tokens(fields[b"prompt"]))
        end = decode_end(fields, len(row), now)
        return Record(
            generation=generation,
            owner=fields[b"owner"].decode(),
            epoch=int(fields[b"epoch"]),
            pieces=RowReader(generation.params.n).read(unpack_tokens(row))[0],
            finish_reason=end.finish_reason,
            error=end.error,
            usage=end.usage,
            held=end.held,
        )
    except _DAMAGE as error:
        raise DamagedRecordError(f"the record is damaged ({type(error).__name__})") from error


def decode_end(fields: Mapping[bytes, bytes], length: int, now: int) -> Tail:
    """How it is with a record whose row has so many bytes, without pieces. Raises ``DamagedRecordError``."""
    try:
        if int(fields.get(b"length", length)) != length:
            raise DamagedRecordError("some of the tokens of a record that ended are not there")
        return Tail(
            pieces=[],
            finish_reason=FinishReason(fields[b"reason"].decode()) if b"reason" in fields else None,
            error=fields.get(b"error", b"").decode("utf-8", "surrogatepass"),
            usage=decode_usage(fields.get(b"usage", b"")),
            held=b"reason" not in fields and float(fields.get(b"lease_expires", 0)) > now,
        )
    except (TypeError, ValueError) as error:
        raise DamagedRecordError(f"the record is damaged ({type(error).__name__})") from error


def encode_usage(usage: Usage) -> str:
    """Its numbers in the order of its fields."""
    return " ".join(map(str, astuple(usage)))


def decode_usage(text: bytes) -> Usage:
    """The usage again. Raises ``ValueError``."""
    return Usage(*map(int, text.split())) if text else NO_USAGE


def decode_choices(request: bytes) -> int:
    """How many choices the client of a stored request gets. Raises ``DamagedRecordError``."""
    try:
        return _decode_params(json.loads(request)["params"]).n
    except _DAMAGE as error:
        raise DamagedRecordError(f"the record is damaged ({type(error).__name__})") from error


def _decode_request(fields: dict[str, Any], prompt: "array[int]") -> Generation:
    return Generation(
        prompt_token_ids=prompt,
        params=_decode_params(fields.pop("params")),
        stop=tuple(fields.pop("stop")),
        parts=tuple(fields.pop("parts", ())),
        cache_salt=bytes.fromhex(fields.pop("cache_salt")),
        **fields,
    )


def _decode_params(fields: dict[str, Any]) -> SamplingParams:
    structured = fields.pop("structured", None)
    if structured is not None:
        structured = Structured(StructuredKind(structured["kind"]), structured["text"])
    return SamplingParams(**{name: _tuples(value) for name, value in fields.items()}, structured=structured)


def _tuples(value: Any) -> Any:
    """JSON knows no tuples, and parameters know no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
