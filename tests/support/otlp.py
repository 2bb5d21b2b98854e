"""A collector that receives OTLP over real gRPC and keeps the spans."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, object]
    links: tuple[str, ...]


class Collector(rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._lock = Lock()
        self.port = 0
        self.answers = Event()  # cleared: exports wait
        self.answers.set()
        self.refuses = False

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def Export(  # noqa: N802 - named by the contract
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self.answers.wait()
        if self.refuses:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        with self._lock:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes).get("service.name", "")
                for scope in resource.scope_spans:
                    self._spans += [_received(str(service), span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@contextmanager
def collector() -> Iterator[Collector]:
    """A running collector for the length of a block."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    servicer = Collector()
    rpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer
    finally:
        servicer.answers.set()
        server.stop(0).wait()


def _received(service: str, span: object) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _attributes(pairs: object) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
