"""Says what became of a case of another server's suite, and why one that fails cannot pass."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of a case."""

    PASS = "pass"
    SKIPPED = "skipped by the peer"
    REAL_MODEL = "needs a real model"
    INTERNAL = "internal to the peer"
    REFUSED = "refused as documented"
    NOT_OFFERED = "not offered"
    FAULT = "fault"
    NOT_REACHED = "not reached"


EXCUSES = (Outcome.REAL_MODEL, Outcome.INTERNAL, Outcome.REFUSED, Outcome.NOT_OFFERED)
"""Why a case that fails is no fault."""
_OUTCOMES = {
    "passed": Outcome.PASS,
    "unserved": Outcome.INTERNAL,  # it passed without a server, so it is about the peer's own code
    "skipped": Outcome.SKIPPED,
    "collected": Outcome.NOT_REACHED,
}
_CAUSES = {
    "is not supported here:": Outcome.REFUSED,
    "There is nothing at /": Outcome.NOT_OFFERED,
    "LocalEntryNotFoundError": Outcome.REAL_MODEL,
    "OfflineModeIsEnabled": Outcome.REAL_MODEL,
    "couldn't connect to 'https://huggingface.co'": Outcome.REAL_MODEL,
    "Max retries exceeded with url: /": Outcome.REAL_MODEL,  # pictures and the like
    "fixture 'hf_runner' not found": Outcome.INTERNAL,  # which are of files that need what vLLM compiles
    "fixture 'vllm_runner' not found": Outcome.INTERNAL,
}
"""What an error says for itself."""
_OURS = ("quire serve did not start", "Error code: 500", "500 Server Error", "from pytest-timeout", "APITimeoutError")
"""What is a fault in any case."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a suite; ``error`` is empty if it passed."""

    id: str
    error: str = ""
    outcome: str = "passed"

    @property
    def summary(self) -> str:
        """The first line of the error, cut."""
        return next(iter(self.error.strip().splitlines()), "")[:160]


def cases_of(lines: Iterable[str]) -> list[Case]:
    """Returns the cases of a log that ``case_log`` wrote. A case that failed in several parts has its first error."""
    cases: dict[str, Case] = {}
    for line in lines:
        case = Case(**json.loads(line))
        if case.id not in cases or cases[case.id].outcome in ("collected", "passed", "unserved"):
            cases[case.id] = case
    return list(cases.values())


class Classes:
    """A peer's classes of cases that cannot pass: each has a class, a reason, the beginnings of the ids of its cases,
    and words of which the error must hold one. Those of a class that is ``sometimes`` so pass now and then.
    """

    def __init__(self, classes: Sequence[Mapping[str, Any]]) -> None:
        self._by_prefix = {prefix: each for each in classes for prefix in each["cases"]}
        self._used: set[str] = set()

    def outcome(self, case: Case) -> Outcome:
        """Returns what became of a case. The longest beginning of its id decides, then what the error says."""
        if case.outcome != "failed":
            return _OUTCOMES[case.outcome]
        if any(words in case.error for words in _OURS):
            return Outcome.FAULT
        prefix = max((each for each in self._by_prefix if case.id.startswith(each)), key=len, default=None)
        if prefix is not None and any(words in case.error for words in self._by_prefix[prefix]["errors"]):
            self._used.add(prefix)
            return Outcome(self._by_prefix[prefix]["class"])
        return next((cause for words, cause in _CAUSES.items() if words in case.error), Outcome.FAULT)

    def unused(self) -> list[str]:
        """Returns the beginnings of ids that no case so far needed, and that are needed in every run."""
        always = (prefix for prefix, each in self._by_prefix.items() if not each.get("sometimes"))
        return [prefix for prefix in always if prefix not in self._used]
