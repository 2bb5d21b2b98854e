"""The command ``quire completion``: prints a script with which a shell completes what is typed behind ``quire``."""

import sys
from collections.abc import Sequence

from quire_proto.cli import FlagParser

from quire_cli.completion.shells import SHELLS

DESCRIPTION = """Prints a script with which a shell completes commands, flags and their values.

  bash: source <(quire completion bash), in ~/.bashrc
  zsh:  source <(quire completion zsh), in ~/.zshrc behind compinit
  fish: quire completion fish > ~/.config/fish/completions/quire.fish"""


def completion(arguments: Sequence[str]) -> None:
    """Runs the subcommand."""
    flags = completion_parser().parse_args(list(arguments))
    sys.stdout.write(SHELLS[flags.shell]())


def completion_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire completion", DESCRIPTION, {})
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return parser
