"""A network of its own for a process, which can be cut off as a node can: what is sent to it is lost, and nothing says
so.
"""

import ctypes
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000


class NetNamespace:
    """The network namespace ``name``, in which ``address`` is reached from outside."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def cut_off(self) -> None:
        """Drops all that comes and goes, from now on."""
        _run("ip", "netns", "exec", self.name, "nft", "add table inet lost")
        for hook in ("input", "output"):
            chain = f"add chain inet lost {hook} {{ type filter hook {hook} priority 0; policy drop; }}"
            _run("ip", "netns", "exec", self.name, "nft", chain)

    def heal(self) -> None:
        """Ends ``cut_off``."""
        _run("ip", "netns", "exec", self.name, "nft", "delete table inet lost")


@contextmanager
def net_namespace() -> Iterator[NetNamespace]:
    """Makes one, and removes it. Skips the test where that cannot be done."""
    number = random.SystemRandom().randrange(1 << 14)
    name, outer, inner = f"quire-{number}", f"qo{number}", f"qi{number}"
    network = f"10.213.{number >> 6}"
    first = (number & 63) * 4
    try:
        _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a network namespace takes the right to make one, and the program ip: {error}")
    try:
        try:
            _run("ip", "netns", "exec", name, "nft", "list tables")
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"to cut a network off takes the program nft and pairs of devices: {error}")
        _run("ip", "addr", "add", f"{network}.{first + 1}/30", "dev", outer)
        _run("ip", "link", "set", outer, "up")
        _run("ip", "-n", name, "addr", "add", f"{network}.{first + 2}/30", "dev", inner)
        for device in (inner, "lo"):
            _run("ip", "-n", name, "link", "set", device, "up")
        yield NetNamespace(name, f"{network}.{first + 2}")
    finally:
        _run("ip", "netns", "del", name)  # and its devices, once its last process has ended


def enter(name: str) -> None:
    """Has this thread, and the processes and threads that it starts, use the namespace's network."""
    with open(f"/var/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
