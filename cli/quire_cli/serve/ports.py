"""Ports for the processes of ``quire serve``: those that the user named, or free ones.

A port is claimed for as long as this process lives, so that two trees that start at the same time do not choose the
same. The claim is an abstract Unix socket, which the kernel removes with its process.
"""

import socket
from dataclasses import dataclass, field
from time import monotonic, sleep

from quire_cli.machine.sockets import LOCALHOST, is_free
from quire_cli.serve.log import SELF, WriteLine

MAX_PORT = 65535
PATIENCE = 2.0  # seconds in which the processes of a tree that was just killed give their ports back


class PortError(Exception):
    """A port that was named cannot be used. The text is one sentence."""


@dataclass
class Ports:
    """Gives out ports. ``say`` prints a line when it is not the usual one."""

    say: WriteLine
    _claims: dict[int, socket.socket] = field(default_factory=dict)
    _owners: dict[int, str] = field(default_factory=dict)

    def named(self, port: int, owner: str, flag: str, host: str = LOCALHOST) -> int:
        """The port that the user named. Raises ``PortError`` if it cannot be had."""
        if port > MAX_PORT:
            raise PortError(f"port {port}, for {owner}, does not exist; the highest is {MAX_PORT}.")
        if port in self._owners:
            raise PortError(f"port {port} is wanted twice: for {self._owners[port]} and for {owner}.")
        if not self._claim_soon(port, owner, host):
            raise PortError(f"port {port} is in use, which {owner} needs; {flag} chooses another one.")
        return port

    def free(self, port: int, owner: str, step: int = 1, host: str = LOCALHOST, *, tell: bool = False) -> int:
        """The port, or the next free one, ``step`` above it each; with ``tell`` it is worth waiting for, and the user
        hears of another one. Raises ``PortError`` if there is none.
        """
        if tell and port not in self._owners and self._claim_soon(port, owner, host):
            return port
        for candidate in range(port, MAX_PORT + 1, step):
            if candidate not in self._owners and self._claim(candidate, owner, host):
                if tell and candidate != port:
                    self.say(f"port {port} is in use: {owner} takes {candidate}", SELF)
                return candidate
        raise PortError(f"no port from {port} on is free, for {owner}.")

    def _claim_soon(self, port: int, owner: str, host: str) -> bool:
        end = monotonic() + PATIENCE
        while not self._claim(port, owner, host):
            if monotonic() > end:
                return False
            sleep(0.05)
        return True

    def _claim(self, port: int, owner: str, host: str) -> bool:
        if not is_free(port, host):
            return False
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0quire-port-{port}")
        except OSError:  # another tree is about to use it
            claim.close()
            return False
        self._claims[port], self._owners[port] = claim, owner
        return True
