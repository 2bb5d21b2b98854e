"""The bounds of one router process: requests in progress (``ConcurrencyLimit``), bytes of their bodies
(``BodyBudget``), the time that a client leaves a response unread (``WriteTimeout``), the size of a response
(``check_response_size``), and which connection of a full port is evicted (``ConnectionShares``).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv6Address
from typing import Any, Protocol

from quire_proto.errors import invalid

from quire_router.admission.fair_queue import LazyHeap
from quire_router.admission.limits import counting_refusals
from quire_router.core.errors import bodies_full, router_busy, shutting_down
from quire_router.core.generation import GenerationRequest

MAX_BODY_BYTES_HELD = 128 * 2**20  # bytes
INITIAL_RESERVATION = 4096  # bytes, for a body of which nothing has arrived


class ConcurrencyLimit:
    """At most ``limit`` requests in progress, of both APIs together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_progress = 0
        self._accepting = True
        self._draining = False

    def __len__(self) -> int:
        return self._in_progress

    @property
    def draining(self) -> bool:
        """Whether clients should send new requests to other routers, even if they are still accepted here."""
        return self._draining

    @contextmanager
    def acquire(self, *, own: int = 0) -> Iterator[None]:
        """Holds a slot for one request, or for one more prompt of a request that holds ``own`` slots: the only request
        may hold any number. Raises ``QuireError`` OVERLOADED or, after ``close``, UNAVAILABLE.
        """
        self._check_accepting(own)
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1

    def start_draining(self) -> None:
        """Asks clients from now on to use other routers."""
        self._draining = True

    def close(self) -> None:
        """Refuses new requests from now on; those in progress continue."""
        self._draining, self._accepting = True, False

    def _check_accepting(self, own: int) -> None:
        if not self._accepting:
            raise shutting_down()
        if self._in_progress >= max(self._limit, own + 1 if self._in_progress == own else 0):
            raise router_busy(f"{self._limit} requests are in progress")


class TenantBudget:
    """At most ``limit`` bytes or characters that all requests together hold. Where there are keys, one tenant holds at
    most half of them. A request that is the only one, of all or of its tenant, may hold any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """The bytes or characters that are held now."""
        return self._tenants.total()

    def try_acquire(self, tenant: str, size: int, *, held: int = 0) -> bool:
        """Takes ``size`` more for a request of this tenant ("" without keys) that holds ``held`` already. Returns
        False, and takes nothing, where that is above the limit.
        """
        others, own = self.used - held, self._tenants[tenant] - held
        is_half_taken = bool(tenant and own) and own + held + size > self._limit // 2
        if is_half_taken or (others and others + held + size > self._limit):
            return False
        self._tenants[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Gives back ``size`` of what ``try_acquire`` took."""
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class BodyBudget:
    """The bytes of request bodies that are held at once, as in ``TenantBudget``. A body may be several times as large
    while it is parsed and tokenised.
    """

    def __init__(self, limit: int = MAX_BODY_BYTES_HELD) -> None:
        self._bytes = TenantBudget(limit)
        self._held: dict[str, list[ReservedBody]] = {}

    @property
    def used(self) -> int:
        """The bytes that are reserved now."""
        return self._bytes.used

    @contextmanager
    def reserve(self, tenant: str, size: int) -> Iterator["ReservedBody"]:
        """Reserves memory for a body of ``size`` bytes that has arrived, until the block ends or the request is queued.
        Raises ``QuireError`` OVERLOADED.
        """
        with self.reserve_incoming(tenant, 0) as body:
            body.reserve(size)
            yield body

    @contextmanager
    def reserve_incoming(self, tenant: str, size: int) -> Iterator["ReservedBody"]:
        """As ``reserve`` for a body that arrives, of ``size`` bytes by its Content-Length; 0 without one. There must be
        memory for all of it. Little of that is reserved at first, and then twice what has arrived, so that a head which
        promises much does not keep other requests out.
        """
        body = ReservedBody(self, tenant, size)
        try:
            body.reserve(size)
            body.shrink(size - INITIAL_RESERVATION)
            yield body
        finally:
            body.release()

    def release_queued(self, request_id: str) -> None:
        """Releases the body of a request that is queued now: the queue counts its bytes from now on."""
        for body in self._held.pop(request_id, ()):
            body.release()

    def hold_until_queued(self, request_id: str, body: "ReservedBody") -> None:
        """Keeps the reservation of ``body`` until the request ``request_id`` is queued."""
        self._held.setdefault(request_id, []).append(body)

    def stop_holding(self, request_id: str, body: "ReservedBody") -> None:
        """Ends ``hold_until_queued`` for a request that will not be queued any more."""
        others = [each for each in self._held.pop(request_id, ()) if each is not body]
        if others:
            self._held[request_id] = others

    def acquire(self, tenant: str, size: int, *, held: int) -> None:
        """As ``TenantBudget.try_acquire``. Raises ``QuireError`` OVERLOADED."""
        if not self._bytes.try_acquire(tenant, size, held=held):
            with counting_refusals():
                raise bodies_full()

    def release(self, tenant: str, size: int) -> None:
        """Gives back what ``acquire`` took."""
        self._bytes.release(tenant, size)


class ReservedBody:
    """One request's body as it arrives, and the bytes that are reserved for it."""

    def __init__(self, budget: BodyBudget, tenant: str, stated: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._stated = stated
        self._reserved = 0
        self._data = bytearray()
        self._request_id: str | None = None

    def __len__(self) -> int:
        return len(self._data)

    def reserve(self, size: int) -> None:
        """Raises the reservation to ``size`` bytes, if it is less. Raises ``QuireError`` OVERLOADED."""
        if size > self._reserved:
            self._budget.acquire(self._tenant, size - self._reserved, held=self._reserved)
            self._reserved = size

    def shrink(self, size: int) -> None:
        """Lowers the reservation by ``size`` bytes; does nothing for a negative number."""
        size = max(0, size)
        self._budget.release(self._tenant, size)
        self._reserved -= size

    def append(self, data: bytes) -> None:
        """Adds ``data`` to the body. Raises ``QuireError`` OVERLOADED where there is no memory for it."""
        size = len(self._data) + len(data)
        self.reserve(max(size, min(self._stated, 2 * size + INITIAL_RESERVATION)))
        self._data += data

    def detach(self) -> bytearray:
        """Returns all of the body, which is not kept here any longer."""
        data, self._data = self._data, bytearray()
        return data

    def hold_until_queued(self, request_id: str) -> None:
        """Keeps the reservation until the request, which was validated as ``request_id``, is queued."""
        self._request_id = request_id
        self._budget.hold_until_queued(request_id, self)

    def release(self) -> None:
        """Gives back the whole reservation."""
        self.shrink(self._reserved)
        if self._request_id is not None:
            self._budget.stop_holding(self._request_id, self)
            self._request_id = None


class WriteTimeout:
    """Bounds every write of one response by ``seconds``, with one timer for all of them: a timer for each token would
    cost more than the token, and a write that does not wait costs next to nothing. ``close`` it when the response has
    ended.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[Any] | None = None
        self._started_at = 0.0
        self._timed_out = False

    async def wait(self, write: Awaitable[None]) -> None:
        """Awaits one write. Raises ``TimeoutError`` when it takes too long."""
        if self._timer is None:
            self._arm(self._loop.time())
        self._started_at = self._loop.time()
        self._writer = asyncio.current_task()
        try:
            await write
        except asyncio.CancelledError:
            if not self._timed_out or self._writer is None:
                raise
            self._writer.uncancel()
            raise TimeoutError from None
        finally:
            self._writer = None

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, since: float) -> None:
        self._timer = self._loop.call_at(since + self.seconds, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._writer is None:
            self._arm(now)
        elif now < self._started_at + self.seconds:
            self._arm(self._started_at)
        else:
            self._timed_out = True
            self._writer.cancel()


MAX_OUTPUTS = 128
MAX_VALUES = 2**22  # a hundred megabytes or two as JSON; one output of 131,072 tokens with 20 log-probabilities each


def check_response_size(generations: Sequence[GenerationRequest], *, shows_prompts: bool = False) -> None:
    """Raises ``QuireError`` INVALID for a request whose response could be too large to be stored and written. Prompts,
    outputs, tokens and log-probabilities each have their range; this bounds their product. A response that
    ``shows_prompts`` has the tokens of its prompt in each choice.
    """
    params = generations[0].params
    width = "beam_width" if params.beam_width else "best_of" if params.best_of > params.n else "n"
    param = "prompt" if len(generations) > 1 else width
    outputs = sum(generation.params.num_sequences for generation in generations)
    if outputs > MAX_OUTPUTS:
        raise invalid(param, f"The request asks for {outputs} outputs in all but at most {MAX_OUTPUTS} are allowed.")
    values = sum(_num_values(each, shows_prompt=shows_prompts or each.echo) for each in generations)
    if values > MAX_VALUES:
        raise invalid(
            param if outputs > 1 else "max_tokens",
            f"The answer could hold {values} tokens and log-probabilities but at most {MAX_VALUES} are allowed: "
            "ask for fewer outputs, a smaller max_tokens or fewer log-probabilities.",
        )


def _num_values(generation: GenerationRequest, *, shows_prompt: bool) -> int:
    params, prompt_tokens = generation.params, len(generation.prompt_token_ids)
    output = params.num_sequences * (params.max_tokens + (prompt_tokens if shows_prompt else 0))
    return output + generation.num_logprobs(prompt_tokens, params.num_sequences * params.max_tokens)


class Evictable(Protocol):
    """A connection that can be closed while nothing is answered on it."""

    def evict(self) -> None:
        """Closes it."""
        ...


class ConnectionShares:
    """At most ``limit`` connections. When there are as many, a new one evicts the connection that is idle for the
    longest time, of the peer that has most idle ones, so that no address keeps others out with idle connections. A peer
    that has ``peer_share`` of the limit (0 to 1) evicts its own idle connections only.
    """

    def __init__(self, limit: int, peer_share: float = 0.5) -> None:
        self._limit = limit
        self._max_per_peer = max(1, int(limit * peer_share))
        self._peers: dict[Evictable, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[str, dict[Evictable, None]] = {}  # of each peer, the idlest first
        self._most_idle: LazyHeap[str] = LazyHeap()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, connection: Evictable, peer: str) -> bool:
        """Adds a connection of ``peer`` (see ``peer_key``). Returns False when there is no capacity."""
        if not self.evict_if_full(peer):
            return False
        self._peers[connection] = peer
        self._counts[peer] += 1
        return True

    def evict_if_full(self, peer: str, uncounted: int = 0) -> bool:
        """Evicts a connection if needed for one more of ``peer``, with ``uncounted`` ones that are not added here yet.
        Returns False when there is no capacity.
        """
        if len(self._peers) + uncounted < self._limit:
            return True
        if self._counts[peer] < self._max_per_peer and self._most_idle:
            peer = self._most_idle.first()
        victim = next(iter(self._idle.get(peer, ())), None)
        if victim is None:
            return False
        self.remove(victim)
        victim.evict()
        return True

    def mark_idle(self, connection: Evictable) -> None:
        """Marks a connection on which nothing is answered; it may be idle already."""
        peer = self._peers.get(connection)
        if peer is None:
            return
        idle = self._idle.setdefault(peer, {})
        idle.pop(connection, None)
        idle[connection] = None
        self._rank(peer)

    def mark_busy(self, connection: Evictable) -> None:
        """Protects the connection from eviction until it is idle again."""
        peer = self._peers.get(connection)
        if peer is not None and self._idle.get(peer, {}).pop(connection, self) is None:
            self._rank(peer)

    def remove(self, connection: Evictable) -> None:
        """Removes a connection that has ended, if it was added."""
        self.mark_busy(connection)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]

    def _rank(self, peer: str) -> None:
        idle = self._idle[peer]
        if not idle:
            del self._idle[peer]
            self._most_idle.discard(peer)
        elif peer not in self._most_idle or self._most_idle.key(peer) != -len(idle):
            self._most_idle.put(peer, -len(idle))


def peer_key(host: str) -> str:
    """Returns what counts as one peer: an IPv4 address, or the /64 network of an IPv6 address, since one machine can
    use all addresses of that.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or int(address) >> 64)
