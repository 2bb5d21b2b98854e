"""``RankWorker``: the loop of a rank other than 0, which handles rank 0's calls in its own process."""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from quire_proto.logs import LogFormat, set_up_logging

from quire_engine.checkpoint.config import DecoderConfig, ModelConfig
from quire_engine.config import EngineArgs
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.device.host import tune_malloc
from quire_engine.distributed.pipeline import is_last
from quire_engine.distributed.rank_group import EnginePlace, RankGroup, RankStore, file_store
from quire_engine.errors import ModelError
from quire_engine.executor.rank_processes import describe_error
from quire_engine.executor.rpc import (
    MessageError,
    RpcArray,
    RpcMessage,
    RpcMethod,
    RpcReply,
    bitmask_from_arrays,
    json_from_array,
    json_to_array,
    output_to_arrays,
    receive,
    result_to_array,
    send,
    step_from_arrays,
    stored_from_arrays,
    stored_to_arrays,
)
from quire_engine.lora.adapter import adapter_bytes
from quire_engine.models.loader import model_class
from quire_engine.sampling.grammar_bitmask import GrammarBitmask
from quire_engine.worker.memory import GIB, CpuMemory, MemoryProfiler, check_host_memory
from quire_engine.worker.model_runner import LoadedModel, ModelRunner, load_model_and_attention
from quire_engine.worker.worker import LocalRank, LogitsError, Worker, on_device

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """All settings that the process of another rank needs. ``to_plain`` returns them as JSON values.

    ``threads`` is the number of threads per rank. ``device`` is rank 0's device; another rank uses the GPU with its
    local rank. Each of the ``nnodes`` machines runs the same number of ranks. Ranks on one machine meet in the folder
    ``rendezvous``; ranks on several machines use ``addresses``, one per node. ``place`` is this engine's place in its
    data-parallel group.
    """

    engine: EngineArgs
    config: ModelConfig
    device: str
    threads: int
    nnodes: int = 1
    rendezvous: Path = Path()
    addresses: tuple[str, ...] = ()
    log_level: int = 0
    log_format: LogFormat = "text"
    place: EnginePlace | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.engine.num_ranks

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self.size // self.nnodes

    @property
    def last_stage(self) -> range:
        """The ranks of a pipeline's last stage; none without a pipeline."""
        if self.engine.pipeline_parallel_size == 1:
            return range(0)
        return range(self.size - self.engine.tensor_parallel_size, self.size)

    def device_for(self, rank: int) -> torch.device:
        """Returns the device of ``rank``."""
        device = torch.device(self.device)
        if device.type == "cpu" or self.size == 1:
            return device
        return torch.device(device.type, rank % self.ranks_per_node)

    def connect(self, rank: int, group: RankGroup, store: RankStore) -> None:
        """Connects ``rank`` to the others. Ranks on one machine meet through a file, and ranks on several machines or
        in several engines through ``store``.
        """
        if self.nnodes == 1:
            group.connect(file_store(self.rendezvous, self.size), None, store)
        else:
            group.connect(store, self.addresses[rank // self.ranks_per_node])

    def make_group(self, rank: int) -> RankGroup:
        """Returns the ``RankGroup`` of ``rank``, not connected yet."""
        engine = self.engine
        sizes = engine.tensor_parallel_size, engine.pipeline_parallel_size
        return RankGroup(rank, *sizes, self.device_for(rank), ordered=engine.deterministic, place=self.place)

    def load(self, rank: int, group: RankGroup) -> LoadedModel:
        """Loads the model shard of ``rank``. Raises ``ModelError``."""
        if self.engine.cpu_offload_gb and self.device_for(rank).type != "cpu":
            check_host_memory(int(self.engine.cpu_offload_gb * GIB), self.ranks_per_node, CpuMemory())
        engine = self.engine.model_copy(update={"weights_memory_gb": self.weights_memory_gb(rank)})
        device, experts = self.device_for(rank), group.expert_communicator
        return load_model_and_attention(
            engine, self.config, device, group.communicator, group.stage, expert_ranks=experts
        )

    def weights_memory_gb(self, rank: int) -> float | None:
        """Returns the share of ``rank`` in the weights memory of its machine in GiB, in proportion to its layers."""
        limit, each = self.engine.weights_memory_gb, self.ranks_per_node
        if limit is None or self.size == 1:
            return limit
        layers, first = self.num_layers(), rank - rank % each
        return limit * layers[rank] / sum(layers[first : first + each])

    @property
    def lora_bytes(self) -> int:
        """The most bytes that adapters take on one rank. Tensors that are not sharded count as if they were."""
        engine, targets = self.engine, model_class(self.config).lora_targets(self.config)
        if not engine.enable_lora:
            return 0
        return engine.num_loras_held * adapter_bytes(targets, engine.max_lora_rank) // self.size

    def num_layers(self) -> list[int]:
        """Returns the number of layers of each rank."""
        table = model_class(self.config).shard_table(self.config)
        if table is None:  # the model runs in one process
            return [1]
        stages = table.stages(self.engine.pipeline_parallel_size)
        return [len(layers) for layers in stages for _ in range(self.engine.tensor_parallel_size)]

    def to_plain(self) -> dict[str, Any]:
        """Returns the settings as JSON values."""
        return {
            "engine": self.engine.model_dump(mode="json", include=set(EngineArgs.model_fields)),
            "config": asdict(self.config),
            "device": self.device,
            "threads": self.threads,
            "nnodes": self.nnodes,
            "rendezvous": str(self.rendezvous),
            "addresses": self.addresses,
            "log_level": self.log_level,
            "log_format": self.log_format,
            "place": None if self.place is None else asdict(self.place),
        }

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "RankSettings":
        """The inverse of ``to_plain``, for models with a ``DecoderConfig``."""
        engine, config = EngineArgs.model_validate(values["engine"]), DecoderConfig.from_plain(values["config"])
        rendezvous, addresses = Path(values["rendezvous"]), tuple(values["addresses"])
        place = None if values["place"] is None else EnginePlace(**values["place"])
        changed = {"engine": engine, "config": config, "rendezvous": rendezvous, "addresses": addresses, "place": place}
        return cls(**{**values, **changed})


@dataclass(slots=True)
class _LoadedRank:
    """The state of a rank after LOAD."""

    model: LoadedModel
    profiler: MemoryProfiler
    group: RankGroup
    settings: RankSettings


class RankWorker:
    """Handles the calls that arrive on ``link`` until the link ends. Reports failures to rank 0 and answers methods
    with ``has_reply``. Other results stay in this process.
    """

    def __init__(self, link: socket.socket, rank: int) -> None:
        self._link = link
        self._sending = Lock()
        self._rank = rank
        self._loaded_rank: _LoadedRank | None = None
        self._worker: Worker | None = None
        self._store = _LinkStore(self._receive_stored)
        self._store.attach(link, self._send_stored)
        self._handlers: dict[int, Callable[[Sequence[RpcArray]], object]] = {
            RpcMethod.LOAD: self._load,
            RpcMethod.CONNECT: self._connect,
            RpcMethod.PROFILE_MEMORY: self._profile_memory,
            RpcMethod.MAKE_RUNNER: self._make_runner,
            RpcMethod.CLOSE_RUNNER: self._close_runner,
            RpcMethod.CALL: self._call,
            RpcMethod.EXECUTE: self._execute,
            RpcMethod.BITMASK: lambda _: None,  # for another rank, or of a failed step
            RpcMethod.EXECUTE_DUMMY_BATCH: self._execute_dummy_batch,
            RpcMethod.STORE: self._put_stored,
        }

    def run(self, until: RpcMethod | None = None) -> None:
        """Handles calls until a message with method ``until`` arrives or the link ends."""
        while (message := self._receive()) is not None and message.code != until:
            self._handle(message)

    def _receive(self) -> RpcMessage | None:
        try:
            return receive(self._link)
        except OSError:  # rank 0 ended without reading the last reply
            return None

    def _handle(self, message: RpcMessage) -> None:
        exchanges_before = self._num_exchanges
        try:
            value = self._handlers[message.code](message.arrays)
        except LogitsError as error:
            code = RpcReply.FAILED if self._loaded_or_fail.group.stage is None else RpcReply.NO_LOGITS
            self._reply_failure(code, message.call_number, error.failure, exchanges_before)
        except Exception as error:  # noqa: BLE001 - rank 0 decides what follows
            self._reply_failure(RpcReply.FAILED, message.call_number, error, exchanges_before)
        else:
            if RpcMethod(message.code).has_reply:
                self._reply(RpcReply.DONE, message.call_number, value)

    @property
    def _num_exchanges(self) -> int:
        return self._loaded_rank.group.num_exchanges if self._loaded_rank else 0

    def _reply_failure(self, code: RpcReply, number: int, error: Exception, exchanges_before: int) -> None:
        log.debug("call %d failed", number, exc_info=error)
        collectives, user_error = self._num_exchanges - exchanges_before, isinstance(error, ModelError)
        reason = str(error) if user_error else describe_error(error)
        self._reply(code, number, {"collectives": collectives, "reason": reason, "user_error": user_error})

    def _reply(self, code: RpcReply, number: int, value: object) -> None:
        with suppress(OSError):  # rank 0 has ended, so the loop ends too
            self._send(RpcMessage(code, number, [json_to_array(value)]))

    def _send(self, message: RpcMessage) -> None:
        with self._sending:
            send(self._link, message)

    def _load(self, arrays: Sequence[RpcArray]) -> None:
        settings = RankSettings.from_plain(json_from_array(arrays[0]))
        set_up_logging(settings.log_level, settings.log_format, rank=self._rank)
        torch.set_num_threads(settings.threads)
        device, group = settings.device_for(self._rank), settings.make_group(self._rank)
        profiler = MemoryProfiler(device, settings.lora_bytes)
        with on_device(device):
            model = settings.load(self._rank, group)
        if device.type == "cpu":
            tune_malloc()
        self._loaded_rank = _LoadedRank(model, profiler, group, settings)

    def _connect(self, _: Sequence[RpcArray]) -> None:
        loaded = self._loaded_or_fail
        with on_device(loaded.model.device):
            loaded.settings.connect(self._rank, loaded.group, self._store)

    def _send_stored(self, key: str, value: bytes) -> None:
        self._send(RpcMessage(RpcReply.STORED, 0, stored_to_arrays(key, value)))

    def _receive_stored(self) -> None:
        """Waits for a value that another rank stores. While ranks connect, no other message arrives."""
        message = receive(self._link)
        if message is None or message.code != RpcMethod.STORE:
            raise MessageError("Rank 0 stores nothing while ranks connect.")
        self._put_stored(message.arrays)

    def _put_stored(self, arrays: Sequence[RpcArray]) -> None:
        self._store.put(*stored_from_arrays(arrays), self._link)

    def _profile_memory(self, arrays: Sequence[RpcArray]) -> dict[str, Any]:
        """Profiles this rank. If there is a largest step, it consists of the calls up to END_PROFILE."""
        with_step: bool = json_from_array(arrays[0])
        return asdict(
            self._loaded_or_fail.profiler.profile((lambda: self.run(RpcMethod.END_PROFILE)) if with_step else None)
        )

    def _make_runner(self, arrays: Sequence[RpcArray]) -> None:
        model, with_graphs = self._loaded_or_fail.model, json_from_array(arrays[1])
        if not with_graphs:
            model = replace(model, graph_sizes=())
        with on_device(model.device):
            runner = ModelRunner(model, model.cache_sizes(*json_from_array(arrays[0])), alone=False)
        group = self._loaded_or_fail.group
        is_sampler = group.stage is not None and is_last(group.stage) and group.communicator.rank == 0
        ranks = LocalRank(runner, group.broadcast, rank=self._rank, is_sampler=is_sampler)
        self._worker = Worker(model, ranks, filler=_ReceivedBitmasks(self._receive), report=self._report)

    def _close_runner(self, _: Sequence[RpcArray]) -> None:
        self._worker_or_fail.close()
        self._worker = None

    def _execute(self, arrays: Sequence[RpcArray]) -> None:
        """Executes this rank's part of a step. The rank that samples executes all of it and sends the output."""
        worker, (output, sampled, without_loras) = self._worker_or_fail, step_from_arrays(arrays)
        step = worker.follow(output, sampled, without_loras)
        if not worker.ranks.is_sampler:
            step.end(with_logits=is_last(self._loaded_or_fail.group.stage))
            return
        step.sample_tokens()
        if not output.rows:
            return
        try:
            made = output_to_arrays(step.get_output())
        except LogitsError:
            raise
        except Exception as error:  # noqa: BLE001 - only the step has failed
            reply = RpcMessage(RpcReply.NO_OUTPUT, 0, [json_to_array({"reason": describe_error(error)})])
        else:
            reply = RpcMessage(RpcReply.OUTPUT, 0, made)
        with suppress(OSError):  # rank 0 has ended
            self._send(reply)

    def _execute_dummy_batch(self, _: Sequence[RpcArray]) -> None:
        with on_device(self._loaded_or_fail.model.device):
            self._worker_or_fail.ranks.execute_dummy_batch()

    def _call(self, arrays: Sequence[RpcArray]) -> object:
        """Makes a rare call. Returns the worker's answer."""
        name, *arguments = json_from_array(arrays[0])
        return self._worker_or_fail.answer(name, *arguments)

    def _report(self, result: TransferResult) -> None:
        """Sends the result of a transfer to rank 0. Runs on a disk thread."""
        if result.reason:
            result = replace(result, reason=f"rank {self._rank}: {result.reason}")
        with suppress(OSError):
            self._send(RpcMessage(RpcReply.TRANSFERRED, 0, [result_to_array(result)]))

    @property
    def _loaded_or_fail(self) -> _LoadedRank:
        assert self._loaded_rank is not None, "LOAD comes first"
        return self._loaded_rank

    @property
    def _worker_or_fail(self) -> Worker:
        assert self._worker is not None, "MAKE_RUNNER comes first"
        return self._worker


class _LinkStore(RankStore):
    """The store of a rank that waits for values by calling ``receive_stored``, because no other thread reads its
    link.
    """

    def __init__(self, receive_stored: Callable[[], None]) -> None:
        super().__init__()
        self._receive_stored = receive_stored

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """See ``Store.wait``. Waits as long as the link lives."""
        while not self.check(keys):
            self._receive_stored()


class _ReceivedBitmasks:
    """Implements ``AnyBitmaskFiller`` with bitmasks that rank 0 fills. Rank 0 sends the bitmask of a step after the
    step.
    """

    def __init__(self, receive_next: Callable[[], RpcMessage | None]) -> None:
        self._receive_next = receive_next

    def start(self, _draws: Sequence[object]) -> "_ReceivedBitmasks":
        """See ``AnyBitmaskFiller.start``. Each step has one bitmask."""
        return self

    def wait(self) -> GrammarBitmask:
        """See ``AnyPendingBitmask.wait``. Raises ``MessageError``."""
        message = self._receive_next()
        if message is None or message.code != RpcMethod.BITMASK:
            raise MessageError("A step has grammars, and no bitmask comes behind it.")
        return bitmask_from_arrays(message.arrays)

    def close(self) -> None:
        """See ``AnyBitmaskFiller.close``."""
