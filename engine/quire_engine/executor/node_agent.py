"""``NodeAgent``: a machine of an engine other than node 0. It joins node 0, runs the ranks that it is given there, and
ends with them.
"""

import asyncio
import logging
import signal
import ssl
import time
from contextlib import suppress
from typing import Any

import torch
from quire_proto import __version__
from quire_proto.cli import join_host_port

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs, EngineConfig
from quire_engine.device.accelerator import resolve_device
from quire_engine.errors import ModelError
from quire_engine.executor.node_link import (
    HANDSHAKE_SECONDS,
    Frame,
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
from quire_engine.executor.rank_processes import EXIT_TIMEOUT_SECONDS, RankProcess
from quire_engine.executor.rank_worker import check_parallel_sizes
from quire_engine.models.loader import read_model_config

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
# After which it is said again that node 0 is waited for.
WAITING_SECONDS = 15.0
# After the time that node 0 has to finish its requests.
LEAVING_GRACE_SECONDS = 10.0


class NodeAgent:
    """The node ``config.node_rank`` of an engine, of which nothing but its ranks runs here. Raises ``ModelError`` for a
    model, a device or files of TLS that cannot be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.is_ready = False
        self._config = config
        self._names = None if config.tls is None else own_names(config.tls)
        model_config, device = read_model_config(config.model), resolve_device(config.device)
        check_parallel_sizes(config, model_config, device, config.nnodes)
        self._facts = node_facts(config, model_config, device, config.nnodes)
        self._processes: dict[int, RankProcess] = {}
        self._is_over = False

    def run(self) -> None:
        """Joins node 0 and runs ranks until node 0 ends the engine. Raises ``ModelError`` if it does not come to that:
        with what node 0 has against this node, or how the engine ended.
        """
        try:
            asyncio.run(self._run())
        except LinkEndedError as error:
            raise ModelError(f"Node 0 ({self._master}) {error}, and this node ends.") from None

    @property
    def _master(self) -> str:
        return join_host_port(self._config.master_addr, self._config.master_port)

    async def _run(self) -> None:
        self._stop_requested = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop_requested.set)
        reader, writer = await self._connect()
        ranks = await self._join(reader, writer)
        log.info("joined node 0 (%s) as node %d, with ranks %s", self._master, self._config.node_rank, ranks)
        self._processes = {rank: RankProcess(rank) for rank in ranks}
        sockets = {rank: process.link for rank, process in self._processes.items()}
        self._link = NodeLink(reader, writer, sockets, self._on_frame, self._on_rank_end)
        try:
            await self._run_link()
        finally:
            self._end_ranks()

    async def _run_link(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(self._leave_when_told())
            reason = await self._link.run()
            leaving.cancel()
        if not self._is_over:
            raise LinkEndedError(reason)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to node 0, as soon as it takes one."""
        config = self._config
        deadline = time.monotonic() + config.dist_timeout
        local = None if config.node_addr is None else (config.node_addr, 0)
        next_line = 0.0
        while True:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    tls = None if config.tls is None else tls_context(config.tls, server=False)
                    reader, writer = await asyncio.open_connection(
                        config.master_addr, config.master_port, ssl=tls, local_addr=local
                    )
                if self._names is not None:
                    check_peer(writer, self._names)
                return reader, writer
            except ssl.SSLError as error:
                raise LinkEndedError(_describe_tls(error)) from error
            except (OSError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    why = getattr(error, "strerror", None) or "it does not answer"
                    raise ModelError(
                        f"Node 0 ({self._master}) could not be joined within {config.dist_timeout:g} seconds: {why}."
                    ) from None
            if time.monotonic() >= next_line:
                log.warning("waiting for node 0 (%s) to take connections", self._master)
                next_line = time.monotonic() + WAITING_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), RETRY_SECONDS)
                raise ModelError("This node was told to stop before it joined node 0.")

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[int]:
        """Says what this node runs; returns the ranks that it is to run."""
        address = self._config.node_addr or writer.get_extra_info("sockname")[0]
        hello = {"node_rank": self._config.node_rank, "address": address, "facts": self._facts}
        write_frame(writer, FrameKind.HELLO, hello)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                answer = await read_frame(reader)
        except TimeoutError:
            raise LinkEndedError("does not answer") from None
        if answer.kind == FrameKind.REFUSED:
            raise ModelError(str(answer.value))
        if answer.kind != FrameKind.ACCEPTED:
            raise LinkEndedError("has sent what is no message")
        return [int(rank) for rank in answer.value]

    async def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READY:
            self.is_ready = True
        elif frame.kind == FrameKind.CLOSE:
            log.info("node 0 has ended the engine")
            self._is_over = True
            await asyncio.to_thread(self._end_ranks)
            raise LinkEndedError("has ended the engine")

    async def _on_rank_end(self, rank: int) -> None:
        """A rank has ended: tells node 0, and ends the others here."""
        if self._is_over:
            return
        reason = await asyncio.to_thread(self._processes[rank].exit_reason)
        self._link.send(FrameKind.RANK_ENDED, reason)
        await asyncio.sleep(EXIT_TIMEOUT_SECONDS)  # in which node 0 ends the connection
        raise LinkEndedError("knows that a rank of this node has ended")

    async def _leave_when_told(self) -> None:
        """Has the engine leave when this node is told to stop: node 0 finishes its requests, and then ends it."""
        await self._stop_requested.wait()
        log.info("leaving: node 0 ends the engine")
        self._link.send(FrameKind.LEAVING)
        config = self._config
        await asyncio.sleep(config.shutdown_delay + config.shutdown_timeout + LEAVING_GRACE_SECONDS)
        self._link.abort()

    def _end_ranks(self) -> None:
        for process in self._processes.values():
            process.close_link()
        deadline = time.monotonic() + (EXIT_TIMEOUT_SECONDS if self._is_over else 0.0)
        for process in self._processes.values():
            process.wait_or_kill(deadline)


def node_facts(config: EngineArgs, model_config: ModelConfig, device: torch.device, nnodes: int) -> dict[str, Any]:
    """What all nodes of an engine have in common, by its name, as JSON has it."""
    settings = config.model_dump(mode="json", include=set(EngineArgs.model_fields))
    return {
        "version of Quire": __version__,
        "version of torch": torch.__version__,
        "--nnodes": nnodes,
        **{f"--{name.replace('_', '-')}": value for name, value in settings.items()},
        "type of device": device.type,
        "revision of the model": model_config.model_revision,
    }


def _describe_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that does not pass --tls-client-ca ({error.verify_message})"
    return f"cannot be spoken to with TLS ({tls_reason(error)})"
