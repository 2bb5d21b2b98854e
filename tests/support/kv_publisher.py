"""A publisher of KV events as vLLM's ``ZmqEventPublisher`` is: PUB for what is new, ROUTER for what is asked for again,
objects of msgspec declared as its own are, as maps (newer versions) or arrays (older ones).
"""

import asyncio
import time
from collections import deque
from itertools import count
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

END = (1 << 64) - 1


class EventBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class ArrayBatch(EventBatch, array_like=True):
    pass


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class BlockRemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class AllBlocksClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class OldBlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    """As vLLM 0.10 has it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


def stored(
    hashes: list[int | bytes],
    tokens: list[int],
    parent: int | bytes | None = None,
    *,
    size: int = 16,
    arrays: bool = False,
    **more: Any,
) -> BlockStored:
    """An event of blocks that follow ``parent``."""
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * len(hashes)} | more
    return (BlockStoredArray if arrays else BlockStored)(hashes, parent, tokens, size, **fields)


def removed(hashes: list[int | bytes], *, arrays: bool = False, **more: Any) -> BlockRemoved:
    """An event of blocks that were evicted."""
    return (BlockRemovedArray if arrays else BlockRemoved)(hashes, **({"medium": "GPU"} | more))


def batch(*events: Any, ts: float = 1.0, arrays: bool = False) -> bytes:
    """A message's payload."""
    return msgspec.msgpack.encode((ArrayBatch if arrays else EventBatch)(ts, list(events), 0))


class KvPublisher:
    """Publishes at ``host`` on ``port``; with ``replays`` it repeats its last ``steps`` on ``replay_port``, with the
    topic before each as newer versions do (vLLM's pull request 45177), or without it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        *,
        replays: bool = True,
        steps: int = 10_000,
        topic: bytes | None = b"kv-events",
    ) -> None:
        context = zmq.asyncio.Context.instance()
        self._replayed_topic, self._end_topic = ([], []) if topic is None else ([topic], [b""])
        self.replays = 0
        self._first_ts = 1.0
        self._sequence = count()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=steps)
        self._pub = context.socket(zmq.XPUB)  # as PUB, and says when there is a subscriber
        self._router = context.socket(zmq.ROUTER)
        self.port = self._bind(self._pub, host, port)
        self.replay_port = self._bind(self._router, host, replay_port) if replays else 0
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._serve()) if replays else None

    def _bind(self, socket: Any, host: str, port: int) -> int:
        socket.setsockopt(zmq.LINGER, 0)
        for attempt in count():
            try:
                socket.bind(f"tcp://{host}:{port or '*'}")
            except zmq.ZMQError:  # who had the port before closes it on a thread of its own
                if attempt == 500:
                    raise
                time.sleep(0.01)
            else:
                break
        return int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1].rstrip("\0"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close()
        self._router.close()

    async def subscribed(self) -> None:
        """Returns when somebody has subscribed."""
        async with asyncio.timeout(20):
            while (await self._pub.recv())[:1] != b"\1":  # or somebody has left
                pass

    async def publish(self, *events: Any, ts: float = 1.0, arrays: bool = False, lost: bool = False) -> None:
        """Sends the events of one step; ``lost`` on its way."""
        await self.publish_raw(batch(*events, ts=ts, arrays=arrays), lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        """Sends any payload."""
        sequence = next(self._sequence)
        self._buffer.append((sequence, payload))
        if not lost:
            await self._pub.send_multipart([b"kv-events", sequence.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays += 1
            for sequence, payload in list(self._buffer):
                if sequence >= int.from_bytes(start, "big"):
                    frames = [*self._replayed_topic, sequence.to_bytes(8, "big"), payload]
                    await self._router.send_multipart([client, b"", *frames])
            await self._router.send_multipart([client, b"", *self._end_topic, END.to_bytes(8, "big"), b""])
