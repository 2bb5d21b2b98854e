"""The command line of ``quire serve``: its own flags, and the flags of engine and router by their own names.

A flag that both services have goes to both; ``--engine-FLAG`` and ``--router-FLAG`` set it for one. What a flag means,
and which values it takes, is checked by the services' own settings, of which each gets its part of the command line.
"""

from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from quire_engine.config import EngineConfig
from quire_proto.cli import CliSettings, FlagParser
from quire_router.config import Settings

Service = Literal["engine", "router"]
SERVICES: Mapping[Service, type[CliSettings]] = {"engine": EngineConfig, "router": Settings}
# What the command itself gives to each service, by flags of its own.
OWN: Mapping[Service, frozenset[str]] = {
    "engine": frozenset(
        {
            *("model", "served_model_name", "host", "port", "metrics_port"),
            *("data_parallel_size", "data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port"),
        }
    ),
    "router": frozenset({"model", "engine", "host", "http_port"}),
}
SHARED = (EngineConfig.model_fields.keys() - OWN["engine"]) & (Settings.model_fields.keys() - OWN["router"])
_FOR_A_TERMINAL = {"log_level": "warning", "shutdown_timeout": "2"}
DEFAULTS: Mapping[Service, Mapping[str, str]] = {
    "engine": _FOR_A_TERMINAL,
    # An engine of the tree is ready some day, if only after a build of kernels, or the whole tree ends.
    "router": {**_FOR_A_TERMINAL, "hold_timeout": "300"},
}
"""For a person at a terminal, unless flags or variables say otherwise."""
_SHOWN_DEFAULTS = {
    **DEFAULTS["router"],
    "engine_token_file": "a new token for each start",
    "journal_file": "one in ~/.local/state/quire for each model and port",
}
USEFUL = frozenset(
    {
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory"),
        *("swap_space", "dtype", "quantization", "kv_cache_dtype", "device", "tensor_parallel_size", "deterministic"),
        *(
            "enable_lora",
            "lora_modules",
            "api_key",
            "tenants",
            "allowed_origins",
            "redis_url",
            "journal_file",
            "log_level",
        ),
    }
)
"""The settings of services that ``--help`` lists; ``--help-all`` lists all."""
HELP_ALL = "--help-all"
EXAMPLES = f"""examples:
  quire serve Qwen/Qwen3-0.6B
  quire serve demo/model --served-model-name quire-demo --engines 2
  quire serve ORG/NAME --max-model-len 8192 --tensor-parallel-size 2
  quire serve ORG/NAME --host 0.0.0.0 --api-key "$(openssl rand -hex 32)"

quire serve {HELP_ALL} lists all options, and docs/configuration.md what they do."""
MAX_ENGINES = 64
DESCRIPTION = """Serves a model: a router and its engines on this machine, as one tree of processes with one log.

MODEL is a name on the Hugging Face Hub (ORG/NAME; ORG/NAME:Q4_K_M is one of its GGUF files), s3://BUCKET/PREFIX,
oci://REGISTRY/REPOSITORY:TAG, a folder in Hugging Face's layout or a GGUF file. Ctrl-C ends all of it; a process that
dies is started again.

The flags of quire-engine and quire-router are taken too, by their own names, and so are their variables,
QUIRE_ENGINE_... and QUIRE_ROUTER_...."""
_SETS_IT = "quire serve sets it itself, for each engine of a group"
FOREIGN = {
    **Settings.foreign_flags,
    **EngineConfig.foreign_flags,
    "--model": "quire serve MODEL names it",
    "--engine": "--engines N starts them, and quire-router serves engines elsewhere",
    "--seed": EngineConfig.foreign_flags["--temperature"],
    "--tp": "use --tensor-parallel-size",
    "--pp": "use --pipeline-parallel-size",
    "--uvicorn-log-level": "use --log-level",
    **dict.fromkeys(("--data-parallel-rank", "--data-parallel-address", "--data-parallel-rpc-port"), _SETS_IT),
    **dict.fromkeys(("-dpn", "-dpa", "-dpp"), _SETS_IT),
}


@dataclass(frozen=True)
class ServeFlags:
    """What the command line says. ``engine`` and ``router`` are the arguments for each service; None stands for what
    was not given. ``data_parallel_size`` is the number of engines where they share experts, else 1.
    """

    model: str
    engines: int
    data_parallel_size: int
    host: str | None
    port: int | None
    names: list[str]
    no_journal: bool
    engine_port: int | None
    engine_metrics_port: int | None
    engine: list[str]
    router: list[str]


def read_flags(arguments: Sequence[str]) -> ServeFlags:
    """Reads the command line. Ends the process with one sentence if a flag is unknown or misses its value."""
    parser = serve_parser(lists_all=HELP_ALL in arguments)
    given = vars(parser.parse_args(list(arguments)))
    size = given["data_parallel_size"] or 1
    if size > 1 and given["engines"] not in (None, size):
        parser.error(
            f"--engines is {given['engines']}, and --data-parallel-size {size}: either says how many there are"
        )
    return ServeFlags(
        model=given["model"],
        engines=max(size, given["engines"] or 1),
        data_parallel_size=size,
        host=given["host"],
        port=given["port"],
        names=_names(given["served_model_name"]),
        no_journal=given["no_journal"],
        engine_port=given["engine_port"],
        engine_metrics_port=given["engine_metrics_port"],
        engine=[*_arguments("engine", given), *([f"--data-parallel-size={size}"] if size > 1 else [])],
        router=[*_arguments("router", given)],
    )


def serve_parser(*, lists_all: bool = True) -> FlagParser:
    """Returns the parser of all flags. Its help has those that are looked for, or with ``lists_all`` all."""
    parser = FlagParser("quire serve", DESCRIPTION, {}, {k: v for k, v in FOREIGN.items() if k not in _taken()})
    parser.usage = "quire serve MODEL [FLAGS]"
    parser.epilog = None if lists_all else EXAMPLES
    parser.lists_all_with = HELP_ALL
    parser.add_argument(HELP_ALL, action="help", help="show all options")
    parser.add_argument("model", metavar="MODEL", help="what is served")
    _add_own(parser)
    groups = {
        "both services": [(name, "") for name in Settings.model_fields if name in SHARED],
        "the engines": [(name, "engine") for name in _passed("engine") if name not in SHARED],
        "the router": [(name, "router") for name in _passed("router") if name not in SHARED],
    }
    for title, flags in groups.items():
        group = parser.add_argument_group(f"flags of {title}")
        for name, service in flags:
            kind = SERVICES["engine" if service == "engine" else "router"]
            hidden = {} if lists_all or name in USEFUL else {"help": SUPPRESS}
            parser.add_to(group, flag_of(name), **{**_options(kind, name), **hidden})
    for service, kind in SERVICES.items():
        for name in SHARED:  # not listed: as many again, each said already
            parser.add_argument(f"--{service}-{_kebab(name)}", **{**_options(kind, name), "help": SUPPRESS})
    return parser


def _names(entries: Sequence[str]) -> list[str]:
    """The names of all entries, which are lists, each once."""
    return [*dict.fromkeys(name.strip() for entry in entries for name in entry.split(",") if name.strip())]


def flag_of(name: str) -> str:
    """A setting's flag."""
    return f"--{_kebab(name)}"


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _passed(service: Service) -> Iterator[str]:
    """The settings of a service that the command passes on."""
    return (name for name in SERVICES[service].model_fields if name not in OWN[service])


def _taken() -> set[str]:
    """Flags that a user may give, which are therefore no foreign ones."""
    own = {"--port", "--host", "--engines", "--data-parallel-size", "--served-model-name", "--http-port"}
    return own | {flag_of(name) for service in SERVICES for name in _passed(service)}


def _add_own(parser: FlagParser) -> None:
    parser.add_argument("--engines", type=_count, metavar="N", help="engines, each with the whole model (default: 1)")
    parser.add_argument(
        "--data-parallel-size",
        type=_count,
        metavar="N",
        help="engines that share the experts of a model, instead of --engines",
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address that clients reach (default: 127.0.0.1)")
    parser.add_argument(
        "--port", "--http-port", type=_port, metavar="PORT", help="port of the REST API (default: 8000, or a free one)"
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="names that clients may ask for (default: MODEL's name)",
    )
    parser.add_argument(
        "--no-journal", action="store_true", help="keep requests in memory, where they end with the router"
    )
    parser.add_argument(
        "--engine-port", type=_port, metavar="PORT", help="gRPC port of the first engine; the next are 10 above it each"
    )
    parser.add_argument("--engine-metrics-port", type=_port, metavar="PORT", help="its port of metrics, likewise")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ENGINES:
        raise ValueError(text)
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(text)
    return int(text)


# What argparse calls a value.
_count.__name__, _port.__name__ = f"number from 1 to {MAX_ENGINES}", "port from 1 to 65535"


def _options(kind: type[CliSettings], name: str) -> dict[str, Any]:
    """How argparse is to read a setting: as it stands, to be passed on."""
    field = kind.model_fields[name]
    text = (field.description or "").replace("%", "%%") + _default(name, field)
    if _is_bool(field):
        return {"action": BooleanOptionalAction, "default": SUPPRESS, "help": text}
    metavar = kind.all_metavars().get(flag_of(name)) or _metavar(field.annotation)
    return {"action": "append", "default": SUPPRESS, "metavar": metavar, "help": text}


def _default(name: str, field: FieldInfo) -> str:
    if name in _SHOWN_DEFAULTS:
        return f" (default: {_SHOWN_DEFAULTS[name]})"
    if field.is_required() or field.default in (None, []):
        return ""
    return f" (default: {field.default})"


def _is_bool(field: FieldInfo) -> bool:
    return field.annotation is bool or bool in get_args(field.annotation)


def _metavar(annotation: Any) -> str:
    """The placeholder of a value: its words, or what it is."""
    parts = [annotation, *get_args(annotation)]
    for part in parts:
        if get_origin(part) is Literal:
            return f"{{{','.join(get_args(part))}}}"
    return "N" if int in parts else "NUMBER" if float in parts else "TEXT"


def _arguments(service: Service, given: Mapping[str, Any]) -> Iterator[str]:
    """A service's part of the command line: a flag of both goes before the service's own form of it, which counts."""
    for name in _passed(service):
        for key in (name, f"{service}_{name}") if name in SHARED else (name,):
            value = given.get(key)
            if isinstance(value, bool):
                yield f"--{'' if value else 'no-'}{_kebab(name)}"
            elif value is not None:
                yield from (f"{flag_of(name)}={text}" for text in value)
