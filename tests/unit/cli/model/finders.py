"""Processes that find a model each, as a user's does: forked off one that has imported what that imports, which takes
most of the time otherwise. What reads the environment when it is imported is imported in each.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

_IMPORTED = ("quire_cli.model.find", "quire_cli.model.hub", "quire_cli.model.copies", "oras.provider", "obstore.store")
_READ_THE_ENVIRONMENT = ("huggingface_hub", "quire_cli")


class Finders:
    """Finds one after the other."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(
        self, name: str, need: Mapping[str, object], environment: Mapping[str, str], folder: Path
    ) -> tuple[int, str, str]:
        """The status, the output and the errors of a process in ``folder`` that finds ``name``."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        files = out, errors = folder / "finder.out", folder / "finder.err"
        request = [name, need, dict(environment), str(folder), *map(str, files)]
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, out.read_text(), errors.read_text()


@contextmanager
def finders() -> Iterator[Finders]:
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Finders(server)
        assert server.stdin is not None
        server.stdin.close()


def find(name: str, need: Mapping[str, object]) -> None:
    """Prints what is found, or ends with the refusal."""
    from quire_cli.model.check import MemoryNeed
    from quire_cli.model.find import find_model
    from quire_cli.model.name import ModelNotFoundError

    try:
        found = find_model(name, MemoryNeed(**need) if need else None)  # type: ignore[arg-type]
    except ModelNotFoundError as error:
        sys.exit(f"refused: {error}")
    assert "torch" not in sys.modules
    assert "transformers" not in sys.modules
    print(json.dumps([str(found.path), found.name, found.revision]))


def _forked(
    name: str, need: dict[str, object], environment: dict[str, str], folder: str, out: str, errors: str
) -> None:
    os.chdir(folder)
    sys.path[0] = folder
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in ((0, os.devnull), (1, out), (2, errors)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    for module in [module for module in sys.modules if module.partition(".")[0] in _READ_THE_ENVIRONMENT]:
        del sys.modules[module]
    find(name, need)


def _serve() -> None:
    for module in _IMPORTED:
        with suppress(ImportError):
            import_module(module)
    gc.freeze()
    for line in sys.stdin:
        if not (child := os.fork()):
            _forked(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        find(sys.argv[1], json.loads(sys.argv[2]))
    else:
        _serve()
