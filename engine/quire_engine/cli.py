"""The command ``quire-engine``: reads the settings, loads the model, serves it."""

import logging
import os
import socket
import sys
from collections import Counter
from contextlib import closing
from threading import Timer

from prometheus_client import CollectorRegistry, disable_created_metrics
from quire_proto.cli import describe_listen_error, read_settings, reject_unknown_env
from quire_proto.engine_token import TokenError
from quire_proto.errors import QuireError
from quire_proto.folders import no_such_path
from quire_proto.logs import set_up_logging
from quire_proto.telemetry import DropReason
from quire_proto.terminal import fail
from quire_proto.tls import TlsError
from quire_proto.tracing import setup_tracing, shutdown_tracing

from quire_engine.checkpoint.prefetch import prefetch_weights
from quire_engine.config import OTHER_VARIABLES, EngineConfig
from quire_engine.core.startup import StartupPhase, StartupTimer, print_progress
from quire_engine.core_client.client import EngineDeadError, LoadedCore
from quire_engine.core_client.loading import load_core
from quire_engine.errors import LoRAError, ModelError
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.probes import ProbeServer
from quire_engine.server.server import EngineServer

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
        print_progress()
        (_run_engine if config.node_rank == 0 else _run_node)(config)


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
    core = _load_core(config, startup, is_traced=dropped_spans is not None)
    with closing(core.runner):
        startup.begin(StartupPhase.SERVING)
        server = _make_server(config, core, dropped_spans, startup)
        try:
            uvloop.run(server.serve())
        except OSError as error:
            fail(f"{error}.")
        except EngineDeadError as error:
            log.critical("%s The engine ends.", error)
            raise SystemExit(1) from None


def _load_core(config: EngineConfig, startup: StartupTimer, *, is_traced: bool) -> LoadedCore:
    try:
        if config.engine_core_process:
            from quire_engine.core_client.core_process import load_core_process

            return load_core_process(config, startup, is_traced=is_traced)
        return load_core(config, startup, _exit_on_lost_rank)
    except ModelError as error:
        fail(str(error))


def _check_ports(config: EngineConfig) -> None:
    """Tries to listen before the model is loaded and others are waited for, either of which may take long."""
    for flag, port in (("--port", config.port), ("--metrics-port", config.metrics_port)):
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            socket.create_server((config.host, port), family=family).close()
        except OSError as error:
            fail(f"{describe_listen_error(flag, config.host, port, error)}.")


def _make_server(
    config: EngineConfig, core: LoadedCore, dropped_spans: Counter[DropReason] | None, startup: StartupTimer
) -> EngineServer:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # drops the unused _created sample of each counter
    if config.lora_root is not None and not config.lora_root.is_dir():
        fail(f"--lora-root: {no_such_path(str(config.lora_root))}.")
    loras = LoRARegistry(core.runner.check_lora, config.names, config.lora_root)
    try:
        for name, folder in config.lora_folders.items():
            loras.load_now(name, folder)
    except (LoRAError, QuireError) as error:
        fail(str(error))
    try:
        return EngineServer(config, core, loras=loras, dropped_spans=dropped_spans, startup=startup)
    except (TlsError, TokenError) as error:  # the files changed after the settings were read
        fail(f"{error}.")


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


if __name__ == "__main__":
    main()
