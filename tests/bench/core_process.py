"""What streams cost the steps of a served engine, with its core on a thread and in a process of its own:
``python -m tests.bench.core_process``.

The model is that of ``host_step``, so that nearly all of a step is the engine's own work. So many streams begin at once
over a few sessions and end together. Printed are the tokens per second, the milliseconds from one batch of a session to
the next (median and 99th percentile), and the processor time of the engine's processes per token. Both forms run in
turns. A machine with two cores has none left for the client, whose work is the same in both forms.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from threading import Barrier, Thread

import psutil
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.bench.host_step import FOLDER, VOCABULARY, write_model
from tests.support.engine_session import EngineSession
from tests.support.processes import Engine

FORMS = {"thread": "--no-engine-core-process", "process": "--engine-core-process"}
FLAGS = ("--kv-cache-memory", str(256 << 20), "--swap-space", "0", "--no-enable-prefix-caching")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not (FOLDER / "config.json").exists():
        write_model(FOLDER)
    print("| streams | core | tokens/s | batches, ms p50 | p99 | CPU, µs per token |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            form: Engine(FOLDER, Path(folder), *FLAGS, "--max-num-seqs", str(max(options.streams)), flag)
            for form, flag in FORMS.items()
        }
        for engine in engines.values():
            engine.wait_ready()
        for streams in options.streams:
            results: dict[str, list[tuple[float, float, float, float]]] = {form: [] for form in FORMS}
            for number in range(options.rounds + 1):
                for form, engine in engines.items():
                    result = measure(engine, streams, options.sessions, options.tokens)
                    results[form] += [result] if number else []  # the first one warms up
            for form, each in results.items():
                rate, median, late, cpu = map(statistics.median, zip(*each, strict=True))
                print(f"| {streams} | {form} | {rate:,.0f} | {median:.2f} | {late:.2f} | {cpu:.1f} |", flush=True)
        for engine in engines.values():
            engine.stop()


def measure(engine: Engine, streams: int, sessions: int, tokens: int) -> tuple[float, float, float, float]:
    """Tokens per second, milliseconds between batches (median and 99th percentile), and µs of CPU time per token."""
    gaps: list[float] = []
    begin = Barrier(sessions + 1)
    threads = [
        Thread(target=run_session, args=(engine, number, streams // sessions, tokens, begin, gaps))
        for number in range(sessions)
    ]
    for thread in threads:
        thread.start()
    begin.wait()
    begun, used = time.perf_counter(), cpu_seconds(engine)
    for thread in threads:
        thread.join()
    seconds, used = time.perf_counter() - begun, cpu_seconds(engine) - used
    count = streams // sessions * sessions * tokens
    late = statistics.quantiles(gaps, n=100)[-1]
    return count / seconds, 1e3 * statistics.median(gaps), 1e3 * late, 1e6 * used / count


def run_session(engine: Engine, number: int, streams: int, tokens: int, begin: Barrier, gaps: list[float]) -> None:
    """Runs the streams of one session, and adds the seconds between its batches to ``gaps``."""
    with EngineSession(engine, f"bench-{number}-{time.monotonic_ns()}") as link:
        link.snapshot()
        begin.wait()
        for handle in range(1, streams + 1):
            sampling = types.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=handle)
            prompt = [(handle * 31 + place) % VOCABULARY for place in range(16)]
            link.send(
                submit=pb.Submit(request_id=str(handle), prompt_token_ids=prompt, sampling=sampling, handle=handle)
            )
        ended, last = 0, time.perf_counter()
        while ended < streams:
            batch = link.batch()
            ended += sum(bool(output.finish_reason) for output in batch.outputs)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            link.send(ack=pb.Ack(sequence=batch.sequence))


def cpu_seconds(engine: Engine) -> float:
    """The processor time that an engine's processes have used."""
    server = psutil.Process(engine.popen.pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
