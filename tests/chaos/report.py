"""What a chaos run found: counts of streams and of what was wrong with them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.answer import Answer
from tests.chaos.faults import REDIS, ROUTER
from tests.chaos.stack import Absence
from tests.chaos.workload import BACKGROUND, POLLING, Request

FOUND = ("lost", "repeated", "changed", "errors", "untyped", "hung")
COUNTS = ("streams", "resumed", "connections", "forgotten", *FOUND)


@dataclass
class Report:
    """``lost``, ``repeated``, ``changed`` are streams with tokens that were so; ``errors`` are typed ones, ``untyped``
    whatever else ended a stream, ``hung`` those that did not end. All of these zero is the promise. ``forgotten`` are
    typed errors of requests whose record Redis lost, or never had, while no router held them: nobody was left who knew.
    ``resumed`` streams took more than one connection; ``connections`` are all of them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    forgotten_ways: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the promise was kept."""
        return not any(self.counts[name] for name in FOUND)

    def compare(self, request: Request, wanted: Answer, got: Answer, absences: Sequence[Absence]) -> None:
        """Judges one stream."""
        self.counts.update(streams=1, connections=1 + got.resumed, resumed=got.resumed > 0)
        self.ways[request.way] += 1
        verdict = _verdict(wanted, got)
        if verdict == "errors" and _was_forgotten(request, got, absences):
            verdict = "forgotten"
        if verdict is not None:
            self.counts[verdict] += 1
        if verdict == "forgotten":
            self.forgotten_ways[request.way] += 1
        elif verdict is not None:
            self.examples.append(
                f"{verdict}: {request}\n  wanted {_shown(wanted)}\n  got    {_shown(got)}, {got.resumed} times resumed"
            )

    def __str__(self) -> str:
        lines = [f"{name:>12} {self.counts[name]}" for name in COUNTS]
        lists = {"ways": self.ways, "of forgotten": self.forgotten_ways, "faults": self.faults}
        lines += [f"{name:>12} {_listed(counter)}" for name, counter in lists.items() if counter]
        return "\n".join(lines + self.examples[:10])


def _verdict(wanted: Answer, got: Answer) -> str | None:
    for name, happened in (("hung", got.hung), ("errors", got.error), ("untyped", got.untyped)):
        if happened:
            return name
    if got.repeated_ends:
        return "repeated"
    if got.told() == wanted.told():
        return None
    short = all(wanted.texts[index].startswith(text) for index, text in got.texts.items())
    longer = sum(map(len, got.texts.values())) > sum(map(len, wanted.texts.values()))
    return "lost" if short else "repeated" if longer else "changed"


def _was_forgotten(request: Request, got: Answer, absences: Sequence[Absence]) -> bool:
    """Whether Redis was away while no router was at work for the client, as far as it knew, and nobody gave it the
    record again, but for a router that was stopped then. Nobody holds a background request that has ended, or whose
    router has.
    """
    routers = [(absence.begin, absence.end) for absence in absences if absence.name == ROUTER]
    was_stopped = any(begin <= got.failed_at <= end for begin, end in routers)
    if (
        (got.known_after_all and not was_stopped)
        or not got.error
        or not ("404" in got.error or "NOT_FOUND" in got.error)
    ):
        return False
    losses = [(absence.begin, absence.end) for absence in absences if absence.name == REDIS]
    away = list(got.away)
    if request.way in (BACKGROUND, POLLING):
        away += routers
    return any(begin < loss_end and loss_begin < end for begin, end in away for loss_begin, loss_end in losses)


def _shown(answer: Answer) -> str:
    known = " (but it is known)" if answer.known_after_all else ""
    return f"{str(answer.told())[:2000]} {answer.error or answer.untyped or ''}{known}"


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))
