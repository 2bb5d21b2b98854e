"""The commands of ``quire``: one table, from which it finds them, lists them, completes them in a shell, and from which
docs/cli.md has its table. Nothing of a command is imported here.
"""

from dataclasses import dataclass
from importlib import import_module

from quire_proto.cli import CliSettings, FlagParser, flags_parser


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its ``name`` of one or two words, and the placeholders of its ``operands``. ``run`` takes the
    arguments behind the name. ``flags`` returns the parser of its flags, or is the class of its settings. Both are
    ``MODULE:NAME``. ``service`` is the module and the subcommand of a service that takes the place of this process
    instead of ``run``. ``more`` is the page of the docs that describes it, with the heading.
    """

    group: str
    name: str
    summary: str
    flags: str
    run: str = ""
    service: tuple[str, str] | None = None
    operands: str = ""
    more: str = "cli.md"

    @property
    def usage(self) -> str:
        """What to type, without flags."""
        return f"{self.name} {self.operands}".rstrip()


_SERVE, _LOOK, _MODELS, _MEASURE = "Serve and talk", "This machine", "Downloaded models", "Measure and simulate"
COMMANDS = (
    Command(
        _SERVE,
        "serve",
        "serve a model on this machine: a router and its engines, one log",
        "quire_cli.serve.flags:serve_parser",
        "quire_cli.serve.serve_command:serve",
        operands="MODEL",
        more="cli.md#serving",
    ),
    Command(
        _SERVE,
        "chat",
        "talk to a running server",
        "quire_cli.chat.chat_command:chat_parser",
        "quire_cli.chat.chat_command:chat",
        operands="[MESSAGE]",
        more="cli.md#talking-to-a-server",
    ),
    Command(
        _SERVE,
        "complete",
        "continue a text at a running server",
        "quire_cli.chat.chat_command:complete_parser",
        "quire_cli.chat.chat_command:complete",
        operands="[PROMPT]",
        more="cli.md#talking-to-a-server",
    ),
    Command(
        _SERVE,
        "demo",
        "watch an answer survive the death of its engine (kill -9)",
        "quire_cli.demo.demo_command:demo_parser",
        "quire_cli.demo.demo_command:demo",
        operands="[MODEL]",
        more="cli.md#serving",
    ),
    Command(
        _LOOK,
        "ps",
        "list the servers that run on this machine",
        "quire_cli.running.ps_command:ps_parser",
        "quire_cli.running.ps_command:ps",
        more="cli.md#running-servers",
    ),
    Command(
        _LOOK,
        "stop",
        "end a server, and wait for its end",
        "quire_cli.running.stop_command:stop_parser",
        "quire_cli.running.stop_command:stop",
        operands="[URL|PID]",
        more="cli.md#running-servers",
    ),
    Command(
        _LOOK,
        "doctor",
        "check what this machine has, and what is missing",
        "quire_cli.doctor.doctor_command:doctor_parser",
        "quire_cli.doctor.doctor_command:doctor",
        more="cli.md#checking-the-machine",
    ),
    Command(
        _LOOK,
        "completion",
        "print a script with which a shell completes commands and flags",
        "quire_cli.completion.completion_command:completion_parser",
        "quire_cli.completion.completion_command:completion",
        operands="SHELL",
        more="cli.md#completion",
    ),
    Command(
        _MODELS,
        "list",
        "list the downloaded models",
        "quire_cli.cache.list_command:list_parser",
        "quire_cli.cache.list_command:list_models",
        more="cli.md#downloaded-models",
    ),
    Command(
        _MODELS,
        "pull",
        "download a model",
        "quire_cli.cache.pull_command:pull_parser",
        "quire_cli.cache.pull_command:pull",
        operands="MODEL",
        more="cli.md#downloaded-models",
    ),
    Command(
        _MODELS,
        "rm",
        "delete a downloaded model",
        "quire_cli.cache.rm_command:rm_parser",
        "quire_cli.cache.rm_command:rm",
        operands="MODEL",
        more="cli.md#downloaded-models",
    ),
    Command(
        _MEASURE,
        "bench serve",
        "measure an OpenAI-compatible server: latency, throughput and goodput",
        "quire_cli.bench.config:ServeBenchConfig",
        "quire_cli.bench.serve:bench_serve",
        more="benchmarks.md",
    ),
    Command(
        _MEASURE,
        "bench offline",
        "compare the engine with others on this machine",
        "quire_engine.bench.config:BenchConfig",
        service=("quire_engine.cli", "bench"),
        more="benchmarks.md",
    ),
    Command(
        _MEASURE,
        "simulate engine",
        "run a trace of requests on a scheduler without a model",
        "quire_engine.simulation.config:SimulationConfig",
        service=("quire_engine.cli", "simulate"),
        more="benchmarks.md",
    ),
    Command(
        _MEASURE,
        "simulate fleet",
        "run a trace of requests on routers and engines without a model",
        "quire_router.simulation.config:FleetSettings",
        service=("quire_router.main", "simulate"),
        more="benchmarks.md",
    ),
)
_WIDTH = 22  # of what to type


def usage() -> str:
    """Returns the help of ``quire`` itself."""
    groups: dict[str, list[str]] = {}
    for each in COMMANDS:
        groups.setdefault(each.group, []).append(f"  {each.usage:{_WIDTH}} {each.summary}")
    listed = "\n\n".join("\n".join((f"{group}:", *lines)) for group, lines in groups.items())
    return (
        f"usage: quire COMMAND [FLAGS]\n\n{listed}\n\n"
        "quire COMMAND --help (or quire help COMMAND) shows the flags of a command, and quire --version the version.\n"
    )


def parser_of(command: Command) -> FlagParser:
    """Returns the parser of a command, with all of its flags."""
    module, _, name = command.flags.partition(":")
    found = getattr(import_module(module), name)
    if isinstance(found, type) and issubclass(found, CliSettings):
        return flags_parser(found)
    parser: FlagParser = found()
    return parser
