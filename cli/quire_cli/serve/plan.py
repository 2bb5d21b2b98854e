"""What ``quire serve`` starts: the model and its names, the ports, and the command line of each process."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder
from quire_engine.config import EngineConfig
from quire_engine.core.startup import PROGRESS_VARIABLE
from quire_proto.cli import read_settings
from quire_proto.folders import user_state_folder
from quire_router.config import Settings

from quire_cli.machine.sockets import LOCALHOST, is_local
from quire_cli.model.name import served_name
from quire_cli.serve.flags import DEFAULTS, ServeFlags
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.process_tree import Program

SHARED_POOL = 512 << 20  # bytes of KV memory of each of several engines in the machine's memory
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - what to connect to, instead
GRACE = 5.0  # seconds that a process may take longer to end than its settings say
ENGINE_STEP = 10  # between the ports of two engines
GROUP_PORT = 29550  # where engines that share experts meet, or a free one behind it
ROUTER_PORTS = (
    ("http_port", "REST API", "--port"),
    ("grpc_port", "gRPC API", "--grpc-port"),
    ("metrics_port", "metrics", "--metrics-port"),
)


@dataclass(frozen=True)
class Plan:
    """The programs to start, and where. ``model`` is a folder or a GGUF file, and ``tokenizer`` the folder with its
    tokenizer; ``settings`` and ``engine`` are what the services will read.
    """

    model: Path
    tokenizer: Path
    settings: Settings
    engine: EngineConfig
    programs: list[Program]
    engine_ports: list[tuple[int, int]]

    @property
    def name(self) -> str:
        """The name that clients ask for."""
        return self.engine.names[0]

    @property
    def engines(self) -> int:
        """How many engines there are."""
        return len(self.engine_ports)


def make_plan(flags: ServeFlags, model: Path, ports: Ports, gpus: Sequence[str] = ()) -> Plan:
    """Chooses ports and writes the command lines for a model in a folder or GGUF file. Ends the process with one
    sentence for each wrong setting. Raises ``PortError``, ``ValueError`` for fewer GPUs than needed, and
    ``ModelError`` for a GGUF file without a tokenizer that can be used.
    """
    names = flags.names or [name_of(model)]
    engine = [f"--model={model}", *(f"--served-model-name={name}" for name in names)]
    engine += [*flags.engine, *_unless_given("ENGINE", flags.engine, DEFAULTS["engine"])]
    shares_memory = flags.engines > 1 and (not gpus or read_settings(EngineConfig, engine).device == "cpu")
    if shares_memory and _unless_given("ENGINE", flags.engine, {"gpu_memory_utilization": ""}):
        engine += _unless_given("ENGINE", flags.engine, {"kv_cache_memory": str(SHARED_POOL)})
    if flags.data_parallel_size > 1:
        engine += [f"--data-parallel-rpc-port={ports.free(GROUP_PORT, 'the group of the engines')}"]
    tokenizer = tokenizer_folder(model)
    router = [*(f"--model={name}={tokenizer}" for name in names)]
    router += [*flags.router, *_unless_given("ROUTER", flags.router, DEFAULTS["router"])]
    router += [f"--host={flags.host}"] if flags.host else []
    router += [f"--http-port={flags.port}"] if flags.port else []
    config, settings = read_settings(EngineConfig, engine), read_settings(Settings, router)
    if config.data_parallel_size != flags.data_parallel_size:
        raise ValueError("--data-parallel-size starts engines that share experts; a variable does not say how many.")
    if not is_local(settings.host):
        raise PortError(
            f"{settings.host} is not an address of this machine; --host 0.0.0.0 stands for all that it has."
        )
    token = _token_flags(config, settings)
    places = _engine_ports(flags, config, ports)
    chosen = _router_ports(settings, ports)
    programs = [
        _engine_program(index, pair, [*engine, *token], config, _environment(index, flags.engines, config, gpus))
        for index, pair in enumerate(places)
    ]
    where = [f"--{name.replace('_', '-')}={port}" for name, port in chosen.items()]
    journal = None if flags.no_journal else _journal_file(settings, names[0], chosen["http_port"])
    where += [f"--journal-file={journal}"] if journal else []
    engines = [f"--engine={LOCALHOST}:{port}" for port, _ in places]
    settings = settings.model_copy(update=chosen)
    programs.append(
        Program(
            "router",
            "router",
            "quire_router.main",
            [*router, *where, *token, *engines],
            (settings.metrics_port, "/started"),
            settings.shutdown_delay + settings.shutdown_timeout + GRACE,
            host=reachable(settings.host),
        )
    )
    return Plan(model, tokenizer, settings, config, programs, places)


def _token_flags(config: EngineConfig, settings: Settings) -> list[str]:
    """The flag of engines and router for the token of this start, unless theirs name one or ``--insecure`` does
    without. Raises ``ValueError`` where only one side has one.
    """
    given = config.engine_token_file, settings.engine_token_file
    if all(given) or (config.insecure and not any(given)):
        return []
    if any(given):
        side, other = ("engines", "router") if given[0] else ("router", "engines")
        raise ValueError(f"--engine-token-file is set for the {side} alone: give it to the {other} too, or to neither.")
    return [f"--engine-token-file={_write_token()}"]


def _write_token() -> Path:
    """Writes a new token where no other user can read it: into memory of this process, which only this user may open
    by its path. Nothing has to be removed at the end, and engines that are started again find it.
    """
    descriptor = os.memfd_create("quire-engine-token")
    os.write(descriptor, secrets.token_urlsafe(32).encode())
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def reachable(host: str) -> str:
    """The address by which this machine reaches what listens on ``host``."""
    return ANY_ADDRESS.get(host, host)


def name_of(model: Path) -> str:
    """What a model is called that was given no name."""
    return served_name(model.stem if model.is_file() else model.resolve().name)


def _journal_file(settings: Settings, name: str, port: int) -> Path | None:
    """The file where the router keeps its requests, one for each model and port, so that it is found again; None where
    the flags say where they are kept. Raises ``OSError`` where there cannot be a file, and ``ValueError`` where this
    user has no home.
    """
    if settings.redis_url or settings.journal_file or settings.workers > 1:
        return None
    try:
        folder = user_state_folder() / f"{name.replace('/', '--')}-{port}"
    except RuntimeError:  # no HOME, and a user id without a name, as in some containers
        raise ValueError("the journal has no place: set HOME, name a --journal-file, or say --no-journal.") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / "journal.sqlite"


def _engine_program(
    index: int, ports: tuple[int, int], arguments: Sequence[str], config: EngineConfig, environment: dict[str, str]
) -> Program:
    where = [f"--host={LOCALHOST}", f"--port={ports[0]}", f"--metrics-port={ports[1]}"]
    where += [f"--data-parallel-rank={index}"] if config.data_parallel_size > 1 else []
    return Program(
        f"engine-{index}",
        "engine",
        "quire_engine.cli",
        [*arguments, *where],
        (ports[1], "/started"),
        config.shutdown_delay + config.shutdown_timeout + GRACE,
        environment,
        grouped=config.data_parallel_size > 1,
    )


def _environment(index: int, engines: int, config: EngineConfig, gpus: Sequence[str]) -> dict[str, str]:
    """Has an engine report its start, and gives each of several GPUs of its own. Raises ``ValueError`` if there are too
    few.
    """
    reports = {PROGRESS_VARIABLE: "1"}
    if engines == 1 or not gpus or config.device == "cpu":
        return reports
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    if engines * size > len(gpus):
        raise ValueError(f"{engines} engines of {size} GPUs each need {engines * size}, and there are {len(gpus)}.")
    return {**reports, "CUDA_VISIBLE_DEVICES": ",".join(gpus[index * size :][:size])}


def _router_ports(settings: Settings, ports: Ports) -> dict[str, int]:
    """Returns the ports of the router: from flags and variables, else free ones next to the REST port."""
    given, host = settings.model_fields_set, settings.host
    chosen: dict[str, int] = {}
    for offset, (name, what, flag) in enumerate(ROUTER_PORTS):
        owner = f"the router's {what}"
        if name in given and getattr(settings, name):
            chosen[name] = ports.named(getattr(settings, name), owner, flag, host)
        else:
            first = chosen.get("http_port", settings.http_port or 8000) + offset
            chosen[name] = ports.free(first, owner, 1 if offset else ENGINE_STEP, host, tell=name == "http_port")
    return chosen


def _engine_ports(flags: ServeFlags, config: EngineConfig, ports: Ports) -> list[tuple[int, int]]:
    """Ports of gRPC and of metrics of each engine."""
    given = config.model_fields_set
    first = flags.engine_port or (config.port if "port" in given else 0)
    metrics = flags.engine_metrics_port or (config.metrics_port if "metrics_port" in given else 0)
    places: list[tuple[int, int]] = []
    next_port = 9000
    for index in range(flags.engines):
        owner = f"engine {index}"
        if first:
            port = ports.named(first + ENGINE_STEP * index, owner, "--engine-port")
        else:
            port = ports.free(next_port, owner, ENGINE_STEP)
            next_port = port + ENGINE_STEP
        if metrics:
            pair = port, ports.named(metrics + ENGINE_STEP * index, f"{owner}'s metrics", "--engine-metrics-port")
        else:
            pair = port, ports.free(port + 2, f"{owner}'s metrics")
        places.append(pair)
    return places


def _unless_given(service: str, arguments: Sequence[str], defaults: Mapping[str, str]) -> list[str]:
    """Returns flags for settings that are set by no argument and no variable of the service."""
    flags = {name: f"--{name.replace('_', '-')}" for name in defaults}
    return [
        f"{flags[name]}={value}"
        for name, value in defaults.items()
        if not os.environ.get(f"QUIRE_{service}_{name.upper()}")
        and not any(argument.startswith(f"{flags[name]}=") for argument in arguments)
    ]
