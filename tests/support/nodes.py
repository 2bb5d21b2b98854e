"""Machines of one engine: several addresses of this one, and certificates by which they know each other."""

import sys
from pathlib import Path

from quire_proto.tls import CertKeyFiles

from tests.support.certificates import Authority
from tests.support.forked_engines import ForkedProcess
from tests.support.ports import free_port

MASTER, OTHER = "127.0.0.2", "127.0.0.3"
NODE_NAME = "quire-node.test"


def tls_flags(files: CertKeyFiles, authority: Authority) -> list[str]:
    return ["--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--tls-client-ca", str(authority.ca)]


class Node(ForkedProcess):
    """Node ``rank`` of an engine, of those that run ranks alone."""

    def __init__(self, folder: Path, *flags: str, rank: int = 1, address: str = OTHER) -> None:
        self.metrics_port = free_port()
        command = [sys.executable, "-m", "quire_engine.cli", *flags, "--node-rank", str(rank), "--node-addr", address]
        command += ["--metrics-port", str(self.metrics_port)]
        super().__init__(command, folder / f"node-{self.metrics_port}.log")
