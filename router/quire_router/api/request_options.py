"""``RequestOptions``: what a client sends outside a request's body (idempotency key, session, timeout), with the same
words in both APIs, and what follows from it for the stored request.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from quire_proto.convert import sampling_to_proto
from quire_proto.errors import invalid

from quire_router.api.auth import Identity
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.schemas.openai import GenerationBody
from quire_router.core.generation import GenerationRequest

MAX_LABEL_CHARACTERS = 255
IDEMPOTENCY_KEY = "idempotency-key"
_LABEL = re.compile(f"[ -~]{{1,{MAX_LABEL_CHARACTERS}}}")
_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", re.ASCII)
_ID_BYTES = 16
_TOKENS_PER_CHUNK = 4096  # tokens


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``key`` is the idempotency key and ``session`` the client's name for its session, both empty for none.
    ``timeout`` is how many seconds the response may take; None when the client did not say.
    """

    key: str = ""
    session: str = ""
    timeout: float | None = None

    def request_id(self, caller: Identity) -> str:
        """Returns the request id that follows from the key, the same at every router; empty without a key."""
        return _opaque_id("idempotency", caller, self.key) if self.key else ""


NO_OPTIONS = RequestOptions()


def read_label(name: str, values: Sequence[str]) -> str:
    """Returns the one value of a header or of metadata; empty when there is none. Raises ``QuireError`` INVALID."""
    if not values:
        return ""
    if len(values) > 1:
        raise invalid(name, f"There is more than one {name}.")
    if not _LABEL.fullmatch(values[0]):
        raise invalid(name, f"{name} must have 1 to {MAX_LABEL_CHARACTERS} printable ASCII characters.")
    return values[0]


def read_timeout(name: str, values: Sequence[str]) -> float | None:
    """Returns a number of seconds above 0; None when there is none. Raises ``QuireError`` INVALID."""
    if not values:
        return None
    if len(values) > 1:
        raise invalid(name, f"There is more than one {name}.")
    if not _SECONDS.fullmatch(values[0]) or float(values[0]) == 0:
        raise invalid(name, f"{name} must be a number of seconds above 0, such as 30 or 2.5.")
    return float(values[0])


def options_from_headers(values: Callable[[str], Sequence[str]]) -> RequestOptions:
    """Returns the options of an HTTP request; ``values`` returns every value of a header. Raises ``QuireError``."""
    return RequestOptions(
        key=read_label(IDEMPOTENCY_KEY, values(IDEMPOTENCY_KEY)),
        session=read_label("x-session-id", values("x-session-id")),
        timeout=read_timeout("x-request-timeout", values("x-request-timeout")),
    )


def options_from_metadata(values: Callable[[str], Sequence[str]], remaining: float | None) -> RequestOptions:
    """Returns the options of a gRPC call, whose deadline is in ``remaining`` seconds. Raises ``QuireError``."""
    return RequestOptions(
        key=read_label(IDEMPOTENCY_KEY, values(IDEMPOTENCY_KEY)),
        session=read_label("session-id", values("session-id")),
        timeout=remaining,
    )


def apply_options(
    request: GenerationBody, prepared: PreparedRequest, options: RequestOptions, caller: Identity, timeout: float | None
) -> PreparedRequest:
    """Returns the request with its options, and with what is stored to write its response again. No request may take
    more than ``timeout`` seconds. Raises ``QuireError``.
    """
    several = len(prepared.generations) > 1
    if request.background and several:
        raise invalid("background", "background takes one prompt, not a list of them.")
    if request.background and request.store is False:
        raise invalid(
            "store", "The answer of a background request is kept until it is asked for: store cannot be false."
        )
    seconds = min((each for each in (options.timeout, timeout) if each is not None), default=math.inf)
    session = options.session or request.prompt_cache_key or ""
    first = replace(
        prepared.first,
        shape=prepared.response_options.to_json(),
        parts=tuple(each.request_id for each in prepared.generations) if several else (),
        background=bool(request.background),
        session=_opaque_id("session", caller, session) if session else "",
        deadline=prepared.first.created + seconds if math.isfinite(seconds) else None,
        retention=0 if request.store is False else caller.policy.retention,
    )
    if options.key:
        first = replace(first, digest=_digest(first, prepared, request))
    generations = (first, *(_with_shared_fields(first, each) for each in prepared.generations[1:]))
    if options.key and request.seed is None:
        # Without Redis two routers may both run it, and a client that has part of one response must be able to resume
        # with the other.
        generations = tuple(map(_seed_from_id, generations))
    return replace(prepared, generations=generations)


def _digest(first: GenerationRequest, prepared: PreparedRequest, request: GenerationBody) -> str:
    """Returns a digest of all that makes responses differ, and not of how they are sent. Parameters that the client
    left out do not count: their defaults may follow from the engines, which change.
    """
    digest = blake2b(digest_size=16, person=b"quire digest")
    shape = prepared.response_options.model_copy(update={"include_usage": False, "continuous_usage": False}).to_json()
    params = sampling_to_proto(first.params)
    if request.seed is None:
        params.ClearField("seed")
    if request.output_limit is None:
        params.ClearField("max_tokens")
    flags = (first.include_stop, first.skip_special_tokens, first.echo, first.background, request.seed is not None)
    words = (first.model, first.operation, first.stop, first.priority, flags, shape)
    prompts = "[" + ", ".join(_list_repr(generation.prompt_token_ids) for generation in prepared.generations) + "]"
    for part in (repr(words).encode(), params.SerializeToString(deterministic=True), prompts.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _list_repr(token_ids: Sequence[int]) -> str:
    """Returns ``repr`` of a list, made in chunks, between which other threads can run."""
    parts = (
        repr(list(token_ids[start : start + _TOKENS_PER_CHUNK]))[1:-1]
        for start in range(0, len(token_ids), _TOKENS_PER_CHUNK)
    )
    return f"[{', '.join(parts)}]"


def _with_shared_fields(first: GenerationRequest, other: GenerationRequest) -> GenerationRequest:
    """Returns the generation of another prompt with what it shares with the first one."""
    return replace(
        other,
        shape=first.shape,
        digest=first.digest,
        session=first.session,
        deadline=first.deadline,
        retention=first.retention,
        parts=(),
    )


def _seed_from_id(generation: GenerationRequest) -> GenerationRequest:
    """Derives the seed from the id, and so from the key."""
    digest = blake2b(generation.request_id.encode(), digest_size=8, person=b"quire seed").digest()
    return replace(generation, params=replace(generation.params, seed=int.from_bytes(digest, "little")))


def _opaque_id(kind: str, caller: Identity, label: str) -> str:
    """Returns an opaque name for a tenant's ``label``."""
    words = f"{kind}\0{caller.tenant}\0{label}".encode()
    return blake2b(words, digest_size=_ID_BYTES, person=b"quire label").hexdigest()
