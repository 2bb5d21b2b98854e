"""The command ``quire``: finds the subcommand and passes the other arguments on."""

import sys

USAGE = """usage: quire COMMAND [FLAGS]

commands:
  serve MODEL   serve a model on this machine: a router and its engines, one log
  bench serve   measure an OpenAI-compatible server: latency, throughput and goodput at given request rates

quire COMMAND --help tells the flags of a command.
"""


def main() -> None:
    """Runs the subcommand that the arguments begin with. Exits with 2 if they name none."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        from quire_cli.serve.serve_command import serve

        serve(arguments[1:])
    elif arguments[:2] == ["bench", "serve"]:
        from quire_cli.bench.serve import bench_serve

        bench_serve(arguments[2:])
    elif arguments and arguments[-1] in ("--help", "-h"):
        sys.stdout.write(USAGE)
    else:
        sys.stderr.write(USAGE)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
