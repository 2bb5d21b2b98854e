"""Runs other servers' own HTTP suites against Quire and prints a table: ``python -m tests.peers.run FOLDER [PEER...]``.

FOLDER is made by ``scripts/peer_suites.sh``: unpacked sources, an environment for the suites, and checkpoints. A case
that does not pass is a fault unless ``classes.json`` says why it cannot pass (``classes.py``).
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.classes import Case, Classes, Outcome, cases_of

HERE = Path(__file__).parent
SHIMS = HERE / "shims"
_CASE_SECONDS = 300  # with the start of a server
_SUITE_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Suite:
    """How a peer's tests are run: ``options`` of pytest, in a ``folder`` of its sources, and which: ``tests``, or the
    files that this pattern finds, but for those with one of ``without`` in their names.
    """

    folder: str
    shim: str
    options: tuple[str, ...]
    tests: str
    without: tuple[str, ...] = ()

    def files(self, sources: Path) -> list[str]:
        """Returns the files with tests of a server that do not need images, sound or several GPUs."""
        if "*" not in self.tests:
            return [self.tests]
        found = [path for path in sorted((sources / self.folder).glob(self.tests)) if "Remote" in _with_conftest(path)]
        names = [path.relative_to(sources / self.folder).as_posix() for path in found]
        return [name for name in names if not any(part in name for part in self.without)]


def _with_conftest(path: Path) -> str:
    """Returns the text of a module, with that of the fixtures beside it if it takes a client from there."""
    text, fixtures = path.read_text(encoding="utf-8"), path.with_name("conftest.py")
    return text + (fixtures.read_text(encoding="utf-8") if "client" in text and fixtures.exists() else "")


_VLLM_WITHOUT = (
    *("multimodal", "speech_to", "/rl/", "launchers", "scale_out", "correctness", "/dev/rpc", "vision", "mteb"),
    *("prompt_embeds", "test_joint_e2e"),
)
SUITES: Mapping[str, Suite] = {
    "vllm": Suite(
        ".", "vllm_shim", ("--confcutdir=tests/entrypoints",), "tests/entrypoints/**/test_*.py", _VLLM_WITHOUT
    ),
    # llama.cpp runs its slow ones, which load models of billions of parameters, on demand only. What is ignored asks
    # for /apply-template, which Quire does not have, with a server for each of 35 templates.
    "llama.cpp": Suite(
        "vendor/llama.cpp/tools/server/tests",
        "llama_shim",
        ("-m", "not slow", "--ignore=unit/test_template.py"),
        "unit",
    ),
    "sglang": Suite(".", "quire_servers", (f"--rootdir={SHIMS}",), str(SHIMS / "sglang_kits.py")),
}


def table(counts: Mapping[str, Counter[Outcome]]) -> str:
    """Returns the counts of each suite as Markdown."""
    rows = ["| suite | cases | " + " | ".join(Outcome) + " |", "|---" * (len(Outcome) + 2) + "|"]
    for peer, count in counts.items():
        rows.append(f"| {peer} | {count.total()} | " + " | ".join(str(count[each]) for each in Outcome) + " |")
    return "\n".join(rows)


def settled(lines: Iterable[str], classes: Classes) -> list[str]:
    """Returns those lines of a log that are about cases which need not run again: they passed, or cannot."""
    lines = list(lines)
    open_ids = {case.id for case in cases_of(lines) if classes.outcome(case) in (Outcome.FAULT, Outcome.NOT_REACHED)}
    return [line for line in lines if json.loads(line)["id"] not in open_ids]


def run(peer: str, folder: Path, selection: Sequence[str], known: Sequence[str]) -> list[Case]:
    """Runs a suite, or what ``selection`` names of it by pytest's arguments, and returns its cases. Those that the
    ``known`` lines of its log are about are not run.
    """
    suite, sources, log = SUITES[peer], folder / "sources" / peer, folder / f"{peer}.jsonl"
    own = {
        "QUIRE_CASES": str(log),
        "QUIRE_COMMAND": f"{sys.executable} -m quire_cli.main",
        "QUIRE_CHECKPOINTS": str(folder / "checkpoints"),
        "QUIRE_SOURCES": str(folder / "sources"),
        "PYTHONPATH": os.pathsep.join([str(SHIMS), str(sources / suite.folder)]),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "case_log", "-p", suite.shim]
    limits = [f"--timeout={_CASE_SECONDS}", "--continue-on-collection-errors"]
    python = folder / "environment" / "bin" / "python"
    log.write_text("".join(f"{line}\n" for line in known), encoding="utf-8")
    with (folder / f"{peer}.log").open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "pytest", *options, *limits, *suite.options, *(selection or suite.files(sources))],
            cwd=sources / suite.folder,
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(_SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{peer}: ended after {_SUITE_SECONDS} s", flush=True)
            process.terminate()  # which its shim answers by ending the servers
            process.wait()
    return cases_of(log.read_text(encoding="utf-8").splitlines())


def main(
    folder: Path, peers: Sequence[str], selection: Sequence[str] = (), *, again: bool = False, lists_all: bool = False
) -> int:
    """Runs the suites; prints the faults, classes that no case needs, and the table. Returns 1 if a case is a fault or
    was not reached.
    """
    reasons = json.loads((HERE / "classes.json").read_text(encoding="utf-8"))
    counts: dict[str, Counter[Outcome]] = {}
    for peer in peers:
        classes = Classes(reasons.get(peer, []))
        log = folder / f"{peer}.jsonl"
        known = settled(log.read_text(encoding="utf-8").splitlines(), classes) if again and log.exists() else []
        cases = run(peer, folder, selection, known)
        outcomes = {case: classes.outcome(case) for case in cases}
        counts[peer] = Counter(outcomes.values())
        for case, each in outcomes.items():
            if each is Outcome.FAULT or (lists_all and each is not Outcome.PASS):
                print(f"{each}: {peer}: {case.id}: {case.summary}")
        for pattern in () if selection else classes.unused():
            print(f"unused class: {peer}: {pattern}: no case that fails has this id and error")
        print(table(counts), flush=True)
    return 1 if any(count[Outcome.FAULT] + count[Outcome.NOT_REACHED] for count in counts.values()) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.peers.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="what scripts/peer_suites.sh made")
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(SUITES)}; all without")
    parser.add_argument("--only", nargs="+", default=[], help="files or cases of one suite, as pytest takes them")
    parser.add_argument("--again", action="store_true", help="run only what was a fault last time or was not reached")
    parser.add_argument("--all", action="store_true", help="list all cases that do not pass, not the faults alone")
    given = parser.parse_args()
    if unknown := set(given.peers) - set(SUITES):
        parser.error(f"unknown suites: {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    sys.exit(
        main(given.folder.resolve(), given.peers or list(SUITES), given.only, again=given.again, lists_all=given.all)
    )
