"""The pages that list something list what there is, every flag and every metric, and nothing else."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from pydantic_settings import BaseSettings
from quire_cli.bench.config import ServeBenchConfig
from quire_cli.serve.flags import read_flags
from quire_engine.bench.config import BenchConfig
from quire_engine.config import EngineConfig
from quire_engine.core.absence import PreemptionMode, PreemptionReason, TimeAway
from quire_engine.core.data_parallel import DPStats
from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.core.executor import WeightStats
from quire_engine.core.kv_transfer.connector import TransferFailure
from quire_engine.core.outputs import EngineLoad, KVCacheFragmentation, SchedulerStats
from quire_engine.core.startup import StartupTimer
from quire_engine.core.step import StepTimings
from quire_engine.core_client.client import CoreStats
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.metrics import EngineMetrics
from quire_engine.simulation.config import SimulationConfig
from quire_engine.structured_output.compiler import CompileOutcome
from quire_proto.cli import read_settings
from quire_router.config import Settings
from quire_router.core import errors, metrics
from quire_router.engines.attempt import StreamEnd
from quire_router.simulation.config import FleetSettings
from quire_router.usage.export import UsageSettings

from tests.support import pages

HELP: dict[str, Callable[[Sequence[str]], object]] = {
    "quire-router": partial(read_settings, Settings),
    "quire-engine": partial(read_settings, EngineConfig),
}
PAGES = [pages.ROOT / "README.md", *(pages.ROOT / "docs").rglob("*.md")]
FLAGS: dict[str, set[str]] = {
    str(settings.model_config.get("cli_prog_name")): {
        (field.alias or name).replace("_", "-") for name, field in settings.model_fields.items()
    }
    for settings in (
        Settings,
        EngineConfig,
        FleetSettings,
        SimulationConfig,
        BenchConfig,
        ServeBenchConfig,
        UsageSettings,
    )
}
FLAGS["quire-engine replay"] = FLAGS["quire-engine"] | FLAGS["quire-engine simulate"]
PACKAGES = {"quire_engine", "quire_router", "quire_proto", "quire_cli"}
FIELDS = {"quire_journal"}  # of answers
TRACE = StepTrace(1, 0, StepTimings(), 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, False, [])
Listed = dict[str, tuple[str, set[str]]]  # kind and labels of each metric


@pytest.mark.parametrize("command", pages.COMMANDS)
def test_the_page_of_settings_has_every_flag_with_its_default(command: str) -> None:
    assert list(pages.rows(pages.section(pages.CONFIGURATION, f"`{command}`"))) == list(pages.flags_of(command)), (
        "write the tables again: .venv/bin/python -m tests.support.pages"
    )


def test_the_page_of_the_command_line_has_every_command() -> None:
    assert list(pages.rows(pages.table_below(pages.CLI, pages.CLI_HEAD))) == list(pages.command_rows()), (
        "write the tables again: .venv/bin/python -m tests.support.pages"
    )


def test_the_page_of_models_has_every_architecture_with_code_of_its_own() -> None:
    assert list(pages.rows(pages.table_below(pages.MODELS, pages.MODELS_HEAD))) == list(pages.model_rows()), (
        "write the tables again: .venv/bin/python -m tests.support.pages"
    )


@pytest.mark.parametrize(
    ("head", "rows"), [(pages.FEATURES_HEAD, pages.feature_rows), (pages.PAIRS_HEAD, pages.pair_rows)]
)
def test_the_page_of_settings_has_the_table_of_capabilities(
    head: Sequence[str], rows: Callable[[], Iterator[list[str]]]
) -> None:
    assert list(pages.rows(pages.table_below(pages.CONFIGURATION, head))) == list(rows()), (
        "write the tables again: .venv/bin/python -m tests.support.pages"
    )


@pytest.mark.parametrize("command", pages.COMMANDS)
def test_its_flags_are_those_of_the_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        HELP[command](["--help"])
    told = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    listed = {flag.partition("`:")[0].strip("`") for flag, _, _ in pages.flags_of(command)}
    assert told - {"--version"} == listed


def test_the_page_of_metrics_lists_the_routers() -> None:
    listed = listed_under("The router")
    for metric in vars(metrics).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        [family] = metric.describe()
        kind, labels = listed.pop(told_name(family.name, family.type))
        assert kind == family.type
        if labels:
            metric.labels(**dict.fromkeys(labels, "page"))  # raises ValueError where it has others
            metric.remove_by_labels(dict.fromkeys(labels, "page"))
        else:
            assert labels_of(metric) == {family.name: set()}
    assert not listed


def test_the_page_of_metrics_lists_the_engines() -> None:
    registry = busy_engine().registry
    labels = labels_of(registry)
    assert listed_under("The engine") == {
        told_name(family.name, family.type): (family.type, labels[family.name]) for family in registry.collect()
    }


def test_no_page_names_a_metric_that_there_is_not() -> None:
    known = {part for heading in ("The router", "The engine") for name in listed_under(heading) for part in parts(name)}
    for page in PAGES:
        named = set(re.findall(r"\bquire_[a-z0-9_]*[a-z0-9]\b", page.read_text())) - PACKAGES - FIELDS
        assert not named - known, page.name


def test_the_readme_sums_up_the_runs_with_faults() -> None:
    _, _, results = (pages.ROOT / "docs/evidence/failures.md").read_text().partition("\n### Results\n")
    rows = list(pages.rows(results.partition("\n### ")[0].splitlines()))
    answers, forgotten = (sum(int(row[column].replace(",", "")) for row in rows) for column in (1, 3))
    words = " ".join((pages.ROOT / "README.md").read_text().split())
    assert f"{answers:,} answers" in words
    assert f"{forgotten} could not be resumed" in words


def test_the_page_of_admission_lists_the_reasons_of_errors() -> None:
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(errors))) if isinstance(node, ast.Call))
    values = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == "reason")
    reasons = {value.value for value in values if isinstance(value, ast.Constant)} | set(errors.RefusalReason)
    rows = pages.rows(pages.section(pages.ROOT / "docs/admission.md", "What a client sees"))
    assert {reason for row in rows for reason in re.findall(r"`(\w+)`", row[0])} == reasons


def test_the_page_of_the_architecture_lists_the_ways_in_which_an_attempt_ends() -> None:
    text = (pages.ROOT / "docs/architecture.md").read_text()
    _, _, table = text.partition("### How an attempt ends\n")
    rows = pages.rows(table[: table.index("\n## ")].splitlines())
    assert [row[0].strip("`") for row in rows] == [end.name for end in StreamEnd]


@pytest.mark.parametrize("settings", [SimulationConfig, FleetSettings, BenchConfig, ServeBenchConfig, UsageSettings])
def test_some_page_names_each_flag_of_the_other_commands(settings: type[BaseSettings]) -> None:
    told = set(re.findall(r"--(?:no-)?([a-z0-9-]+)", "".join(page.read_text() for page in PAGES)))
    assert not {(field.alias or name).replace("_", "-") for name, field in settings.model_fields.items()} - told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_in_the_environment_and_what_they_run_is_there(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"(?:^|`)(?:[A-Z]+=\S+ )*(?:python3?|pytest) .*", text, re.MULTILINE)
    for path in re.findall(r"\btests/[a-z_/]+\.py\b", text):
        assert (pages.ROOT / path).is_file(), path
    for module in re.findall(r"python -m (tests\.[a-z_.]+[a-z_])", text):
        assert find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_have_flags_that_there_are(page: Path) -> None:
    text = re.sub(r"\\\n\s*", "", page.read_text())
    commands = r"((?:quire-(?:router|engine)(?: simulate| replay| bench| usage)?)|quire bench serve) ([^`\n]*)"
    for program, arguments in re.findall(commands, text):
        flags = set(re.findall(r"(?<!\S)--(?:no-)?([a-z][a-z0-9-]*)", arguments)) - {"help", "version"}
        assert not flags - FLAGS[program], program


def test_quire_serve_takes_the_flags_that_pages_give_it() -> None:
    texts = (re.sub(r"\\\n\s*", "", page.read_text()) for page in PAGES)
    lines = [line for text in texts for line in re.findall(r"(?m)^(?:ExecStart=\S+/)?quire serve (.*)$", text)]
    assert len(lines) > 10
    for line in lines:
        read_flags(shlex.split(line, comments=True))


def listed_under(heading: str) -> Listed:
    """What a table of the page lists."""
    listed: Listed = {}
    for name, kind, _ in pages.rows(pages.section(pages.METRICS, heading)):
        match = re.fullmatch(r"`([a-z_:]+)(?:\{([a-z_,]+)\})?`", name)
        assert match is not None, name
        listed[match[1]] = (kind, set(match[2].split(",")) if match[2] else set())
    return listed


def told_name(name: str, kind: str) -> str:
    """A metric as Prometheus shows it."""
    return f"{name}_total" if kind == "counter" else name


def parts(name: str) -> Iterator[str]:
    """What a page may call a metric: by its name, with or without what its kind adds."""
    yield name.removesuffix("_total")
    for end in ("", "_bucket", "_sum", "_count"):
        yield name + end


def labels_of(collector: Collector | CollectorRegistry) -> dict[str, set[str]]:
    """The labels of each metric that has values."""
    families: Iterable = collector.collect()
    return {
        family.name: {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in families
        if family.samples
    }


def busy_engine() -> EngineMetrics:
    """Metrics that all have values."""
    statistics = SchedulerStats()
    statistics.preemptions[next(iter(PreemptionMode)), next(iter(PreemptionReason))] += 1
    statistics.disk_failures[next(iter(TransferFailure))] += 1
    loras = LoRARegistry(lambda lora: lora, ["m"])
    startup = StartupTimer()
    startup.end()
    told = EngineMetrics(
        *("m", CoreStats(statistics, WeightStats(), DPStats()), lambda: 0.0),
        loras=loras,
        max_loras=1,
        startup=startup.phases,
    )
    told.on_grammar(CompileOutcome.COMPILED, 1.0)
    told.on_restart("session heartbeats")
    fragmentation, away = KVCacheFragmentation(0, 0, 0), [TimeAway(next(iter(PreemptionMode)), 1.0)]
    told.on_step(EngineCoreOutputs([], EngineLoad(*[0] * 8), [], TRACE, fragmentation, away))
    return told
