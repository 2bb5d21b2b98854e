"""``NodeAgent``: runs one machine of a multi-node engine, other than node 0. It joins node 0, runs the ranks that node
0 assigns to it, and exits when node 0 ends the engine.
"""

import asyncio
import logging
import signal
import time
from typing import Any

import torch

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs, EngineConfig
from quire_engine.device.accelerator import resolve_device
from quire_engine.errors import ModelError
from quire_engine.executor.child_process import EXIT_TIMEOUT_SECONDS
from quire_engine.executor.node_hub import node_rendezvous
from quire_engine.executor.node_link import Frame, FrameKind, LinkEndedError
from quire_engine.executor.rank_processes import RankProcess
from quire_engine.executor.rendezvous import facts_in_common, join
from quire_engine.executor.start_checks import check_start
from quire_engine.models.loader import read_model_config

log = logging.getLogger(__name__)

# Added to the time that node 0 has to finish its requests.
LEAVING_GRACE_SECONDS = 10.0


class NodeAgent:
    """Node ``config.node_rank`` of an engine. This machine runs only rank processes; node 0 runs the scheduler and the
    server.

    Raises ``ModelError`` if the model, the device or the TLS files cannot be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.is_ready = False
        self._config = config
        self._place = node_rendezvous(config)
        model_config, device = read_model_config(config.model, config), resolve_device(config.device)
        check_start(config, model_config, device, config.nnodes)
        self._facts = node_facts(config, model_config, device, config.nnodes)
        self._processes: dict[int, RankProcess] = {}
        self._is_over = False

    def run(self) -> None:
        """Joins node 0 and runs ranks until node 0 ends the engine.

        Raises ``ModelError`` if node 0 refuses this node, with its reason, or if the engine ends in any other way.
        """
        try:
            asyncio.run(self._run())
        except LinkEndedError as error:
            raise ModelError(f"{self._place.sentence_start} {error}, and this node ends.") from None

    async def _run(self) -> None:
        self._stop_requested = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop_requested.set)
        joined = await join(self._place, self._facts, self._stop_requested)
        ranks = [int(rank) for rank in joined.accepted]
        log.info("joined as node %d, with ranks %s", self._config.node_rank, ranks)
        self._processes = {rank: RankProcess(rank) for rank in ranks}
        self._link = joined.link
        try:
            await self._run_link()
        finally:
            self._end_ranks()

    async def _run_link(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(self._leave_when_told())
            sockets = {rank: process.link for rank, process in self._processes.items()}
            reason = await self._link.run(self._on_frame, sockets, self._on_rank_end)
            leaving.cancel()
        if not self._is_over:
            raise LinkEndedError(reason)

    async def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READY:
            self.is_ready = True
        elif frame.kind == FrameKind.CLOSE:
            log.info("node 0 has ended the engine")
            self._is_over = True
            await asyncio.to_thread(self._end_ranks)
            raise LinkEndedError("has ended the engine")

    async def _on_rank_end(self, rank: int) -> None:
        """Reports to node 0 that ``rank`` has ended, then ends the link and with it the other ranks of this node."""
        if self._is_over:
            return
        reason = await asyncio.to_thread(self._processes[rank].exit_reason)
        self._link.send(FrameKind.RANK_ENDED, reason)
        await asyncio.sleep(EXIT_TIMEOUT_SECONDS)  # node 0 closes the connection in this time
        raise LinkEndedError("knows that a rank of this node has ended")

    async def _leave_when_told(self) -> None:
        """Waits for SIGTERM or SIGINT, then asks node 0 to finish its requests and end the engine."""
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
    """Returns what all nodes of an engine must have in common, by name, as JSON values."""
    return facts_in_common(config, model_config, device, {"--nnodes": nnodes})
