"""A helm command for machines without one: it takes the documented command line, refuses everything else, and leaves
the work to Helm's library. It runs in the environment that has it. It has no ``template``, since the library has none.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import yaml
from helm_sdkpy import HelmError

sys.path.insert(0, str(Path(__file__).parent))
import helm_worker


def duration(text: str) -> int:
    """Seconds."""
    if not text.endswith("s"):
        raise argparse.ArgumentTypeError(text)
    return int(text[:-1])


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="helm", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("install", "upgrade", "uninstall", "test"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("release")
        command.add_argument("--namespace", default="default")
        command.add_argument("--kubeconfig", type=Path, required=True)
        command.add_argument("--timeout", type=duration, default=300)
        if name in ("install", "upgrade"):
            command.add_argument("chart")
            command.add_argument("--values", type=Path, required=True)
            command.add_argument("--output", choices=["table", "json", "yaml"], default="table")
    return parser.parse_args()


def main() -> None:
    """Does what the command line says."""
    given = options()
    call = {"namespace": given.namespace, "kubeconfig": given.kubeconfig.read_text(), "release": given.release}
    if "chart" in given:
        call |= {"chart": given.chart, "values": yaml.safe_load(given.values.read_text())}
    try:
        result = asyncio.run(helm_worker.OPERATIONS[given.command](call))
    except HelmError as error:
        raise SystemExit(f"Error: {error}") from None
    if getattr(given, "output", "") == "json":
        print(json.dumps(result))
    else:
        print(f'release "{given.release}": {given.command} done')


if __name__ == "__main__":
    main()
