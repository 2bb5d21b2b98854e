"""One trace leads from the REST route to the engine's spans, and the steps are linked to it."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import OpenAI

from tests.service.conftest import DEMO, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine
from tests.support.otlp import Collector, ReceivedSpan, collector
from tests.support.processes import Router, eventually

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Traced:
    collector: Collector
    client: OpenAI

    def spans_of_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        return {span.name: span for span in self.collector.spans if span.trace_id == trace_id}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with collector() as received:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{received.port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        engine = ForkedEngine(DEMO, folder, *SMALL_POOLS, "--trace-step-interval", "2", **variables)
        router = Router(DEMO, [engine.address], folder, **variables)
        try:
            engine.wait_ready()
            router.wait_ready()
            yield Traced(received, OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0))
        finally:
            codes = [router.stop(), engine.stop()]
    assert codes == [0, 0], (router.text, engine.text)


def ask(traced: Traced, traceparent: str) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    traced.client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=30, extra_headers={"traceparent": traceparent}
    )


def test_one_trace_leads_from_the_route_to_the_engine(traced: Traced) -> None:
    ask(traced, CALLER)
    trace_id = CALLER.split("-")[1]
    wanted = {
        "POST /v1/chat/completions",
        "quire.admit",
        "quire.route",
        f"chat {MODEL}",
        "quire.engine.wait",
        "quire.engine.prefill",
        "quire.engine.decode",
    }
    eventually(lambda: wanted <= set(traced.spans_of_trace(trace_id)), message=str(traced.collector.spans))
    spans = traced.spans_of_trace(trace_id)
    route, chat = spans["POST /v1/chat/completions"], spans[f"chat {MODEL}"]
    assert route.parent_id == CALLER.split("-")[2], "the caller's trace is not continued"
    assert spans["quire.admit"].parent_id == spans["quire.route"].parent_id == chat.parent_id == route.span_id
    for name in ("quire.engine.wait", "quire.engine.prefill", "quire.engine.decode"):
        assert spans[name].parent_id == chat.span_id
        assert spans[name].service == "quire-engine"
        assert route.start <= spans[name].start <= spans[name].end
    assert route.service == chat.service == "quire-router"
    assert spans["quire.engine.wait"].end <= spans["quire.engine.prefill"].end <= spans["quire.engine.decode"].end


def test_steps_are_roots_that_are_linked_to_their_requests(traced: Traced) -> None:
    ask(traced, CALLER.replace("0af7", "1bf7"))
    trace_id = CALLER.replace("0af7", "1bf7").split("-")[1]
    eventually(lambda: f"chat {MODEL}" in traced.spans_of_trace(trace_id))
    chat = traced.spans_of_trace(trace_id)[f"chat {MODEL}"]

    def linked() -> list[ReceivedSpan]:
        steps = [span for span in traced.collector.spans if span.name == "quire.engine.step"]
        return [step for step in steps if chat.span_id in step.links]

    eventually(lambda: len(linked()) >= 5, message="steps are not linked to the request")
    step = linked()[0]
    assert step.parent_id == ""
    assert step.trace_id != trace_id
    phases = {"schedule", "swap", "forward", "sample", "emit"}

    def inside() -> list[ReceivedSpan]:
        return [span for span in traced.collector.spans if span.parent_id == step.span_id]

    eventually(lambda: {span.name for span in inside()} == phases)
    assert all(step.start <= span.start <= span.end <= step.end for span in inside())


def test_attributes_follow_the_genai_conventions_and_hold_no_text(traced: Traced) -> None:
    ask(traced, CALLER.replace("0af7", "2cf7"))
    trace_id = CALLER.replace("0af7", "2cf7").split("-")[1]
    eventually(lambda: {f"chat {MODEL}", "quire.engine.decode"} <= set(traced.spans_of_trace(trace_id)))
    spans = traced.spans_of_trace(trace_id)
    chat = spans[f"chat {MODEL}"].attributes
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.request.model"] == MODEL
    assert chat["gen_ai.usage.input_tokens"] > 0
    assert spans["quire.engine.decode"].attributes["gen_ai.usage.output_tokens"] == 30
    assert "fox" not in str(spans).lower(), "a prompt or an answer was exported"
