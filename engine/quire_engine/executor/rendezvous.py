"""How the machines of one engine, or the engines of a data-parallel group, find each other. Member 0 listens as a
``RendezvousHub``, and the others ``join`` it. It accepts members that run the same model with the same settings, and
refuses all others with the reason.
"""

import asyncio
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

import torch
from quire_proto import __version__
from quire_proto.cli import join_host_port
from quire_proto.engine_token import HEADER, EngineTokens, TokenError
from quire_proto.tls import ServerTls

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs
from quire_engine.errors import ModelError
from quire_engine.executor.node_link import (
    NO_MESSAGE,
    FrameKind,
    LinkEndedError,
    LinkThread,
    NodeLink,
    describe_failure,
    own_names,
    tls_context,
)

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
RETRY_SECONDS = 0.5
# How often the log repeats which members are missing.
WAITING_SECONDS = 15.0
# Connections that have not joined yet. Further ones are closed at once.
MAX_STRANGERS = 64


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ``count`` members meet, from the view of member ``rank``. Member 0 listens at ``address`` and ``port``. All
    must join within ``timeout`` seconds.

    ``own_address`` is the address of this member for the others, if known. ``noun`` is the word for a member, and
    ``count_flag`` the option that sets ``count``. If there is a ``token_file``, member 0 requires one of its tokens.
    """

    noun: str
    count_flag: str
    count: int
    rank: int
    address: str
    port: int
    own_address: str | None
    timeout: float
    tls: ServerTls | None
    token_file: Path | None = None

    @property
    def master(self) -> str:
        """Member 0 and where it listens, for messages."""
        return f"{self.noun} 0 ({join_host_port(self.address, self.port)})"

    def tokens(self) -> EngineTokens | None:
        """Returns the tokens that member 0 requires and the others send. Raises ``ModelError`` if the file cannot be
        used.
        """
        try:
            return None if self.token_file is None else EngineTokens(self.token_file)
        except TokenError as error:
            raise ModelError(f"--engine-token-file: {error}.") from None

    @property
    def sentence_start(self) -> str:
        """``master`` with a capital letter, for the start of a sentence."""
        return self.master[0].upper() + self.master[1:]


def facts_in_common(
    config: EngineArgs, model_config: ModelConfig, device: torch.device, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what all members must have in common, by name, as JSON values. ``more`` adds facts that are not in
    ``EngineArgs``.
    """
    settings = config.model_dump(mode="json", include=set(EngineArgs.model_fields))
    return {
        "version of Quire": __version__,
        "version of torch": torch.__version__,
        **more,
        **{f"--{name.replace('_', '-')}": value for name, value in settings.items()},
        "type of device": device.type,
        "revision of the model": model_config.model_revision,
    }


# Member 0


class Member(Protocol):
    """A member that has joined, with its ``rank`` and its ``address`` for the others."""

    rank: int
    address: str

    @property
    def accepted(self) -> object:
        """What member 0 sends to it with ACCEPTED."""
        ...

    async def run(self) -> str:
        """Runs its link. Returns why it ended, as the end of a sentence about the member."""
        ...

    def end(self, reason: str) -> None:
        """Handles the end of its link after all members had joined. ``reason`` is as in ``run``."""
        ...


M = TypeVar("M", bound=Member)


class RendezvousHub(ABC, Generic[M]):
    """Waits for the other members at ``place``. ``facts`` are what a member must have in common with this one.

    The links run in an event loop on their own thread, which also makes and ends members. Raises ``ModelError``, and
    ``TlsError`` if the TLS files cannot be used.
    """

    def __init__(self, place: Rendezvous, facts: Mapping[str, Any]) -> None:
        self._place = place
        self._facts = facts
        self._names = None if place.tls is None else own_names(place.tls)
        self._tokens = place.tokens()
        self._joined: dict[int, M] = {}
        self._changed = Condition()
        self._strangers = 0
        self._thread = LinkThread(f"{place.noun}-links", self._serve)

    @abstractmethod
    def make_member(self, rank: int, address: str, link: NodeLink) -> M:
        """Returns member ``rank``, which joins through ``link``. Runs on the thread of the links."""

    def wait_joined(self) -> list[M]:
        """Waits for all other members. Returns them in order. Raises ``ModelError`` if one has not joined in time."""
        noun, deadline = self._place.noun, time.monotonic() + self._place.timeout
        address = join_host_port(self.own_address, self._place.port)
        with self._changed:
            while missing := [rank for rank in range(1, self._place.count) if rank not in self._joined]:
                names = f"{noun}{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                if (left := deadline - time.monotonic()) <= 0:
                    have = "has" if len(missing) == 1 else "have"
                    raise ModelError(f"{names.capitalize()} {have} not joined within {self._place.timeout:g} seconds.")
                # A warning, because a program that is started by hand shows nothing less severe, and nothing else is
                # visible meanwhile.
                log.warning("waiting for %s to join at %s, for up to %.0f seconds", names, address, left)
                self._changed.wait_for(self._has_all, min(left, WAITING_SECONDS))
            return self.members

    @property
    def members(self) -> list[M]:
        """The other members, in order. Requires that all have joined."""
        return [member for _, member in sorted(self._joined.items())]

    @property
    def own_address(self) -> str:
        """The address of member 0 for the others."""
        return self._place.own_address or self._place.address

    @property
    def addresses(self) -> list[str]:
        """The address of each member for the others, in order. Requires that all have joined."""
        return [self.own_address, *(member.address for member in self.members)]

    def call(self, work: Callable[..., object], *arguments: object) -> None:
        """Runs ``work`` on the thread of the links, unless that has ended."""
        self._thread.call(work, *arguments)

    def stop_listening(self) -> None:
        """Accepts no more members. A late member then gets no connection here and may find the next hub."""
        self.call(self._server.close)

    def close(self) -> None:
        """Ends all links. The other members notice that this one is gone."""
        self._thread.close()

    def _has_all(self) -> bool:
        return len(self._joined) == self._place.count - 1

    # On the thread of the links

    async def _serve(self, started: "Future[None]") -> None:
        tasks = asyncio.TaskGroup()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.create_task(self._on_connection(NodeLink(reader, writer)))

        try:
            address, port = self.own_address, self._place.port
            self._server = await asyncio.start_server(accept, address, port, start_serving=False)
        except OSError as error:
            raise ModelError(f"Other {self._place.noun}s cannot join here: {error.strerror or error}.") from error
        try:
            async with tasks:
                await self._server.start_serving()
                started.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled
        finally:
            self._server.close()

    async def _on_connection(self, link: NodeLink) -> None:
        """Serves one connection until it ends."""
        member, peer = None, link.peer_address
        self._strangers += 1
        try:
            if self._strangers <= MAX_STRANGERS:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    member = await self._admit(link, peer)
        except TimeoutError:
            log.warning("a connection of %s is refused: it has not joined within %g seconds", peer, HANDSHAKE_SECONDS)
        except (LinkEndedError, OSError) as error:
            log.warning("a connection of %s is refused: it %s", peer, describe_failure(error))
        except Exception:  # one connection ends no other
            log.exception("a connection of %s failed", peer)
        finally:
            self._strangers -= 1
            if member is None:
                link.abort()
        if member is not None:
            await self._run_member(member)

    async def _admit(self, link: NodeLink, peer: str) -> M:
        """Returns the member that ``link`` leads to. Raises ``LinkEndedError`` and ``OSError``."""
        if self._place.tls is not None and self._names is not None:
            await link.start_tls(self._place.tls)
            link.check_peer(self._names)
        frame = await link.receive()
        hello = frame.value
        if frame.kind != FrameKind.HELLO or not isinstance(hello, dict) or not isinstance(hello.get("rank"), int):
            raise LinkEndedError(NO_MESSAGE)
        rank: int = hello["rank"]
        if (refusal := self._refusal(rank, hello)) is not None:
            link.send(FrameKind.REFUSED, refusal)
            await link.drain()
            raise LinkEndedError(f"is refused: {refusal}")
        member = self.make_member(rank, str(hello.get("address", peer)), link)
        with self._changed:  # once the member reads the answer, all must see it as joined
            link.send(FrameKind.ACCEPTED, member.accepted)
            self._joined[rank] = member
            self._changed.notify_all()
        log.info("%s %d (%s) has joined", self._place.noun, rank, member.address)
        return member

    def _refusal(self, rank: int, hello: Mapping[str, Any]) -> str | None:
        noun, place = self._place.noun, self._place
        if self._tokens is not None and not self._tokens.current.accept([str(hello.get("token"))]):
            return f"This {noun} does not have the token of {noun} 0: give both the same --engine-token-file."
        if not 0 < rank < place.count:
            return f"There is no {noun} {rank} besides {noun} 0: {place.count_flag} is {place.count}."
        if (difference := describe_difference(noun, rank, self._facts, hello.get("facts"))) is not None:
            return difference
        if rank in self._joined:
            return f"{noun.capitalize()} {rank} has joined already, from {self._joined[rank].address}."
        return None

    async def _run_member(self, member: M) -> None:
        name = f"{self._place.noun} {member.rank} ({member.address})"
        try:
            reason = await member.run()
        except Exception:
            log.exception("the link to %s failed", name)
            reason = "cannot be spoken to"
        with self._changed:
            is_complete = self._has_all()
            if not is_complete:  # it can join again
                log.warning("%s %s", name, reason)
                del self._joined[member.rank]
        if is_complete:
            member.end(reason)


def describe_difference(noun: str, rank: int, mine: Mapping[str, Any], theirs: object) -> str | None:
    """Returns a sentence about the first fact in which member ``rank`` differs from member 0, or None."""
    name_of = f"{noun.capitalize()} {rank}"
    if not isinstance(theirs, dict):
        return f"{name_of} does not say what it runs."
    for name, value in mine.items():
        if theirs.get(name) != value:
            other = theirs.get(name)
            return f"{name_of} has another {name} than {noun} 0: {other} instead of {value}."
    return None


# The other members


@dataclass(frozen=True, slots=True)
class Joined:
    """A link to member 0, and its answer ``accepted``. ``own_address`` is this member's address for the others."""

    link: NodeLink
    own_address: str
    accepted: Any


async def join(place: Rendezvous, facts: Mapping[str, Any], stop_requested: asyncio.Event) -> Joined:
    """Joins member 0 as soon as it accepts connections. Raises ``ModelError`` if member 0 refuses this member or cannot
    be reached in time, and ``LinkEndedError`` if the connection fails.
    """
    link = await _connect(place, stop_requested)
    address, tokens = place.own_address or link.own_address, place.tokens()
    token = {} if tokens is None else {"token": dict(tokens.metadata)[HEADER]}
    link.send(FrameKind.HELLO, {"rank": place.rank, "address": address, "facts": facts, **token})
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            answer = await link.receive()
    except TimeoutError:
        raise LinkEndedError("does not answer") from None
    if answer.kind == FrameKind.REFUSED:
        raise ModelError(str(answer.value))
    if answer.kind != FrameKind.ACCEPTED:
        raise LinkEndedError(NO_MESSAGE)
    return Joined(link, address, answer.value)


async def _connect(place: Rendezvous, stop_requested: asyncio.Event) -> NodeLink:
    names = None if place.tls is None else own_names(place.tls)
    deadline = time.monotonic() + place.timeout
    local = None if place.own_address is None else (place.own_address, 0)
    next_line = 0.0
    while True:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                tls = None if place.tls is None else tls_context(place.tls, server=False)
                ends = await asyncio.open_connection(place.address, place.port, ssl=tls, local_addr=local)
            link = NodeLink(*ends)
            if names is not None:
                link.check_peer(names)
            return link
        except ssl.SSLError as error:
            raise LinkEndedError(describe_failure(error)) from error
        except (OSError, TimeoutError) as error:
            if time.monotonic() > deadline:
                why = getattr(error, "strerror", None) or "it does not answer"
                raise ModelError(
                    f"{place.sentence_start} could not be joined within {place.timeout:g} seconds: {why}."
                ) from None
        if time.monotonic() >= next_line:
            log.warning("waiting for %s to take connections", place.master)
            next_line = time.monotonic() + WAITING_SECONDS
        with suppress(TimeoutError):
            await asyncio.wait_for(stop_requested.wait(), RETRY_SECONDS)
            raise ModelError(f"This {place.noun} was asked to stop before it joined {place.noun} 0.")
