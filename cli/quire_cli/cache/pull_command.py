"""The command ``quire pull``: downloads a model without serving it."""

import sys
from collections.abc import Sequence

from quire_engine.errors import ModelError
from quire_proto.cli import FlagParser
from quire_proto.terminal import INTERRUPTED, fail

from quire_cli.model.find import find_model
from quire_cli.model.name import ModelNotFoundError

DESCRIPTION = """Downloads a model, if it is one that quire serve can serve: its config.json is read before its weights.

MODEL is what quire serve takes. Files that are here already are not downloaded again. Whether the model fits into
memory is checked by quire serve."""
EXAMPLES = """examples:
  quire pull Qwen/Qwen3-0.6B
  quire pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M"""


def pull(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 1 and one sentence if the model cannot be had, or cannot be served."""
    flags = pull_parser().parse_args(list(arguments))
    try:
        found = find_model(flags.model)
    except (ModelNotFoundError, ModelError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the next quire pull continues", status=INTERRUPTED)
    sys.stdout.write(f"{flags.model} is in {found.path}; quire serve {flags.model} serves it\n")


def pull_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire pull", DESCRIPTION, {})
    parser.epilog = EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="what is downloaded")
    return parser
