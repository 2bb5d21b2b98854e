"""The command ``quire rm``: deletes a downloaded model."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from quire_proto.cli import FlagParser
from quire_proto.terminal import INTERRUPTED, did_you_mean, fail

from quire_cli.cache.cached_models import cached_models, find_cached
from quire_cli.machine.running import running_servers
from quire_cli.machine.table import size

DESCRIPTION = """Deletes a model that was downloaded, after a question.

MODEL is a name that quire list shows; ORG/NAME@REVISION is one revision of it."""
SHARED = "This is the Hugging Face Hub's cache, which other programs on this machine use too."


def rm(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 1 if the model is not here, is being served, or is not deleted."""
    flags = rm_parser().parse_args(list(arguments))
    model = find_cached(flags.model)
    if model is None:
        near = get_close_matches(flags.model, [each.name for each in cached_models()], 1)
        fail(f"no downloaded model is {flags.model}{did_you_mean(near[0] if near else '')}", "quire list shows all")
    if server := next(filter(model.is_served_by, running_servers()), None):
        fail(f"{model.name} is served at {server.url}", f"quire stop {server.pid} ends that server")
    many = f" ({model.revisions} revisions)" if model.revisions > 1 else ""
    sys.stderr.write(f"{model.name}{many}: {size(model.size)} in {model.path}\n")
    sys.stderr.write(f"{SHARED}\n" if model.kind == "hub" else "")
    if not flags.yes and not _agrees():
        fail("nothing was deleted")
    try:
        model.delete()
    except OSError as error:
        fail(f"{model.path} cannot be deleted: {error.strerror or error}")
    sys.stdout.write(f"deleted {model.name}, {size(model.size)}\n")


def rm_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire rm", DESCRIPTION, {})
    parser.add_argument("model", metavar="MODEL", help="what is deleted")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    return parser


def _agrees() -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        fail("nobody can be asked here", "--yes deletes without a question")
    try:
        sys.stderr.write("Delete it? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        fail("nothing was deleted", status=INTERRUPTED)
