"""``EngineClient``: what the rest of a router needs of an engine, whoever has written it.

Implementations: ``connection.EngineConnection``, for Quire's engines, and ``external.client.ExternalEngine``, for
servers that speak HTTP. Both take and report the messages of ``quire.v1``: requests, load, changes of a prefix cache.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from quire.v1 import engine_pb2

from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.engines.output_stream import OutputStream

KvListener = Callable[[engine_pb2.Snapshot | engine_pb2.KvEvent], None]
"""Is called with every change of an engine's prefix cache; a Snapshot replaces all that was known."""

LoadListener = Callable[[engine_pb2.Load], None]
"""Is called with each report of an engine's load; must not keep the message."""


T = TypeVar("T")


class Offload(Protocol):
    """Runs work on a thread, in the turn of the tenant, or of the server, that it is for."""

    async def __call__(self, tenant: str, work: Callable[[], T]) -> T:
        """Returns or raises what ``work`` does."""
        ...


async def on_any_thread(tenant: str, work: Callable[[], T]) -> T:  # noqa: ARG001 - as ``Offload``
    """``Offload`` without turns."""
    return await asyncio.to_thread(work)


LONG = 16 * 2**10  # bytes


async def offload_long(offload: Offload, tenant: str, size: int, work: Callable[[], T]) -> T:
    """Returns what ``work`` makes of so many bytes, which is done on a thread if they are more than ``LONG``."""
    return work() if size <= LONG else await offload(tenant, work)


class EngineClient(Protocol):
    """One engine, connected for as long as it is started.

    Implementations are made with callbacks for what comes without being asked for: that ``ready`` may have changed, the
    engine's load, changes of its prefix cache, and that all it reported before is void. They call none of them after
    ``close``, and never at once from within ``submit``.
    """

    address: str

    @property
    def description(self) -> engine_pb2.DescribeResponse | None:
        """What the engine serves and how large it is, as it said last; None until it has. Another object where that has
        changed. Sizes of 0 are not known.
        """
        ...

    @property
    def generation(self) -> int:
        """Another number after each start of the engine; 0 until it is connected."""
        ...

    @property
    def condition(self) -> EngineCondition:
        """How the connection is, in a word."""
        ...

    @property
    def problem(self) -> str:
        """Why it is not connected, as far as that was observed; empty while it is."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would be run."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it has given a sign of life just now. One that is not expected to gives none before a ``probe``."""
        ...

    @property
    def loras(self) -> Mapping[str, LoRA]:
        """The engine's adapters by name."""
        ...

    @property
    def unloaded_loras(self) -> Collection[LoRA]:
        """Adapters that the engine had and has no more, because they were unloaded there."""
        ...

    @property
    def active_loras(self) -> set[str]:
        """The adapters that requests there run with or wait for; dispatches add to it."""
        ...

    def start(self) -> None:
        """Starts to connect; never waits, never fails."""
        ...

    def retry_now(self) -> None:
        """Ends the pause between two tries to connect, and lets the next tries follow closely, because there is reason
        to think that the engine is back.
        """
        ...

    async def close(self) -> None:
        """Disconnects; what is in flight ends with ``EngineLost``."""
        ...

    def submit(self, message: engine_pb2.Submit, tenant: str = "") -> OutputStream:
        """Sends a request of a ``tenant``; does not wait. Closing the stream cancels it at the engine. Raises
        ``EngineLost`` if the engine is not connected, ``EngineFull`` if too many requests wait to be sent, and
        ``RequestUnsupported`` if it cannot run this one.
        """
        ...

    def expect_cached(self, hashes: Sequence[bytes]) -> None:
        """Another router has sent a prompt there with these blocks. Engines that report what they cache ignore it."""
        ...

    def on_forwarded_gap(self, seconds: float, sequences: int) -> None:
        """A request that others sent there had a token so many seconds after the one before, while so many sequences
        decoded. Engines that report their pace ignore it.
        """
        ...

    def on_forwarded_prompt(self, seconds: float, tokens: int) -> None:
        """A prompt that others sent there, with ``tokens`` that were not cached, had its first token after ``seconds``,
        alone. Engines that report their pace ignore it.
        """
        ...

    async def probe(self) -> None:
        """Finds out whether an engine is alive that is not expected to send anything now."""
        ...

    async def inspect(self) -> engine_pb2.InspectResponse | None:
        """Asks the engine what its blocks hold. Returns None if it cannot say."""
        ...

    async def load_lora(self, name: str, path: str, digest: bytes = b"") -> bytes:
        """Loads an adapter at the engine, that with the ``digest`` if one is given. Returns its digest. Raises
        ``grpc.aio.AioRpcError``, or ``EngineLost`` if it is not connected. Not called where ``max_loras`` of the
        ``description`` is 0.
        """
        ...

    async def sleep(self, wait_seconds: float) -> None:
        """Puts the engine to sleep when its requests have ended, for which it waits so long. Raises as ``load_lora``.
        Not called unless the ``description`` says that it ``can_sleep``, nor is ``wake_up``.
        """
        ...

    async def wake_up(self) -> None:
        """Wakes the engine up, and returns when it is ready. Raises as ``load_lora``."""
        ...

    async def unload_lora(self, name: str) -> None:
        """Unloads an adapter, as far as new requests are concerned; one that is not there is unloaded. Raises as
        ``load_lora``.
        """
        ...
