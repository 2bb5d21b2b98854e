"""The errors of the router that clients see: each one's message, code, reason and Retry-After. ``docs/api.md`` and
``docs/admission.md`` list them for clients.

Three kinds are elsewhere. A parameter's or a body's value is refused where it is checked, with ``invalid`` or
``invalid_body`` and a message that names the limit. A failure of our own is ``quire_proto.errors.internal``, without
its reason. What only HTTP knows (routes, methods, sizes) is in ``api.rest.http``. What an engine reports comes through
``from_engine``.

Every function returns the error; the caller raises it. Times are in seconds.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from quire_proto.context_length import CONTEXT_LENGTH_EXCEEDED, from_server
from quire_proto.errors import STATUS, ErrorCode, QuireError, internal, invalid


class RefusalReason(StrEnum):
    """Goes with an error's code, as ``reason``: clients, metrics and documents share these words. The limits are the
    tenant's, the queue is one model's at one router.
    """

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    MAX_CONCURRENT = "max_concurrent"
    MAX_QUEUED = "max_queued"
    POLLS_PER_MINUTE = "polls_per_minute"
    BODY_BYTES = "body_bytes"
    TOKENIZER_FULL = "tokenizer_full"
    QUEUE_FULL = "queue_full"
    QUEUE_BYTES = "queue_bytes"
    QUEUE_SECONDS = "queue_seconds"
    NONE_READY = "none_ready"
    DEADLINE = "deadline"
    STOPPING = "stopping"
    MODEL = "model"
    FLEET = "fleet"
    VIEWERS = "viewers"
    LORA_UPDATES = "lora_updates"
    FILES = "files"
    MAX_FILES = "max_files"
    FILES_FULL = "files_full"
    MAX_CONVERSATIONS = "max_conversations"
    MAX_RESPONSES = "max_responses"
    CANCELLED = "cancelled"


_RETRY_AFTER: Final = {ErrorCode.OVERLOADED: 1.0, ErrorCode.UNAVAILABLE: 5.0}
"""For errors that pass, where nothing better is known."""
MODEL_NOT_KNOWN_YET: Final = "model_not_known_yet"
RETRY_NOT_READY: Final = 2.0  # until an engine may be there
_MAY_BE_DONE: Final = ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED")  # statuses of gRPC
_RETRY_BUSY = 1.0
_RETRY_CAPACITY = _RETRY_BACKGROUND = 5.0
_RETRY_STOPPING = 5.0  # another replica, or the next start
_NAMED_MODELS: Final = 5  # in one message


# Who may ask, and for what.


def key_missing() -> QuireError:
    """The request has no API key."""
    return QuireError(ErrorCode.UNAUTHENTICATED, "An API key is needed: send the header Authorization: Bearer KEY.")


def several_keys() -> QuireError:
    """The request has more than one Authorization header, at least one of them with a key."""
    return QuireError(ErrorCode.UNAUTHENTICATED, "There is more than one Authorization header.")


def key_invalid() -> QuireError:
    """The API key is nobody's."""
    return QuireError(ErrorCode.UNAUTHENTICATED, "This API key is not valid.")


def key_expired() -> QuireError:
    """The API key was valid until a moment that has passed."""
    return QuireError(ErrorCode.UNAUTHENTICATED, "This API key has expired.")


def token_invalid(problem: str) -> QuireError:
    """The token is not one that is accepted: ``problem`` says why, without its full stop."""
    return QuireError(ErrorCode.UNAUTHENTICATED, f"This token is not valid: {problem}.")


def issuer_unknown() -> QuireError:
    """Tokens cannot be checked now, as the keys of their issuer are being read."""
    message = "The keys that tokens are signed with are being read. Try again in a second."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=1.0)


def model_forbidden(model: str) -> QuireError:
    """The caller's key does not open this model."""
    message = f"This API key may not use the model {model[:128]!r}."
    return QuireError(ErrorCode.FORBIDDEN, message, param="model", reason=RefusalReason.MODEL)


def fleet_forbidden() -> QuireError:
    """The caller's key does not show the fleet."""
    message = "This API key may not see the fleet: that is for tenants with allow_fleet, or for all with --allow-fleet."
    return QuireError(ErrorCode.FORBIDDEN, message, reason=RefusalReason.FLEET)


def lora_updates_forbidden() -> QuireError:
    """The caller's key may not load adapters."""
    message = "This API key may not load and unload adapters: that is for tenants with allow_lora_updates."
    return QuireError(ErrorCode.FORBIDDEN, message, reason=RefusalReason.LORA_UPDATES)


def not_an_adapters_name(name: str) -> QuireError:
    """An adapter cannot be loaded under the name of a model."""
    return QuireError(ErrorCode.CONFLICT, f"{name[:128]} is the name of a model.", param="lora_name")


def lora_update_failed(grpc_status: str, message: str, param: str | None) -> QuireError:
    """An engine did not load or unload an adapter, for the reason in ``message``. ``param`` is at fault, if it says. An
    engine that went away, or did not answer in time, may have done it: trying again is right.
    """
    codes = (ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE)
    status = "UNAVAILABLE" if grpc_status in _MAY_BE_DONE else grpc_status
    code = next((code for code in codes if STATUS[code].grpc == status), None)
    if code is None:
        return internal()
    return QuireError(code, message, param=param, retry_after=_RETRY_AFTER.get(code))


def too_many_viewers() -> QuireError:
    """As many clients look at the fleet as may at one router."""
    message = "Too many clients look at the fleet."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY, reason=RefusalReason.VIEWERS)


def unknown_model(model: str, served: Sequence[str] = ()) -> QuireError:
    """The model is not configured. ``served`` are the models that the caller may use, of which a few are named."""
    names = ", ".join(repr(name) for name in served[:_NAMED_MODELS])
    more = f" and {len(served) - _NAMED_MODELS} more" if len(served) > _NAMED_MODELS else ""
    message = f"There is no model named {model[:128]!r} here" + (f", only {names}{more}." if names else ".")
    return QuireError(ErrorCode.NOT_FOUND, message, param="model", reason="model_not_found")


def model_not_known_yet(model: str) -> QuireError:
    """Nobody has said that there is an adapter of this name, and not every engine has been heard."""
    message = (
        f"It is not known yet whether there is a model named {model[:128]!r}: not every engine has said what it has."
    )
    return QuireError(
        ErrorCode.UNAVAILABLE, message, param="model", retry_after=RETRY_NOT_READY, reason=MODEL_NOT_KNOWN_YET
    )


def model_missing(served: Sequence[str]) -> QuireError:
    """The request names no model, and there is not exactly one that is meant."""
    names = " or ".join(repr(name) for name in served[:_NAMED_MODELS])
    more = f" or one of {len(served) - _NAMED_MODELS} more" if len(served) > _NAMED_MODELS else ""
    return invalid("model", f"model is missing: there is not exactly one{f'; send {names}{more}' if names else ''}.")


def unknown_lora(name: str) -> QuireError:
    """No engine has an adapter of this name."""
    message = f"There is no adapter named {name[:128]!r} here."
    return QuireError(ErrorCode.NOT_FOUND, message, param="lora_name", reason="model_not_found")


def invalid_body(message: str) -> QuireError:
    """The body or message as a whole cannot be read, so that no parameter is at fault."""
    return QuireError(ErrorCode.INVALID, message)


# The router has no capacity, or ends.


def shutting_down() -> QuireError:
    """The router refuses a request, or does not finish it, because it shuts down: another router takes it."""
    message = "This router is shutting down."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=_RETRY_STOPPING, reason=RefusalReason.STOPPING)


def router_busy(what: str) -> QuireError:
    """A bound of this process is reached; ``what`` says which, with its number."""
    message = f"{what}, which is the most that this router takes."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY)


def bodies_full() -> QuireError:
    """The request bodies that are held leave no memory for another."""
    message = "The bodies that are being read here take as much memory as this router gives them."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY, reason=RefusalReason.BODY_BYTES)


def tokenizer_full(retry_after: float) -> QuireError:
    """Too much text waits for a thread that tokenises."""
    message = "Too much text waits to be read and tokenised here."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=retry_after, reason=RefusalReason.TOKENIZER_FULL)


def background_full(limit: int) -> QuireError:
    """As many background requests run as may."""
    message = f"{limit} requests run in the background, which is the most that this router takes."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BACKGROUND, reason="background_full")


# A tenant's limits.


def rate_limit_used_up(reason: RefusalReason, limit: int | None, retry_after: float) -> QuireError:
    """The tenant's requests or tokens of this minute (``reason``) are used up."""
    unit = "requests" if reason is RefusalReason.REQUESTS_PER_MINUTE else "tokens"
    message = f"This key may use {limit} {unit} a minute, and they are used up."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=retry_after, reason=reason)


def polls_used_up(limit: int, retry_after: float) -> QuireError:
    """The tenant reads earlier requests too often."""
    message = f"This key may read earlier requests {limit} times a minute."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=retry_after, reason=RefusalReason.POLLS_PER_MINUTE)


def too_many_concurrent(limit: int) -> QuireError:
    """As many requests of the tenant run as may. Nobody knows when one of them ends."""
    message = f"{limit} requests of yours are in progress, which is the most you may have."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY, reason=RefusalReason.MAX_CONCURRENT)


def tenant_queue_full(limit: int) -> QuireError:
    """As many requests of the tenant wait for the model as may."""
    message = f"{limit} requests of yours wait for this model, which is the most you may have."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY, reason=RefusalReason.MAX_QUEUED)


# The queue of a model, and its engines.


def queue_full(reason: RefusalReason) -> QuireError:
    """The model's queue holds as many requests, or bytes of them (``reason``), as it may."""
    message = "Too many requests wait for this model."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BUSY, reason=reason)


def no_capacity(seconds: float) -> QuireError:
    """The request waited in the queue as long as it may."""
    message = f"No engine had room for the request within {seconds:g} seconds."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_CAPACITY, reason=RefusalReason.QUEUE_SECONDS)


def none_ready_in_queue(model: str) -> QuireError:
    """No engine became ready while the request was held."""
    return _none_ready(f"No engine is ready to run the model {model!r}.", RETRY_NOT_READY)


def model_not_ready(model: str) -> QuireError:
    """No engine has offered the model yet, so that its limits are unknown."""
    return _none_ready(f"No engine is ready for the model {model!r}.", RETRY_NOT_READY)


def answer_cancelled() -> QuireError:
    """Somebody has cancelled a request, in an API whose answers have no word for that."""
    message = "The request was cancelled before its answer had ended."
    return QuireError(ErrorCode.CONFLICT, message, reason=RefusalReason.CANCELLED)


def request_cancelled() -> QuireError:
    """Somebody has cancelled a request whose answer is one piece, so that there is none."""
    return QuireError(ErrorCode.UNAVAILABLE, "The request was cancelled.", retry_after=_RETRY_BUSY)


def no_engine_ready() -> QuireError:
    """No engine became ready for another attempt."""
    return _none_ready("No engine is ready to run this model.", _RETRY_AFTER[ErrorCode.UNAVAILABLE])


def version_gone() -> QuireError:
    """Engines of the model are ready, and none of the version that began the answer."""
    message = "No engine is ready that runs the version of the model which began this answer."
    code = ErrorCode.UNAVAILABLE
    return QuireError(code, message, retry_after=_RETRY_AFTER[code], reason="version_gone")


def _none_ready(message: str, retry_after: float) -> QuireError:
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=retry_after, reason=RefusalReason.NONE_READY)


def engines_full() -> QuireError:
    """Every ready engine has refused the request."""
    code, message = ErrorCode.OVERLOADED, "Every engine that is ready has as many requests waiting as it takes."
    return QuireError(code, message, retry_after=_RETRY_AFTER[code], reason="engines_full")


def engines_lost() -> QuireError:
    """As many engines as may were lost with the request, without a token between them."""
    code, message = ErrorCode.UNAVAILABLE, "The engines that ran this request were lost."
    return QuireError(code, message, retry_after=_RETRY_AFTER[code])


def from_engine(error: QuireError) -> QuireError:
    """An engine's error as the client gets it: an id in use at the engine is INTERNAL, and an error after which the
    client may try again says when.
    """
    if error.code is ErrorCode.CONFLICT:
        return internal()
    wait = _RETRY_AFTER.get(error.code)
    reason = error.reason or (None if from_server(error.message) is None else CONTEXT_LENGTH_EXCEEDED)
    return QuireError(error.code, error.message, param=error.param, retry_after=wait, reason=reason)


def engine_refused(message: str) -> QuireError:
    """A server that others have written finds the request wrong, in its own words."""
    return QuireError(ErrorCode.INVALID, f"The engine refuses the request: {message or 'it does not say why'}")


def needs_quire(param: str, what: str, server: str) -> QuireError:
    """No ``server``, and so no engine of this model, can do ``what`` the parameter asks for."""
    return invalid(param, f"{what[0].upper()}{what[1:]} need an engine of Quire, and this model runs on {server}.")


def structured_cannot_resume(server: str) -> QuireError:
    """The engine that began a structured output was lost, and all others are such servers."""
    code = ErrorCode.UNAVAILABLE
    message = "The engine that wrote the beginning of this structured output was lost, and "
    return QuireError(code, f"{message}{server} cannot go on in the middle of one.", retry_after=_RETRY_AFTER[code])


# Deadlines, and clients that are too slow.


def deadline_in_queue() -> QuireError:
    """The request's deadline passed before it was admitted."""
    message = "The request's time was over before its turn came."
    return QuireError(ErrorCode.DEADLINE, message, reason=RefusalReason.DEADLINE)


def request_timed_out() -> QuireError:
    """The request's deadline passed while it ran."""
    return QuireError(ErrorCode.DEADLINE, "The time for this request was over before its answer had ended.")


def consumer_deadline_exceeded() -> QuireError:
    """The deadline of the response's consumer has passed, while the request's has not."""
    return QuireError(ErrorCode.DEADLINE, "The time to read this answer was over before it had ended.")


def message_too_slow(seconds: float) -> QuireError:
    """A gRPC call's message did not arrive in time."""
    return QuireError(ErrorCode.DEADLINE, f"The message did not arrive within {seconds:g} seconds.")


def stream_unread(seconds: float) -> QuireError:
    """A gRPC client did not read its stream in time."""
    return QuireError(ErrorCode.DEADLINE, f"The client left its stream unread for {seconds:g} seconds.")


def output_unread() -> QuireError:
    """A client left its tokens unread for as long as it may (``--slow-client-timeout``)."""
    code, message = ErrorCode.OVERLOADED, "The client did not read its tokens in time."
    return QuireError(code, message, retry_after=_RETRY_AFTER[code])


# Stored requests and idempotency keys.


def journal_unavailable() -> QuireError:
    """The journal's database does not answer."""
    return QuireError(ErrorCode.UNAVAILABLE, "Request state cannot be read now.", retry_after=1.0)


def newer_record() -> QuireError:
    """Only newer routers can go on with a request: the next try may reach one."""
    return QuireError(ErrorCode.UNAVAILABLE, "A newer router has this request: try again.", retry_after=_RETRY_STOPPING)


def store_full() -> QuireError:
    """There is no room for more files and batches."""
    message = "The store has no room for more files and batches now. Delete files that are not needed any more."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=60.0, reason=RefusalReason.FILES_FULL)


def share_full() -> QuireError:
    """A tenant has its share of a store that has no more room (``ObjectStore.charge``)."""
    message = (
        "This key has its share of the memory, or the file, where this router keeps files, batches and conversations: "
        "delete some of this key's."
    )
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=60.0, reason=RefusalReason.FILES_FULL)


def too_much_stored(message: str, reason: RefusalReason = RefusalReason.MAX_FILES) -> QuireError:
    """The tenant has as many files or batches, conversations or responses, or bytes of them, as it may have."""
    return QuireError(ErrorCode.OVERLOADED, message, reason=reason)


def too_many_batches(most: int) -> QuireError:
    """The tenant has as many batches that have not ended as it may have: that passes by itself."""
    message = f"There are {most} batches that have not ended, as many as there may be."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=_RETRY_BACKGROUND, reason=RefusalReason.MAX_FILES)


def files_forbidden() -> QuireError:
    """Nothing of this tenant's requests is stored, so there can be no files."""
    message = "Nothing of this key's requests is stored, so it can have no files and batches."
    return QuireError(ErrorCode.FORBIDDEN, message, reason=RefusalReason.FILES)


def file_not_found(file_id: str, param: str = "file_id") -> QuireError:
    """There is no such file, or it is another tenant's, or has expired."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no file {file_id[:80]!r}.", param=param)


def file_in_use(batch_id: str) -> QuireError:
    """A batch that has not ended reads the file."""
    message = f"The batch {batch_id!r} reads this file: cancel it, or wait for its end."
    return QuireError(ErrorCode.CONFLICT, message, param="file_id")


def batch_not_found(batch_id: str) -> QuireError:
    """There is no such batch, or it is another tenant's, or has expired."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no batch {batch_id[:80]!r}.", param="batch_id")


def batch_waits() -> QuireError:
    """A line of a batch cannot begin yet; no client sees it."""
    return QuireError(ErrorCode.OVERLOADED, "The request waits for others of its batch.", retry_after=1.0)


def batch_ended(status: str) -> QuireError:
    """The batch cannot be cancelled any more."""
    return QuireError(ErrorCode.CONFLICT, f"The batch cannot be cancelled: it is {status}.", param="batch_id")


def lease_lost() -> QuireError:
    """The lease of the request's record expired, and another router has claimed it."""
    code, message = ErrorCode.UNAVAILABLE, "Another router continues this request."
    return QuireError(code, message, retry_after=_RETRY_AFTER[code])


def request_not_found() -> QuireError:
    """There is no record of the id, or it is another tenant's."""
    return QuireError(ErrorCode.NOT_FOUND, "There is no such request.", param="request_id")


def record_lost() -> QuireError:
    """The record of a request disappeared while it was replayed."""
    return QuireError(
        ErrorCode.NOT_FOUND, "The request was deleted, or what was known of it was lost.", param="request_id"
    )


def prompts_lost() -> QuireError:
    """A request of several prompts has no record of some of them."""
    message = "Some prompts of this request were lost before they were written down."
    return QuireError(ErrorCode.NOT_FOUND, message, param="request_id")


def prompt_forgotten() -> QuireError:
    """The record of one prompt expired just now."""
    return QuireError(ErrorCode.UNAVAILABLE, "A prompt of this request was forgotten just now.", retry_after=1)


def response_not_found(response_id: str) -> QuireError:
    """A response of the Responses API is not stored, or is another tenant's."""
    return QuireError(ErrorCode.NOT_FOUND, f"Response with id {response_id[:128]!r} not found.", param="response_id")


def previous_not_found(response_id: str) -> QuireError:
    """A response cannot be gone on from: it is not stored, or is another tenant's. In OpenAI's words."""
    message = f"Previous response with id {response_id[:128]!r} not found."
    return _previous(message, reason="previous_response_not_found")


def previous_in_progress(response_id: str) -> QuireError:
    """A response cannot be gone on from yet."""
    message = f"Previous response with id {response_id[:128]!r} is still in progress."
    return _previous(message, reason="previous_response_in_progress")


def previous_failed(response_id: str) -> QuireError:
    """A response cannot be gone on from: it ended with an error."""
    message = f"Previous response with id {response_id[:128]!r} has failed, so that there is nothing to go on from."
    return _previous(message, reason="previous_response_failed")


def _previous(message: str, *, reason: str) -> QuireError:
    return QuireError(ErrorCode.INVALID, message, param="previous_response_id", reason=reason)


def item_not_found(param: str, item_id: str) -> QuireError:
    """An item that a request refers to is not stored, or is another tenant's."""
    message = f"Item with id {item_id[:128]!r} not found: it was not stored, or has expired."
    return QuireError(ErrorCode.NOT_FOUND, message, param=param, reason="item_not_found")


def conversation_not_found(name: str, param: str = "conversation_id") -> QuireError:
    """A conversation is not stored, or is another tenant's. In OpenAI's words."""
    return QuireError(ErrorCode.NOT_FOUND, f"Conversation with id {name[:128]!r} not found.", param=param)


def conversation_locked(conversation_id: str) -> QuireError:
    """A response of the conversation does not end soon, or others change it all the time."""
    message = f"Another request works on the conversation {conversation_id[:128]!r}: try again in a few seconds."
    return QuireError(ErrorCode.INVALID, message, param="conversation", reason="conversation_locked")


def key_conflict() -> QuireError:
    """The idempotency key belongs to a request with another body."""
    message = "This idempotency key came with another request before."
    return QuireError(ErrorCode.CONFLICT, message, param="idempotency-key")


def key_unavailable() -> QuireError:
    """A request of this idempotency key can be neither started nor found."""
    message = "The request of this idempotency key is neither to be begun nor to be found now."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=1.0)


# What autoscalers get: these have no ``retry_after``, as they ask again by themselves.


def model_not_scaled(model: str) -> QuireError:
    """The model is not configured, whatever engines there are."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no model {model!r}.")


def unknown_metric(name: str) -> QuireError:
    """KEDA asks for a metric of another name."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no metric {name[:64]!r}.")


def load_redis_away() -> QuireError:
    """The load of all routers is unknown: Redis does not answer."""
    return _load_unknown("The load of all routers is not known, because Redis does not answer.")


def load_settling() -> QuireError:
    """The load of all routers is unknown: some may not have published theirs since Redis started or lost it."""
    return _load_unknown("The load of all routers is not known yet: they are only now being heard.")


def load_too_many_routers(limit: int) -> QuireError:
    """The load of all routers is unknown: there are more than are read."""
    return _load_unknown(f"More than {limit} routers tell their load.")


def load_damaged() -> QuireError:
    """The load of all routers is unknown: what a router published cannot be decoded."""
    return _load_unknown("What a router told of its load cannot be read.")


def _load_unknown(message: str) -> QuireError:
    return QuireError(ErrorCode.UNAVAILABLE, message)
