"""``LoopLink``: the server's end of the link to the core's process, on an event loop."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quire_engine.core_client.core_messages import Link

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1 << 28
"""A core that leaves this much unread is lost."""


class LoopLink:
    """Sends messages without waiting, and calls ``on_message`` with each that arrives, and ``on_end`` at the end of the
    link. Before ``attach`` there is no loop: ``send`` waits, and ``receive`` reads. ``send`` is thread-safe.
    """

    def __init__(self, link: Link, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._link = link
        self._on_message = on_message
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.get_ident()
        self._unsent = bytearray()
        self._is_over = False

    @property
    def is_attached(self) -> bool:
        """Whether messages are read on an event loop."""
        return self._loop is not None

    def attach(self) -> None:
        """Reads on the running loop from now on."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._loop.add_reader(self._link.socket, self.receive, socket.MSG_DONTWAIT)

    def send(self, message: Any) -> None:
        """Sends a message. Messages of one thread keep their order. Raises ``ValueError`` if it is too long."""
        data = self._link.to_bytes(message)
        if self._loop is None:
            with suppress(OSError):  # the core is gone, which ``receive`` notices
                self._link.socket.sendall(data)
        elif threading.get_ident() == self._thread:
            self._write(data)
        else:
            self._call_soon(self._write, data)

    def send_later(self, message: Any) -> None:
        """Sends a message in a later round of the loop: a finalizer may run in the middle of another ``send``."""
        self._call_soon(self.send, message)

    def receive(self, flags: int = 0) -> None:
        """Reads once, and handles the messages that are complete."""
        try:
            messages = self._link.receive(flags)
        except BlockingIOError:
            return
        except OSError:
            messages = None
        except Exception:
            log.exception("the engine core has sent what cannot be read")
            messages = None
        if messages is None:
            self._stop()
            return
        for message in messages:
            self._on_message(message)

    def _call_soon(self, function: Callable[[Any], None], argument: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the core ends
                self._loop.call_soon_threadsafe(function, argument)

    def _write(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._unsent:
            self._unsent += data
        else:
            self._unsent += data[self._write_now(data) :]
            if self._unsent and self._loop is not None:
                self._loop.add_writer(self._link.socket, self._write_unsent)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._stop()

    def _write_unsent(self) -> None:
        del self._unsent[: self._write_now(self._unsent)]
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._link.socket)

    def _write_now(self, data: bytes | bytearray) -> int:
        """Writes what the socket takes now. Returns the number of bytes; all if the core is gone."""
        try:
            return self._link.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # which ``receive`` notices
            return len(data)

    def _stop(self) -> None:
        self._is_over = True
        if self._loop is not None:
            self._loop.remove_reader(self._link.socket)
            self._loop.remove_writer(self._link.socket)
        self._on_end()
