"""The command ``quire list``: lists the downloaded models."""

import json
import sys
from collections.abc import Sequence
from time import time

from quire_proto.cli import FlagParser
from quire_proto.terminal import DIM, colored

from quire_cli.cache.cached_models import cached_models, kept_by_quire
from quire_cli.machine.table import duration, size, table

DESCRIPTION = """Lists the models that were downloaded to this machine: those in the Hub's cache, also by other
programs, and copies from buckets and registries. Below them is what Quire keeps for itself."""
HEAD = ("NAME", "FROM", "SIZE", "LAST USED")


def list_models(arguments: Sequence[str]) -> None:
    """Runs the subcommand."""
    flags = list_parser().parse_args(list(arguments))
    models, kept = cached_models(), kept_by_quire()
    if flags.json:
        listed = [
            {
                "name": each.name,
                "from": each.kind,
                "bytes": each.size,
                "last_used": each.last_used,
                "path": str(each.path),
                "revisions": each.revisions,
            }
            for each in models
        ]
        own = [{"path": str(path), "bytes": count} for path, count in kept.items()]
        sys.stdout.write(f"{json.dumps({'models': listed, 'kept': own}, indent=2)}\n")
        return
    if models:
        rows = [(each.name, each.kind, size(each.size), f"{duration(time() - each.last_used)} ago") for each in models]
        sys.stdout.write(table(HEAD, rows))
    else:
        sys.stderr.write("no model was downloaded; quire pull MODEL does\n")
    if kept:
        own_text = " and ".join(f"{size(count)} in {path}" for path, count in kept.items())
        sys.stderr.write(f"{colored(f'Quire itself keeps {own_text}.', DIM, sys.stderr)}\n")


def list_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire list", DESCRIPTION, {})
    parser.add_argument("--json", action="store_true", help="print the list as JSON; last_used is Unix time")
    return parser
