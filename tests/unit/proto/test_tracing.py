"""OpenTelemetry's variables mean what they mean in its SDK, and trace context is passed on as it came."""

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from quire_proto import tracing
from quire_proto.tracing import extract, extract_w3c, headers_for_servers, setup_tracing, w3c_headers

from tests.support.otlp import collector

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
STATE = "vendor=1,other=2"
SEND = """
from opentelemetry import trace
from quire_proto.tracing import setup_tracing, shutdown_tracing
print(setup_tracing("quire-test"))
trace.get_tracer("t").start_span("a span").end()
shutdown_tracing()
"""


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    tracing._propagator.cache_clear()
    yield
    tracing._propagator.cache_clear()


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, []),
        (ENDPOINT, ["grpc"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, ["grpc"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["grpc"]),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console", **ENDPOINT}, ["grpc", "export"]),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, []),
        ({"OTEL_SDK_DISABLED": "false", **ENDPOINT}, ["grpc"]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **ENDPOINT}, ["http"]),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"} | ENDPOINT,
            ["grpc"],
        ),
    ],
)
def test_the_variables_select_the_exporters(
    variables: dict[str, str], exporters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = tracing._exporters()
    kinds = [type(each).__module__ for each in made]
    for each in made:
        each.shutdown()
    assert len(kinds) == len(exporters)
    assert all(name in kind.split(".") for name, kind in zip(exporters, kinds, strict=True))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", **ENDPOINT},
            "cannot be http/json: set it to grpc or http/protobuf",
        ),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER has zipkin, which is not installed"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=problem):
        setup_tracing("quire-test")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "quire-test"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,team=a"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine", "OTEL_SERVICE_NAME": "this"}, "this"),
    ],
)
def test_the_operators_name_of_the_service_comes_first(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert tracing._resource("quire-test").attributes["service.name"] == name


class _HttpCollector(BaseHTTPRequestHandler):
    received: list[tuple[str, str]]

    def do_POST(self) -> None:
        message = pb.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        spans = [span for each in message.resource_spans for scope in each.scope_spans for span in scope.spans]
        self.received += [(self.path, span.name) for span in spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def send_a_span(variables: dict[str, str]) -> None:
    command = [sys.executable, "-c", SEND]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_spans_arrive_over_http_and_over_grpc() -> None:
    _HttpCollector.received = []
    with HTTPServer(("127.0.0.1", 0), _HttpCollector) as server, collector() as over_grpc:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        send_a_span({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
        send_a_span({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{over_grpc.port}"})
        server.shutdown()
        assert _HttpCollector.received == [("/v1/traces", "a span")]
        assert [(span.name, span.service) for span in over_grpc.spans] == [("a span", "quire-test")]


@pytest.mark.parametrize("flags", ["00", "01"])
def test_context_is_passed_on_sampled_or_not(flags: str) -> None:
    sent = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-{flags}", "tracestate": STATE}
    span = trace.get_current_span(extract(sent))
    assert w3c_headers(span) == sent
    assert headers_for_servers(**sent) == sent
    assert trace.get_current_span(extract_w3c(**sent)).get_span_context() == span.get_span_context()
    assert w3c_headers(trace.INVALID_SPAN) == headers_for_servers("", "") == {}


def test_other_propagators_are_used_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", "none")
    code = "from quire_proto.tracing import extract; print(extract({'traceparent': '00-%032x-%016x-01' % (1, 1)}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "{}\n"
