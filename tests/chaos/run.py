"""The chaos run: streams while parts die, each compared with the answer of the undisturbed run. ``make chaos``."""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic

import httpx

from tests.chaos.answer import Answer
from tests.chaos.batch_client import BatchClient
from tests.chaos.changes import named, possible, upgrade
from tests.chaos.client import BackgroundClient, Client, Manners, PollingClient, StreamClient, WholeClient
from tests.chaos.faults import Fault
from tests.chaos.leftovers import leftovers
from tests.chaos.messages_client import MessagesClient
from tests.chaos.redis_faults import NO_CLOCK, set_back_redis
from tests.chaos.report import Report
from tests.chaos.responses_client import ConversationClient
from tests.chaos.rpc_client import CrossingClient, RpcClient
from tests.chaos.stack import PLAIN, Form, Stack, running_stack
from tests.chaos.workload import (
    BACKGROUND,
    BATCH,
    CONVERSATION,
    CROSSING,
    MESSAGES,
    POLLING,
    RPC,
    STREAM,
    WHOLE,
    Request,
    requests,
)  # fmt: skip

CLIENTS: dict[str, type[Client]] = {
    STREAM: StreamClient, WHOLE: WholeClient, RPC: RpcClient, BACKGROUND: BackgroundClient, POLLING: PollingClient,
    CROSSING: CrossingClient, CONVERSATION: ConversationClient, MESSAGES: MessagesClient, BATCH: BatchClient,
}  # fmt: skip
CALM = Manners(silence=60.0)  # who leaves because of a slow machine would not be undisturbed

UPGRADED = Form(delay=4.0, grace=240.0)
"""Whatever runs comes to its end."""


def _keep_quiet(_text: str) -> None:
    pass


@dataclass(frozen=True)
class Plan:
    """Every fault comes ``rounds`` times, in an order of chance. ``pause`` is how many seconds a stopped part is
    stopped, ``rest`` the longest time between two faults, and ``pairs`` the chance that two come at once. There are
    ``concurrency`` clients at a time. Where nothing is ``abrupt`` no connection may break either.
    """

    manners: Manners
    seed: int = 0
    rounds: int = 1
    pause: float = 10.0
    rest: float = 1.0
    pairs: float = 0.0
    concurrency: int = 48
    abrupt: bool = True


async def chaos(
    stack: Stack,
    work: Sequence[Request],
    faults: Sequence[Fault],
    plan: Plan,
    tell: Callable[[str], None] = _keep_quiet,
) -> Report:
    """Runs all of ``work`` undisturbed, then again for as long as faults follow, and reports each through ``tell``.
    Then it looks for leftovers.
    """
    report, chance = Report(abrupt=plan.abrupt), random.Random(plan.seed)
    async with _http(CALM) as http:
        calm = _Crowd(stack, http, work, chance, CALM, "calm")
        await calm.come(plan.concurrency, lambda: False)
        tell(f"{len(work)} answers undisturbed")
    async with _http(plan.manners) as http:
        crowd = _Crowd(stack, http, work, chance, plan.manners, "chaos")
        trouble = asyncio.create_task(disturb(stack, faults, plan, chance, report, tell))
        await crowd.come(plan.concurrency, lambda: not trouble.done())
        await trouble
    for number, answer in calm.answers.items():
        report.begin(work[number], answer)
    for number, answer in crowd.answers.items():
        report.compare(work[number % len(work)], calm.answers[number % len(work)], answer, stack.absences)
    tell("all clients have gone")
    report.close(await leftovers(stack))
    return report


async def disturb(
    stack: Stack,
    faults: Sequence[Fault],
    plan: Plan,
    chance: random.Random,
    report: Report,
    tell: Callable[[str], None],
) -> None:
    """Brings each fault ``plan.rounds`` times, in random order. What one waits for in vain is the report's, and the
    next comes; any other error is raised.
    """
    left = [fault for _ in range(plan.rounds) for fault in chance.sample(list(faults), len(faults))]
    while left:
        now = [left.pop() for _ in range(1 + (chance.random() < plan.pairs)) if left]
        names = [fault.__name__ for fault in now]
        report.faults.update(names)
        tell(" and ".join(names))
        outcomes = await asyncio.gather(*(fault(stack, chance, plan.pause) for fault in now), return_exceptions=True)
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, AssertionError | TimeoutError):
                tell(f"{name}: {outcome!r}")
                report.miss(name, outcome)
            elif outcome is not None:
                raise outcome
        await asyncio.sleep(chance.uniform(0.2, 1.0) * plan.rest)


class _Crowd:
    """Clients, so many at a time, each with the next request; their ``answers`` by number."""

    def __init__(
        self,
        stack: Stack,
        http: httpx.AsyncClient,
        work: Sequence[Request],
        chance: random.Random,
        manners: Manners,
        key: str,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self._stack = stack
        self._http = http
        self._work = work
        self._chance = chance
        self._manners = manners
        self._key = key
        self._numbers = count()

    async def come(self, width: int, more: Callable[[], bool]) -> None:
        """Until all requests were answered once, and while there is ``more``."""
        await asyncio.gather(*(self._one_after_the_other(more) for _ in range(width)))

    async def _one_after_the_other(self, more: Callable[[], bool]) -> None:
        while (number := next(self._numbers)) < len(self._work) or more():
            await self._stack.admits.wait()
            request, own = self._work[number % len(self._work)], random.Random(self._chance.getrandbits(32))
            client = CLIENTS[request.way](self._stack, self._http, f"{self._key}-{number}", own, self._manners)
            self.answers[number] = await client.run(request)


def _http(manners: Manners) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(manners.silence, connect=5.0))


def _progress_printer() -> Callable[[str], None]:
    began = monotonic()
    return lambda text: print(f"{monotonic() - began:6.0f} s  {text}", flush=True)


async def main(arguments: Sequence[str]) -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="different requests, each sent again and again")
    parser.add_argument("--rounds", type=int, default=5, help="how often each fault comes")
    parser.add_argument("--concurrency", type=int, default=48, help="clients at a time")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds that a stopped part is stopped")
    parser.add_argument("--silence", type=float, default=7.0, help="seconds without a byte after which a client leaves")
    parser.add_argument("--cut", type=float, default=0.002, help="chance that a client hangs up after an event")
    parser.add_argument("--pairs", type=float, default=0.3, help="chance that two faults come at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="only these; default: all")
    parser.add_argument("--plain", action="store_true", help="a list of engines, and no TLS")
    parser.add_argument("--upgrade", action="store_true", help="all is replaced, and no connection may break")
    parser.add_argument("--journal-file", action="store_true", help="one router, whose journal is a file")
    parser.add_argument("--speculative-method", default="none", help="how the engines guess tokens")
    parser.add_argument("--keep", type=Path, help="a folder for the processes' output")
    options = parser.parse_args(arguments)
    form = PLAIN if options.plain else UPGRADED if options.upgrade else Form()
    form = replace(form, method=options.speculative_method, journal_file=options.journal_file)
    faults = [upgrade] if options.upgrade else named(options.faults) if options.faults else possible(form)
    manners = CALM if options.upgrade else Manners(cut=options.cut, silence=options.silence)
    more = {"pause": options.pause, "pairs": options.pairs, "concurrency": options.concurrency}
    plan = Plan(manners, options.seed, options.rounds, abrupt=not options.upgrade, **more)
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        async with running_stack(options.keep or Path(folder), form) as stack:
            if stack.redis.clock is None and set_back_redis in faults:
                faults.remove(set_back_redis)
                print(f"skipped: {set_back_redis.__name__}, as {NO_CLOCK}")
            report = await chaos(stack, requests(options.streams, options.seed), faults, plan, _progress_printer())
    print(report)
    return 0 if report.clean else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left behind
    sys.exit(asyncio.run(main(sys.argv[1:])))
