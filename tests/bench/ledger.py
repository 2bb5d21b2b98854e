"""CPU time of the load: a report written into the table, a share of 1,000 engines told, and heard.

``python -m tests.bench.ledger`` prints the least of several rounds, in microseconds.
"""

from collections.abc import Callable
from time import thread_time

from quire.v1 import engine_pb2
from quire_router.engines.load import LoadLedger
from quire_router.engines.load_messages import LoadMessage, RouterLoad
from quire_router.placement.engine_table import EngineTable

ENGINES = 1_000
ROUNDS = 20


def least(what: Callable[[], object], count: int) -> float:
    """Microseconds of each of ``count`` calls, in the quickest round."""
    times = []
    for _ in range(ROUNDS):
        began = thread_time()
        for _ in range(count):
            what()
        times.append((thread_time() - began) / count * 1e6)
    return min(times)


def main() -> None:
    ledger = LoadLedger(EngineTable())
    names = [f"10.0.{number // 256}.{number % 256}:9000" for number in range(ENGINES)]
    accounts = [ledger.add(name) for name in names]
    for name in names:
        ledger.begin(name, pending_tokens=1000, sequences=1)
    pace = engine_pb2.Pace(step_seconds=0.01, token_seconds=1e-4, sequence_seconds=1e-4, host_block_seconds=1e-4)
    load = engine_pb2.Load(running=20, waiting=3, uncomputed_tokens=900, blocks_total=9, blocks_free=5, pace=pace)
    print(f"a report into the table: {least(lambda: accounts[7].report(load), 2_000):.2f} us")
    print(f"a dispatch, from begin to end: {least(lambda: dispatch(ledger, names[7]), 1_000):.2f} us")
    print(f"{ENGINES} engines made into a payload: {least(lambda: told(ledger, 'r', 1), 5):.0f} us")
    payloads = [told(ledger, "peer", number) for number in range(1, 1 + 5 * ROUNDS)]
    coming = iter(payloads)
    print(f"{ENGINES} engines heard, nothing new: {least(lambda: hear(ledger, next(coming)), 5):.0f} us")
    print(f"the payload has {len(payloads[0])} bytes")


def dispatch(ledger: LoadLedger, engine_id: str) -> None:
    entry = ledger.begin(engine_id, pending_tokens=1000, sequences=1)
    entry.on_first_output()
    entry.end()


def told(ledger: LoadLedger, router_id: str, sequence: int) -> bytes:
    share: RouterLoad = ledger.local_load()
    return LoadMessage(router_id, sequence, share).encode()


def hear(ledger: LoadLedger, payload: bytes) -> None:
    ledger.on_message(LoadMessage.decode(payload), 30)


if __name__ == "__main__":
    main()
