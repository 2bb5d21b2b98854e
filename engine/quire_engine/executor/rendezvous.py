"""How the machines of one engine, or the engines of a data-parallel group, find each other. Member 0 listens as a
``RendezvousHub``, and the others ``join`` it. It accepts members that run the same model with the same settings, and
refuses all others with the reason.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Thread
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
    HANDSHAKE_SECONDS,
    FrameKind,
    LinkEndedError,
    NodeLink,
    check_peer,
    own_names,
    read_frame,
    tls_context,
    tls_reason,
    write_frame,
)

log = logging.getLogger(__name__)

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
    """A member that has joined: its ``rank``, its ``address`` and its ``link``."""

    rank: int
    address: str
    link: NodeLink

    @property
    def accepted(self) -> object:
        """What member 0 sends to it with ACCEPTED."""
        ...

    def end(self, reason: str) -> None:
        """Handles the end of its link after all members had joined. ``reason`` is the end of a sentence about the
        member.
        """
        ...


M = TypeVar("M", bound=Member)
MakeMember = Callable[[int, str, asyncio.StreamReader, asyncio.StreamWriter], M]


class RendezvousHub(Generic[M]):
    """Waits for the other members at ``place``. ``make_member`` turns the rank, address and connection of each into an
    object. ``facts`` are what a member must have in common with this one.

    The links run in an event loop on their own thread, which also makes and ends members. Raises ``ModelError``, and
    ``TlsError`` if the TLS files cannot be used.
    """

    def __init__(self, place: Rendezvous, facts: Mapping[str, Any], make_member: MakeMember[M]) -> None:
        self._place = place
        self._facts = facts
        self._make_member = make_member
        self._own_address = place.own_address or place.address
        self._names = None if place.tls is None else own_names(place.tls)
        self._tokens = place.tokens()
        self._joined: dict[int, M] = {}
        self._changed = Condition()
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._strangers = 0
        self._start_error: OSError | None = None
        self._started = Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._thread = Thread(target=self._run_loop, name=f"{place.noun}-links", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise ModelError(
                f"Other {place.noun}s cannot join here: {self._start_error.strerror or self._start_error}."
            )

    def wait_joined(self) -> list[M]:
        """Waits for all other members. Returns them in order. Raises ``ModelError`` if one has not joined in time."""
        missing: list[int] = []

        def all_joined() -> bool:
            missing[:] = [rank for rank in range(1, self._place.count) if rank not in self._joined]
            return not missing

        address, noun = join_host_port(self._own_address, self._place.port), self._place.noun
        deadline = time.monotonic() + self._place.timeout
        with self._changed:
            while not all_joined():
                names, left = ", ".join(map(str, missing)), deadline - time.monotonic()
                if left <= 0:
                    late = (
                        f"{noun.capitalize()} {names} has"
                        if len(missing) == 1
                        else f"{noun.capitalize()}s {names} have"
                    )
                    raise ModelError(f"{late} not joined within {self._place.timeout:g} seconds.")
                # A warning, because a program that is started by hand shows nothing less severe, and nothing else is
                # visible meanwhile.
                who = noun if len(missing) == 1 else f"{noun}s"
                log.warning("waiting for %s %s to join at %s, for up to %.0f seconds", who, names, address, left)
                self._changed.wait_for(all_joined, min(left, WAITING_SECONDS))
            return [member for _, member in sorted(self._joined.items())]

    @property
    def addresses(self) -> list[str]:
        """The address of each member for the others, in order. Requires that all have joined."""
        return [self._own_address, *(member.address for _, member in sorted(self._joined.items()))]

    def call(self, work: Callable[..., object], *arguments: object) -> None:
        """Runs ``work`` on the thread of the links, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *arguments)

    def stop_listening(self) -> None:
        """Accepts no more members. A late member then gets no connection here and may find the next hub."""
        assert self._server is not None, "it has started"
        self.call(self._server.close)

    def close(self) -> None:
        """Ends all links. The other members notice that this one is gone."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # On the loop's thread

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            self._server = await asyncio.start_server(self._on_connection, self._own_address, self._place.port)
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        async with self._server:
            await self._stop.wait()
            for writer in self._connections.values():
                writer.transport.abort()
            if self._connections:
                await asyncio.wait(list(self._connections))

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None, "a connection has a task of its own"
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)
        name = writer.get_extra_info("peername")  # None if the peer has closed the connection again
        peer = name[0] if name else "somebody"
        if self._strangers >= MAX_STRANGERS:
            writer.transport.abort()
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                member = await self._admit(reader, writer, peer)
        except (LinkEndedError, OSError, TimeoutError) as error:
            log.warning("a connection of %s is refused: it %s", peer, _describe_refused(error))
            writer.transport.abort()
            return
        finally:
            self._strangers -= 1
        await self._run_member(member)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> M:
        if self._place.tls is not None and self._names is not None:
            await writer.start_tls(tls_context(self._place.tls, server=True))
            check_peer(writer, self._names)
        hello = await read_frame(reader)
        if hello.kind != FrameKind.HELLO or not isinstance(hello.value, dict):
            raise LinkEndedError("has sent something that is not a message")
        rank = hello.value.get("rank")
        if not isinstance(rank, int):
            raise LinkEndedError("has sent something that is not a message")
        if (refusal := self._refusal(rank, hello.value)) is not None:
            write_frame(writer, FrameKind.REFUSED, refusal)
            await writer.drain()
            raise LinkEndedError(f"is refused: {refusal}")
        member = self._make_member(rank, str(hello.value.get("address", peer)), reader, writer)
        with self._changed:  # once the member reads the answer, all must see it as joined
            write_frame(writer, FrameKind.ACCEPTED, member.accepted)
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
        reason = "cannot be spoken to"
        try:
            reason = await member.link.run()
        finally:
            with self._changed:
                is_complete = len(self._joined) == self._place.count - 1
                if not is_complete:  # it can join again
                    log.warning("%s %d (%s) %s", self._place.noun, member.rank, member.address, reason)
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


def _describe_refused(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"has not joined within {HANDSHAKE_SECONDS:g} seconds"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that does not pass --tls-client-ca ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"shows no certificate that passes --tls-client-ca ({tls_reason(error)})"
    return str(error) if isinstance(error, LinkEndedError) else "has closed the connection"


# The other members


@dataclass(frozen=True, slots=True)
class Joined:
    """An accepted connection to member 0, and its answer ``accepted``. ``own_address`` is this member's address for the
    others.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    own_address: str
    accepted: Any


async def join(place: Rendezvous, facts: Mapping[str, Any], stop_requested: asyncio.Event) -> Joined:
    """Joins member 0 as soon as it accepts connections. Raises ``ModelError`` if member 0 refuses this member or cannot
    be reached in time, and ``LinkEndedError`` if the connection fails.
    """
    reader, writer = await _connect(place, stop_requested)
    address = place.own_address or writer.get_extra_info("sockname")[0]
    tokens = place.tokens()
    token = {} if tokens is None else {"token": dict(tokens.metadata)[HEADER]}
    write_frame(writer, FrameKind.HELLO, {"rank": place.rank, "address": address, "facts": facts, **token})
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            answer = await read_frame(reader)
    except TimeoutError:
        raise LinkEndedError("does not answer") from None
    if answer.kind == FrameKind.REFUSED:
        raise ModelError(str(answer.value))
    if answer.kind != FrameKind.ACCEPTED:
        raise LinkEndedError("has sent something that is not a message")
    return Joined(reader, writer, address, answer.value)


async def _connect(
    place: Rendezvous, stop_requested: asyncio.Event
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    names = None if place.tls is None else own_names(place.tls)
    deadline = time.monotonic() + place.timeout
    local = None if place.own_address is None else (place.own_address, 0)
    next_line = 0.0
    while True:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                tls = None if place.tls is None else tls_context(place.tls, server=False)
                reader, writer = await asyncio.open_connection(place.address, place.port, ssl=tls, local_addr=local)
            if names is not None:
                check_peer(writer, names)
            return reader, writer
        except ssl.SSLError as error:
            raise LinkEndedError(_describe_tls(error)) from error
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


def _describe_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that does not pass --tls-client-ca ({error.verify_message})"
    return f"cannot be spoken to with TLS ({tls_reason(error)})"
