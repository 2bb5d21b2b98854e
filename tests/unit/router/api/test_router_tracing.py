"""The spans of the API, and what a client may add to them."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import internal
from quire_router.api import service

from tests.support.scripted_api import MODEL, ask, chat, open_stage

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
CHAT = "/v1/chat/completions"


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(service, "_TRACER", provider.get_tracer("test"))
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


async def test_a_rest_request_continues_the_callers_trace(spans):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(), PARENT)

    server, admit = spans()[f"POST {CHAT}"], spans()["quire.admit"]
    assert format(server.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(server.parent.span_id, "016x") == "b7ad6b7169203331"
    assert (server.kind, admit.parent.span_id) == (SpanKind.SERVER, server.context.span_id)
    assert server.attributes["quire.request.id"] == answer.headers["x-request-id"]


async def test_a_grpc_request_continues_the_callers_trace(spans):
    async with open_stage() as stage, stage.channel() as channel:
        request = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="x")])
        async for _ in InferenceStub(channel).Chat(request, metadata=tuple(PARENT.items())):
            pass

    server = spans()["quire.v1.Inference/Chat"]
    assert format(server.parent.span_id, "016x") == "b7ad6b7169203331"


async def test_a_refusal_is_no_span_error_and_a_failure_is_one(spans):
    async with open_stage([internal()]) as stage:
        await ask(stage.port, "POST", CHAT, {})
        refused = spans()[f"POST {CHAT}"]
        await ask(stage.port, "POST", CHAT, chat())
        failed = spans()[f"POST {CHAT}"]

    assert (refused.attributes["error.type"], refused.status.status_code) == ("invalid", StatusCode.UNSET)
    assert (failed.attributes["error.type"], failed.status.status_code) == ("internal", StatusCode.ERROR)


@pytest.mark.parametrize(
    ("label", "kept"), [("my-request_7", True), ("x" * 65, False), ("http://169.254.169.254/", False), ("a b", False)]
)
async def test_the_clients_name_for_a_request_is_a_label_if_it_is_harmless(label, kept, spans):
    async with open_stage() as stage:
        await ask(stage.port, "POST", CHAT, chat(), {"x-request-id": label})

    assert spans()[f"POST {CHAT}"].attributes.get("quire.client.request_id") == (label if kept else None)
