"""A caller's trace goes on behind a router that records nothing, whether it is sampled or not."""

import pytest
from opentelemetry import trace
from quire_proto.tracing import w3c_headers
from quire_router.api.service import _server_span

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import open_runner, started
from tests.support.scripted_engine import STOP, output
from tests.unit.router.requests.test_runner import request

STATE = "vendor=1,other=2"


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_an_engine_gets_the_callers_context(flags: str) -> None:
    sent = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-{flags}", "tracestate": STATE}
    async with open_runner() as place:
        for headers in (sent, {}):
            with _server_span("POST /v1/completions", "r", headers):
                assert w3c_headers(trace.get_current_span()) == headers
                task, submit = await started(place, place.lifecycle.run(request()))
            place.engine.send(output("r", tokens("a"), 0, STOP))
            await task
            assert {"traceparent": submit.traceparent, "tracestate": submit.tracestate} == {
                "traceparent": headers.get("traceparent", ""),
                "tracestate": headers.get("tracestate", ""),
            }
            assert not trace.get_current_span().get_span_context().is_valid
