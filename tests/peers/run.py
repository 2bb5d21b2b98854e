"""Runs other servers' own HTTP suites against Quire and prints a table: ``python -m tests.peers.run FOLDER [PEER...]``.

FOLDER is made by ``scripts/peer_suites.sh``: unpacked sources, an environment for the suites, and checkpoints. A case
that does not pass has a class: by its error, if that says why (docs/parameters.md promises refusals), and else by the
longest prefix of its id in ``classes.json``. What has none is a fault.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

HERE = Path(__file__).parent
SHIMS = HERE / "shims"
_CASE_SECONDS = 300  # with the start of a server


class Outcome(StrEnum):
    """What became of a case."""

    PASS = "pass"
    SKIPPED = "skipped by the peer"
    REAL_MODEL = "needs a real model"
    INTERNAL = "internal to the peer"
    REFUSED = "refused as documented"
    NO_ROUTE = "no such route"
    FAULT = "fault"


_CAUSES = {
    "is not supported here:": Outcome.REFUSED,
    "There is nothing at /": Outcome.NO_ROUTE,
    "LocalEntryNotFoundError": Outcome.REAL_MODEL,
    "OfflineModeIsEnabled": Outcome.REAL_MODEL,
    "Max retries exceeded with url: /": Outcome.REAL_MODEL,  # pictures and the like
}
"""What an error says for itself."""


@dataclass(frozen=True, slots=True)
class Suite:
    """How a peer's tests are run: pytest's arguments, in a folder of its sources."""

    folder: str
    shim: str
    arguments: tuple[str, ...]
    tests: str
    without: tuple[str, ...] = ()

    def files(self, sources: Path) -> list[str]:
        """Returns the files with tests of a server that do not need images, sound or several GPUs."""
        found = [path for path in sorted((sources / self.folder).glob(self.tests)) if "Remote" in path.read_text()]
        names = [path.relative_to(sources / self.folder).as_posix() for path in found]
        return [name for name in names if not any(part in name for part in self.without)]


_VLLM_WITHOUT = (
    *("multimodal", "speech_to", "/rl/", "launchers", "scale_out", "correctness", "/dev/rpc", "vision", "mteb"),
    *("prompt_embeds", "test_joint_e2e"),
)
SUITES: Mapping[str, Suite] = {
    "vllm": Suite(
        ".", "vllm_shim", ("--confcutdir=tests/entrypoints",), "tests/entrypoints/**/test_*.py", _VLLM_WITHOUT
    ),
    "llama.cpp": Suite("vendor/llama.cpp/tools/server/tests", "llama_shim", ("unit",), ""),
    "sglang": Suite(".", "quire_servers", (f"--rootdir={SHIMS}", str(SHIMS / "sglang_kits.py")), ""),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a suite; ``error`` is empty if it passed."""

    id: str
    error: str
    is_skipped: bool = False


def cases_of(report: str) -> list[Case]:
    """Returns the cases of a report in JUnit's format. One with several reports has its first error."""
    cases: dict[str, Case] = {}
    for element in ET.fromstring(report).iter("testcase"):
        name = f"{element.get('classname', '')}::{element.get('name', '')}"
        errors = [each for kind in ("failure", "error") for each in element.findall(kind)]
        text = "\n".join(f"{each.get('message', '')}\n{each.text or ''}" for each in errors)
        if name not in cases or not cases[name].error:
            cases[name] = Case(name, text, element.find("skipped") is not None)
    return list(cases.values())


def outcome(case: Case, classes: Mapping[str, Sequence[str]]) -> Outcome:
    """Returns the class of a case. ``classes`` has classes and reasons by prefixes of ids."""
    if case.is_skipped:
        return Outcome.SKIPPED
    if not case.error:
        return Outcome.PASS
    for words, cause in _CAUSES.items():
        if words in case.error:
            return cause
    prefix = max((each for each in classes if case.id.startswith(each)), key=len, default=None)
    return Outcome.FAULT if prefix is None else Outcome(classes[prefix][0])


def table(counts: Mapping[str, Counter[Outcome]]) -> str:
    """Returns the counts of each suite as Markdown."""
    rows = ["| suite | cases | " + " | ".join(Outcome) + " |", "|---" * (len(Outcome) + 2) + "|"]
    for peer, count in counts.items():
        rows.append(f"| {peer} | {count.total()} | " + " | ".join(str(count[each]) for each in Outcome) + " |")
    return "\n".join(rows)


def run(peer: str, folder: Path) -> Path:
    """Runs a suite, and returns its report."""
    suite, sources, report = SUITES[peer], folder / "sources" / peer, folder / f"{peer}.xml"
    own = {
        "QUIRE_COMMAND": f"{sys.executable} -m quire_cli.main",
        "QUIRE_CHECKPOINTS": str(folder / "checkpoints"),
        "PYTHONPATH": os.pathsep.join([str(SHIMS), str(sources / suite.folder)]),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", suite.shim, "--continue-on-collection-errors"]
    limits = [f"--timeout={_CASE_SECONDS}", f"--junitxml={report}"]
    arguments = [*suite.arguments, *(suite.files(sources) if suite.tests else ())]
    python = folder / "environment" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pytest", *options, *limits, *arguments],
        cwd=sources / suite.folder,
        env={**os.environ, **own},
        stdout=(folder / f"{peer}.log").open("wb"),
        check=False,
    )
    return report


def main(folder: Path, peers: Iterable[str]) -> int:
    """Runs the suites, prints the faults and then the table. Returns 1 if there are faults."""
    classes = json.loads((HERE / "classes.json").read_text(encoding="utf-8"))
    counts: dict[str, Counter[Outcome]] = {}
    for peer in peers:
        cases = cases_of(run(peer, folder).read_text(encoding="utf-8"))
        outcomes = {case: outcome(case, classes.get(peer, {})) for case in cases}
        counts[peer] = Counter(outcomes.values())
        for case, each in outcomes.items():
            if each is Outcome.FAULT:
                print(f"fault: {peer}: {case.id}: {case.error.strip().splitlines()[0][:160]}")
    print(table(counts))
    return 1 if any(count[Outcome.FAULT] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:] or SUITES))
