"""The command ``quire doctor``: runs the checks and prints what they found."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from quire_proto.cli import FlagParser
from quire_proto.terminal import GREEN, RED, YELLOW, colored, waiting

from quire_cli.doctor.checks import CHECKS, Finding

DESCRIPTION = """Says what this machine has, and what is missing for quire serve.

The status is 1 if nothing could be served here."""
MARKS = {"ok": "ok", "note": "note", "missing": "MISSING"}
COLORS = {"ok": GREEN, "note": YELLOW, "missing": RED}


def doctor(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 1 if something is missing without which nothing can be served."""
    flags = doctor_parser().parse_args(list(arguments))
    findings: list[Finding] = []
    for check in CHECKS:
        with waiting("looking at this machine"):
            findings.append(check())
        if not flags.json:
            found = findings[-1]
            mark = colored(f"{MARKS[found.status]:7}", COLORS[found.status], sys.stdout)
            sys.stdout.write(f"{mark} | {found.name:10} | {found.text}\n")
            sys.stdout.flush()
    can_serve = all(found.status != "missing" for found in findings)
    if flags.json:
        report = {"can_serve": can_serve, "checks": [asdict(found) for found in findings]}
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    raise SystemExit(not can_serve)


def doctor_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire doctor", DESCRIPTION, {})
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    return parser
