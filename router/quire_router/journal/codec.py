"""How a record is stored: a hash of few fields, and what was delivered as packed little-endian int32. Knows no
database.
"""

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from sys import byteorder
from typing import Any

from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured import Structured, StructuredKind

from quire_router.generation import Generation
from quire_router.journal.base import Record
from quire_router.journal.deliveries import read_deliveries

TOKEN_BYTES = 4


class DamagedRecordError(ValueError):
    """What is stored is not a record."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Four bytes for each token, or mark of ``Deliveries``."""
    packed = array("i", token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The tokens again. Raises ``DamagedRecordError`` when the last one is cut off."""
    if len(packed) % TOKEN_BYTES:
        raise DamagedRecordError("the tokens end within a token")
    token_ids = array("i", packed)
    if byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


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
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(fields: Mapping[bytes, bytes], deliveries: bytes) -> Record:
    """The record from its hash and its deliveries. Raises ``DamagedRecordError``."""
    try:
        generation = _decode_request(json.loads(fields[b"request"]), unpack_tokens(fields[b"prompt"]))
        return Record(
            generation=generation,
            owner=fields[b"owner"].decode(),
            epoch=int(fields[b"epoch"]),
            choices=read_deliveries(unpack_tokens(deliveries), generation.params.n),
            finish_reason=FinishReason(fields[b"reason"].decode()) if b"reason" in fields else None,
            error=fields.get(b"error", b"").decode("utf-8", "surrogatepass"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"the record is damaged ({type(error).__name__})") from error


def _decode_request(fields: dict[str, Any], prompt: list[int]) -> Generation:
    return Generation(
        prompt_token_ids=prompt,
        params=_decode_params(fields.pop("params")),
        stop=tuple(fields.pop("stop")),
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
