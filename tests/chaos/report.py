"""What a chaos run found: counts of streams and of what was wrong with them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from tests.chaos.answer import Answer
from tests.chaos.faults import REDIS, ROUTER
from tests.chaos.stack import Absence
from tests.chaos.workload import BATCH, CONVERSATION, UNWATCHED, Request

_OF_ANSWERS = ("lost", "repeated", "changed", "errors", "untyped", "hung", "malformed", "unended", "disturbed", "cut")
EXAMPLES_OF_A_KIND = 4
FOUND = (*_OF_ANSWERS, "left", "unmet")
COUNTS = ("streams", "resumed", "connections", "forgotten", "unwritten", *FOUND)
WRITTEN = 5.0  # seconds, many times as long as routers take to write a record in the background


@dataclass
class Report:
    """What docs/evidence/failures.md says of each count. Those of ``FOUND`` are zero, or the promise was not kept.

    ``resumed`` streams took more than one of the ``connections``. ``pauses`` has the longest one of each stream, in
    seconds, and judges nothing. Unless ``abrupt``, no connection may break.
    """

    abrupt: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    excused_ways: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the promise was kept."""
        return self.counts["streams"] > 0 and not any(self.counts[name] for name in FOUND)

    def begin(self, request: Request, wanted: Answer) -> None:
        """Judges one answer of which nothing had died: the others are compared with it."""
        flaws = [*wanted.malformed, *wanted.repeated, *_incomplete(request, wanted)]
        if flaws or wanted.failure or wanted.untyped or wanted.hung or wanted.broke or self._is_named_again(wanted):
            self.counts["disturbed"] += 1
            self.examples.append(f"disturbed: {request}\n  got {_shown(wanted)}, {wanted.broke} breaks, {flaws}")

    def compare(self, request: Request, wanted: Answer, got: Answer, absences: Sequence[Absence]) -> None:
        """Judges one stream."""
        self.counts.update(streams=1, connections=1 + got.resumed, resumed=got.resumed > 0)
        self.ways[request.way] += 1
        self.kinds[request.kind] += 1
        self.pauses.append(got.pause)
        verdict = _verdict(request, wanted, got)
        if verdict is None and self._is_named_again(got):
            verdict = "malformed"
        if verdict is None and _is_unended(got, absences):
            verdict = "unended"
        if verdict is None and got.broke and not self.abrupt:
            verdict = "cut"
        if verdict == "errors":
            verdict = _excuse(request, got, absences) or verdict
        if verdict in FOUND:
            self.examples.append(f"{verdict}: {request}\n{_story(wanted, got, absences)}")
        elif verdict is not None:
            self.excused_ways[f"{verdict} {request.way}"] += 1
        if verdict is not None:
            self.counts[verdict] += 1

    def close(self, left: Sequence[str]) -> None:
        """Takes in what was left when all was over."""
        self.counts["left"] += len(left)
        self.examples += [f"left: {each}" for each in left]

    def miss(self, fault: str, problem: Exception) -> None:
        """Takes in what a fault waited for in vain."""
        self.counts["unmet"] += 1
        self.examples.append(f"unmet: {fault}: {problem!r}")

    def _is_named_again(self, answer: Answer) -> bool:
        """Whether another answer has the same id."""
        name = str(answer.names.get("id", ""))
        self.names[name] += bool(name)
        return self.names[name] > 1

    def __str__(self) -> str:
        lines = [f"{name:>12} {self.counts[name]}" for name in COUNTS]
        lists = {"ways": self.ways, "kinds": self.kinds, "excused": self.excused_ways, "faults": self.faults}
        lines += [f"{name:>12} {_listed(counter)}" for name, counter in lists.items() if counter]
        lines += [f"{'pauses':>12} {_quantiles(self.pauses)}"] if self.pauses else []
        return "\n".join([*lines, *self._shown_examples()])

    def _shown_examples(self) -> Iterator[str]:
        """Some of each kind: what is frequent must not hide what is rare."""
        shown: Counter[str] = Counter()
        for example in self.examples:
            kind = example.partition(":")[0]
            shown[kind] += 1
            if shown[kind] <= EXAMPLES_OF_A_KIND:
                yield example


def _quantiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    parts = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return ", ".join(f"{name} {ordered[ceil(part * len(ordered)) - 1]:.1f} s" for name, part in parts.items())


def _is_unended(got: Answer, absences: Sequence[Absence]) -> bool:
    """Whether a router took the answer for running after its end, without a Redis that may have lost the end."""
    losses = [absence for absence in absences if absence.name == REDIS]
    return any(not any(loss.meets(ended, read) for loss in losses) for ended, read, _ in got.unended)


def _verdict(request: Request, wanted: Answer, got: Answer) -> str | None:
    """The gravest deviation, or None. An error excuses nothing that came before it."""
    found = {"malformed": got.malformed, "repeated": got.repeated, "untyped": got.untyped, "hung": got.hung}
    for name, happened in found.items():
        if happened:
            return name
    if request.crosses:
        wanted, got = wanted.without_tokens(), got.without_tokens()
    ended = [index for index, choice in got.choices.items() if choice.end]
    if got.failure is not None and got.begins(wanted):
        whole = all(got.choices[index].content() == wanted.choices[index].content() for index in ended)
        return "errors" if whole else "lost"
    if got.content() == wanted.content():
        return None
    is_less = got.length < wanted.length or got.usage in (None, wanted.usage)
    return "lost" if got.begins(wanted) and is_less else "repeated" if got.length > wanted.length else "changed"


def _incomplete(request: Request, answer: Answer) -> Iterator[str]:
    """What a whole answer to this request has to have, whatever the model says."""
    if set(answer.choices) != set(range(request.choices)):
        yield f"choices {list(answer.choices)}"
    if not all(choice.end for choice in answer.choices.values()) or answer.usage is None:
        yield "no end, or no usage"
    most = int(request.body.get("max_tokens", 0))
    cut = [choice for choice in answer.choices.values() if choice.end == "length" and most and not request.searches]
    if any(choice.tokens and len(choice.tokens) != most for choice in cut if not request.crosses):
        yield f"other than {most} tokens"
    if len(cut) == request.choices and answer.usage and answer.usage[1] != most * len(cut):
        yield f"a usage of {answer.usage}"
    if any(choice.end not in ("stop", "length", "tool_calls") for choice in answer.choices.values()):
        yield "an end of another kind"


def _excuse(request: Request, got: Answer, absences: Sequence[Absence]) -> str | None:
    """The name under which the error of a request with a lost record is counted, or None if it is not excused."""
    if got.failure is None or not got.failure.is_unknown_request:
        return None
    routers = [absence for absence in absences if absence.name == ROUTER]
    losses = [absence for absence in absences if absence.name == REDIS]
    was_stopped = any(router.begin <= got.failed_at <= router.end for router in routers)
    is_known = got.known_after_all and request.prompts == 1  # of a list only the first prompt is asked after
    if (not is_known or was_stopped) and _was_forgotten(request, got, routers, losses):
        return "forgotten"
    return "unwritten" if _was_unwritten(request, got, routers) else None


def _was_forgotten(request: Request, got: Answer, routers: Sequence[Absence], losses: Sequence[Absence]) -> bool:
    """Whether, within the request's lifetime and while the client had no working router, Redis was away and came
    back empty, or a router was away as well that may not have written the record again. A client that came back while
    Redis was away has one when Redis is there: nothing can be claimed before. No router has a lease on a background
    request that has ended or whose router has, and none on a turn of a conversation that has ended. What is known of a
    file or a batch is in Redis alone.
    """
    away = [
        (begin, max([end, *(each.end for each in losses if each.begin <= end <= each.end)])) for begin, end in got.away
    ]
    away += [(each.begin, each.end) for each in routers if request.way in UNWATCHED]
    if request.way in (CONVERSATION, BATCH):  # between its turns no router has a lease
        away.append((0.0, inf))
    first_sent = min(got.sent, default=0.0)
    for begin, end in ((max(begin, first_sent), min(end, got.failed_at)) for begin, end in away):
        for loss in losses:
            lost = any(router.meets(max(first_sent, loss.begin), min(got.failed_at, loss.end)) for router in routers)
            if begin < end and loss.meets(begin, end) and (loss.empty or lost):
                return True
    return False


def _was_unwritten(request: Request, got: Answer, routers: Sequence[Absence]) -> bool:
    """Whether the request is one that does not wait for its record, with a router that died just when it had come."""
    waits = request.keyed or request.prompts > 1
    return not waits and any(sent <= router.begin <= sent + WRITTEN for router in routers for sent in got.sent)


def _shown(answer: Answer) -> str:
    known = " (but it is known)" if answer.known_after_all else ""
    what = answer.failure or answer.untyped or answer.malformed or answer.repeated or answer.unended or ""
    return f"{str(what)[:1000]}{known} {str(answer.content())[:2000]}"


def _story(wanted: Answer, got: Answer, absences: Sequence[Absence]) -> str:
    """What is needed to see what happened, with what was away while the request lived."""
    near = [each for each in absences if each.meets(min(got.sent, default=0.0), got.failed_at)]
    sent = (
        f"sent {len(got.sent)} times, {got.sent[:1]} to {got.sent[-2:]}, failed {got.failed_at}, away {got.away[-3:]}"
    )
    ways = f"{got.resumed} times resumed, {got.broke} breaks, {sent}, {near}"
    return f"  wanted {_shown(wanted)}\n  got    {_shown(got)}\n  {ways}"


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))
