"""The command ``quire-engine``: reads the settings, loads the model, serves it."""

import logging
import os
import socket
import sys
from collections import Counter
from contextlib import closing
from threading import Timer
from time import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics
from quire.v1 import engine_pb2 as pb
from quire_proto import __version__
from quire_proto.cli import describe_listen_error, read_settings, reject_unknown_env
from quire_proto.convert import TASK_TO_PROTO
from quire_proto.engine_token import TokenError
from quire_proto.errors import QuireError
from quire_proto.folders import no_such_path
from quire_proto.logs import set_up_logging
from quire_proto.telemetry import DropReason
from quire_proto.terminal import fail
from quire_proto.text.model_folder import folder_config_digest, folder_vocabulary_digest
from quire_proto.tls import TlsError
from quire_proto.tracing import setup_tracing, shutdown_tracing

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder_if_any
from quire_engine.checkpoint.prefetch import prefetch_weights
from quire_engine.config import OTHER_VARIABLES, EngineConfig
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.startup import (
    PROGRESS_MARK,
    PROGRESS_VARIABLE,
    StartupPhase,
    StartupTimer,
    progress,
    report_facts,
)
from quire_engine.core.step_recording import RecordedEngine, StepRecorder
from quire_engine.errors import LoRAError, ModelError
from quire_engine.factory import (
    block_revision,
    load_executor,
    make_scheduler,
    model_grammars,
    settings_digest,
    supported_tasks,
)
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.probes import ProbeServer
from quire_engine.server.server import EngineServer

if TYPE_CHECKING:
    from quire_engine.executor.torch_executor import TorchExecutor

log = logging.getLogger("quire_engine")

LAST_SPANS_TIMEOUT = 2.0  # seconds


def main() -> None:
    """Runs the engine, or one of the subcommands ``simulate``, ``replay`` and ``bench``. Exits with 2 for wrong
    settings, and with 1 and one sentence for a model that cannot be served.

    Torch is imported only after the settings were checked.
    """
    arguments = sys.argv[1:]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC writes a line for what any client sends wrong
    if arguments[:1] == ["simulate"]:
        from quire_engine.simulation.command import simulate

        simulate(arguments[1:])
    elif arguments[:1] == ["replay"]:
        from quire_engine.simulation.replay import replay

        replay(arguments[1:])
    elif arguments[:1] == ["bench"]:
        from quire_engine.bench.bench_command import bench

        bench(arguments[1:])
    else:
        reject_unknown_env(EngineConfig, OTHER_VARIABLES)
        config = read_settings(EngineConfig, arguments)
        set_up_logging(config.log_level.upper(), config.log_format)
        if os.environ.get(PROGRESS_VARIABLE):
            _print_progress()
        (_run_engine if config.node_rank == 0 else _run_node)(config)


def _print_progress() -> None:
    """Writes how far the start is to standard output, each time in a line that begins with ``PROGRESS_MARK``."""
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(logging.Formatter(f"{PROGRESS_MARK}%(message)s"))
    progress.addHandler(lines)
    progress.setLevel(logging.INFO)
    progress.propagate = False


def _run_node(config: EngineConfig) -> None:
    """Runs ranks of an engine whose server is on another machine, and its probes."""
    from quire_engine.executor.node_agent import NodeAgent

    prefetch_weights(config.model)
    try:
        agent = NodeAgent(config)
        probes = {
            "/started": lambda: True,
            "/live": lambda: True,
            "/ready": lambda: agent.is_ready,
            "/health": lambda: agent.is_ready,
        }
        with closing(ProbeServer(config.host, config.metrics_port, CollectorRegistry(), probes)):
            agent.run()
    except ModelError as error:
        fail(str(error))
    except (OSError, TlsError) as error:
        fail(f"{error}.")


def _run_engine(config: EngineConfig) -> None:
    dropped = Counter[DropReason]()
    try:
        tracing = setup_tracing("quire-engine", max_links=config.max_num_seqs, dropped=dropped)
    except ValueError as error:
        fail(f"{error}.", status=2)
    try:
        _serve(config, dropped if tracing else None)
    except KeyboardInterrupt:
        pass
    finally:
        shutdown_tracing()


def _serve(config: EngineConfig, dropped_spans: Counter[DropReason] | None) -> None:
    import uvloop

    _check_ports(config)
    prefetch_weights(config.model)
    startup = StartupTimer()
    with closing(_load_executor(config, startup)) as executor:
        startup.begin(StartupPhase.SERVING)
        server = _make_server(config, executor, dropped_spans, startup)
        try:
            uvloop.run(server.serve())
        except OSError as error:
            fail(f"{error}.")


def _check_ports(config: EngineConfig) -> None:
    """Tries to listen before the model is loaded and others are waited for, either of which may take long."""
    for flag, port in (("--port", config.port), ("--metrics-port", config.metrics_port)):
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            socket.create_server((config.host, port), family=family).close()
        except OSError as error:
            fail(f"{describe_listen_error(flag, config.host, port, error)}.")


def _make_server(
    config: EngineConfig,
    executor: "TorchExecutor",
    dropped_spans: Counter[DropReason] | None,
    startup: StartupTimer,
) -> EngineServer:
    from quire_engine.device.accelerator import product_name, resolve_device

    disable_created_metrics()  # type: ignore[no-untyped-call]  # drops the unused _created sample of each counter
    scheduler = make_scheduler(config, executor)
    if config.lora_root is not None and not config.lora_root.is_dir():
        fail(f"--lora-root: {no_such_path(str(config.lora_root))}.")
    loras = LoRARegistry(executor.check_lora, config.names, config.lora_root)
    try:
        for name, folder in config.lora_folders.items():
            loras.load_now(name, folder)
    except (LoRAError, QuireError) as error:
        fail(str(error))
    description = _describe(config, executor, scheduler)
    report_facts(
        dtype=description.dtype,
        device=product_name(resolve_device(config.device)),
        max_model_len=description.max_model_len,
        kv_tokens=description.blocks_total // max(1, description.kv_cache_groups) * description.block_size,
    )
    recorder = _make_recorder(config, executor)
    try:
        return EngineServer(
            config,
            executor,
            scheduler,
            description,
            model_grammars(config, executor),
            loras=loras,
            dropped_spans=dropped_spans,
            weights=executor.weight_stats,
            data_parallel=executor.data_parallel,
            startup=startup,
            sleeper=executor if executor.can_sleep else None,
            recorder=recorder,
        )
    except (TlsError, TokenError) as error:  # the files changed after the settings were read
        fail(f"{error}.")


def _make_recorder(config: EngineConfig, executor: "TorchExecutor") -> StepRecorder | None:
    """Returns the recorder of all steps; None without ``--record-steps``, or where its file cannot be made."""
    if config.record_steps is None:
        return None
    engine = RecordedEngine(config.names[0], executor.config.vocab_size, executor.kv_cache_config)
    try:
        return StepRecorder(config.record_steps, engine, int(config.record_steps_gib * (1 << 30)))
    except FileExistsError:
        log.warning("no steps are recorded: %s exists; choose a new name", config.record_steps)
    except OSError as error:
        log.warning("no steps are recorded: %s", error)
    return None


def _load_executor(config: EngineConfig, startup: StartupTimer) -> "TorchExecutor":
    try:
        return load_executor(config, _exit_on_lost_rank, owns_process=True, nodes=config, startup=startup)
    except ModelError as error:
        fail(str(error))


def _exit_on_lost_rank(sentence: str) -> None:
    """Ends the process because a rank is lost: a step that waits for it cannot return, so the event loop may not end
    it. Exports spans and log lines first, for at most ``LAST_SPANS_TIMEOUT``.
    """
    log.critical("%s The engine ends.", sentence)
    watchdog = Timer(LAST_SPANS_TIMEOUT, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    shutdown_tracing()
    logging.shutdown()
    os._exit(1)


def _describe(config: EngineConfig, executor: "TorchExecutor", scheduler: Scheduler) -> pb.DescribeResponse:
    from quire_engine.device.accelerator import product_name, resolve_device

    folder = tokenizer_folder_if_any(config.model)
    pooler = executor.config.pooler_config
    return pb.DescribeResponse(
        served_model_names=config.names,
        model_revision=block_revision(config, executor),
        max_model_len=scheduler.config.max_model_len,
        vocab_size=executor.config.vocab_size,
        eos_token_ids=executor.config.eos_token_ids,
        block_size=executor.kv_cache_config.block_size,
        kv_cache_groups=len(executor.kv_cache_config.groups),
        blocks_total=executor.kv_cache_config.device_blocks - 1,
        host_blocks_total=executor.kv_cache_config.host_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=executor.dtype_name,
        version=__version__,
        prefix_caching=scheduler.kv_cache_manager.prefix_caching,
        tokenizer_digest=folder_vocabulary_digest(folder),
        config_digest=folder_config_digest(folder),
        unbounded_steps=config.max_step_seconds == 0,
        max_loras=config.max_loras if config.enable_lora else 0,
        supported_tasks=[TASK_TO_PROTO[task] for task in supported_tasks(executor)],
        pooled_size=0 if pooler is None else pooler.pooled_size,
        matryoshka_dimensions=() if pooler is None else pooler.matryoshka_dimensions,
        best_effort=True,
        can_sleep=executor.can_sleep,
        shared_device=config.shared_device or "",
        settings_digest=settings_digest(config, executor.dtype_name),
        device=product_name(resolve_device(config.device)),
        started=time(),
    )


if __name__ == "__main__":
    main()
