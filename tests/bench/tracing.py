"""What ``--trace-step-interval 1`` costs: an engine that exports a span of every step beside one that exports none.

``.venv/bin/python -m tests.bench.tracing`` has the same streams decode at either, in turns, a model of so many layers
that there are about 100 steps a second, and prints for each pair how much longer the steps of the traced one take and
the processor time that its process spends more, as parts of a step of 10 ms. All requests are traced. Before, it counts
the processor time of the spans alone, which is all of the difference on an idle machine. The collector is a process of
its own. The bar is 2 %.
"""

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import grpc
import psutil
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from quire.v1 import engine_pb2 as pb
from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.core.outputs import EngineLoad
from quire_engine.core.request import Request
from quire_engine.core.step import StepTimings
from quire_engine.server.tracing import TraceExporter
from quire_proto.convert import sampling_to_proto
from quire_proto.sampling import SamplingParams
from quire_proto.span_export import CountingSpanProcessor
from quire_proto.telemetry import DropReason

from tests.bench.model import SHAPE, make_model
from tests.support.engine_session import EngineSession
from tests.support.processes import Engine

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROMPT = [5] * 16
STEP = 0.01  # seconds of a step at 100 a second
BAR = 0.02
WARM_STEPS = 8
SPANS = 3_000


@dataclass(frozen=True, slots=True)
class Steps:
    """How many steps a round had, and the seconds and the process's processor seconds of each."""

    count: int
    seconds: float
    processor: float


def main() -> None:
    options = parse_options()
    with collecting() as (port, _):
        measure_spans(port, options.streams)
    with tempfile.TemporaryDirectory() as name, collecting() as (port, spans):
        model = make_model_of(Path(name), options.layers)
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "500"}
        flags = ("--trace-step-interval", "1", "--kv-cache-memory", str(256 << 20), "--max-num-seqs", "128")
        untraced, traced = Engine(model, Path(name), *flags), Engine(model, Path(name), *flags, **variables)
        try:
            for engine in (untraced, traced):
                engine.wait_ready()
                run(engine, options, "warm")
            pairs = [measure_pair(untraced, traced, options, number) for number in range(options.pairs)]
            dropped = sum(
                traced.metric("quire_engine_dropped_spans_total", reason=reason)
                for reason in ("queue_full", "export_failed", "rate")
            )
        finally:
            for engine in (untraced, traced):
                engine.stop()
        print(f"  {spans()} spans of steps were collected, {dropped:.0f} dropped")
    report(pairs)


def make_model_of(folder: Path, layers: int) -> Path:
    """A model of random weights, with the demo model's tokenizer."""
    shape = {**SHAPE, "num_hidden_layers": layers, "vocab_size": 1024}
    model = make_model(folder / "model", shape)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, model)
    return model


def measure_spans(port: int, streams: int) -> None:
    """Prints the processor time of one span: of the event loop, which makes it, and of the exporter's thread."""
    provider = TracerProvider(shutdown_on_exit=False)
    dropped = Counter[DropReason]()
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}", insecure=True)
    processor = CountingSpanProcessor(exporter, dropped, max_queue_size=4 * SPANS)
    provider.add_span_processor(processor)
    spans = TraceExporter(enabled=True, step_interval=1, tracer=provider.get_tracer("bench"), dropped=dropped)
    for index in range(streams):
        spans.on_submit(Request(str(index), PROMPT, SamplingParams(), traceparent=traceparent(index)))
    ids = [str(index) for index in range(streams)]
    trace = StepTrace(1, time.time_ns(), StepTimings(), 1e-4, 1e-4, STEP, 0, streams, streams, 0, 0, False, ids)
    step = EngineCoreOutputs([], EngineLoad(*[0] * 8), [], trace)
    all_before, loop_before = time.process_time(), time.thread_time()
    for _ in range(SPANS):
        spans.on_step(step)
    loop = (time.thread_time() - loop_before) / SPANS
    processor.shutdown()
    total = (time.process_time() - all_before) / SPANS
    print(
        f"  the span of {streams} requests' step: {1e6 * loop:.0f} us of the loop and {1e6 * (total - loop):.0f} us "
        f"of the exporter's thread; at 100 steps a second {total / STEP:.2%} of a core"
    )


def traceparent(index: int) -> str:
    """That of a request whose trace is sampled."""
    return f"00-{index + 1:032x}-{index + 1:016x}-01"


def measure_pair(untraced: Engine, traced: Engine, options: argparse.Namespace, number: int) -> tuple[Steps, Steps]:
    """Both, the one that was second in the last pair first."""
    order = (untraced, traced) if number % 2 == 0 else (traced, untraced)
    made = {engine.port: run(engine, options, str(number)) for engine in order}
    without, beside = made[untraced.port], made[traced.port]
    print(
        f"  pair {number + 1}: {without.count} steps of {1e3 * without.seconds:.2f} ms without, "
        f"{beside.count} of {1e3 * beside.seconds:.2f} ms with; processor {1e3 * without.processor:.2f} and "
        f"{1e3 * beside.processor:.2f} ms",
        flush=True,
    )
    return without, beside


def run(engine: Engine, options: argparse.Namespace, name: str) -> Steps:
    """``streams`` requests of ``tokens`` tokens each; timed from the first step that has all of them."""
    process = psutil.Process(engine.popen.pid)
    with EngineSession(engine, f"bench-{name}-{engine.port}-{time.monotonic_ns()}") as session:
        session.snapshot()
        for index in range(options.streams):
            params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
            session.send(
                submit=pb.Submit(
                    request_id=f"{name}-{index}",
                    prompt_token_ids=PROMPT,
                    sampling=sampling_to_proto(params),
                    traceparent=traceparent(index),
                )
            )
        for _ in range(WARM_STEPS):
            session.batch()
        began, before = time.perf_counter(), processor_seconds(process)
        steps = ended = 0
        while ended < options.streams:
            batch = session.batch()
            steps += 1
            ended += sum(bool(output.finish_reason) for output in batch.outputs)
        seconds, processor = time.perf_counter() - began, processor_seconds(process) - before
    return Steps(steps, seconds / steps, processor / steps)


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report(pairs: list[tuple[Steps, Steps]]) -> None:
    """Prints the medians over the pairs."""
    longer = median(beside.seconds - without.seconds for without, beside in pairs)
    more = median(beside.processor - without.processor for without, beside in pairs)
    pace = 1 / median(without.seconds for without, _ in pairs)
    verdict = "within" if longer / STEP <= BAR else "over"
    print(
        f"  at {pace:.0f} steps a second a span of each step makes it {1e6 * longer:.0f} us longer and takes "
        f"{1e6 * more:.0f} us of processor time; at 100 a second {longer / STEP:.2%} ({verdict} {BAR:.0%}) and "
        f"{more / STEP:.2%} of a core"
    )


@contextmanager
def collecting() -> Iterator[tuple[int, Callable[[], int]]]:
    """A collector in a process of its own: its port, and a function for the spans of steps that it has."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=collect, args=(there,), daemon=True)
    process.start()

    def spans() -> int:
        here.send(None)
        return int(here.recv())

    try:
        yield int(here.recv()), spans
    finally:
        process.terminate()
        process.join()


def collect(pipe: Connection) -> None:
    """Keeps what comes as it is, and reads it when it is asked: the engines are to have the processors."""
    requests: list[bytes] = []
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    export = grpc.unary_unary_rpc_method_handler(lambda request, _: requests.append(request) or b"")
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    while True:
        pipe.recv()
        pipe.send(sum(map(count_steps, requests)))


def count_steps(request: bytes) -> int:
    resources = ExportTraceServiceRequest.FromString(request).resource_spans
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    return sum(span.name == "quire.engine.step" for span in spans)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=600, help="of each, so about as many steps in a round")
    parser.add_argument("--layers", type=int, default=16, help="of the model: so many that a step takes about 10 ms")
    return parser.parse_args()


if __name__ == "__main__":
    main()
