"""The first commands of the README, of the page of one GPU and of the recipes, run as they stand in an empty root:
``make first-hour``. ``NOT_RUN`` of commands.py names the others that a reader starts with, each with a reason.

A fresh user with an empty home and a fresh virtual environment, no compiler, no Redis and no git. What the pages call
a clone is there as the files of the last commit. The Hub is a mirror with its API, on the loopback, which has the demo
model under every name that the pages serve. Installed are the wheels of ``make dist``, by the line of
docs/contributing.md, or with ``--sources`` the folders, by the README's own line.

By default pip fetches nothing: what the wheels say that they need comes from the environment that runs this, each
package as a link, and nothing else of it. ``--fetch`` lets pip fetch it from its index, which takes minutes and, where
pip finds torch's build with CUDA alone, 5 GB.
"""

import argparse
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.first_hour.commands import ONE_GPU, README, RECIPES, ROOT, commands_of, shown_by, wheels_commands
from tests.first_hour.needs import packages_of, requirements_of
from tests.first_hour.place import HOME, PYTHON, VENV, Place, enter, is_possible
from tests.support.hub_server import hub_server

CLONE = HOME / "quire"
NEEDED = Path("/opt/needed")
READY = "Ctrl-C stops it"
QUESTION = "What is 7 plus 5?"
MISSING = ("cc", "gcc", "c++", "g++", "clang", "make", "redis-server", "git", "curl")
MODEL = ROOT / "demo" / "model"


class FirstHour:
    """The terminals of the reader: one for what serves, one for everything else. ``compiled`` says that the engine has
    its kernels, without a compiler.
    """

    def __init__(self, place: Place, *, compiled: bool) -> None:
        self._place = place
        self._compiled = compiled
        self._server: subprocess.Popen[str] | None = None
        self._log = place.at(HOME / "server.log")

    def run(self, line: str) -> None:
        """Runs one line of the README. Raises SystemExit if it fails, or is one that cannot be tried here."""
        words = shlex.split(line)
        if words[:2] == ["quire", "serve"]:
            self.stop()
            self._serve(line)
        elif words[:2] == ["quire", "chat"]:
            asks = len(words) == 2  # a conversation: with what its user types
            answer = self._finish(line, stdin=f"{QUESTION}\n" if asks else "")
            if "12" not in answer and (asks or QUESTION in words):
                sys.exit(f"that is not what 7 plus 5 is: {answer}")
        elif words == ["quire", "demo"]:
            shown = self._finish(line)
            if "the same text" not in shown:
                sys.exit(f"the answer did not survive: {shown}")
        elif words[0] == "curl":
            answer = json.loads(self._finish(line, quiet=True))
            if not answer["choices"][0]["message"]["content"]:
                sys.exit(f"that is no answer: {answer}")
        elif words[0] in ("quire", ".", "scripts/install.sh") or words[:2] == ["pip", "install"]:
            self._finish(line)
        else:
            sys.exit(f"a page begins with what tests/first_hour does not know to run: {line}")

    def compare(self, lines: Iterable[str]) -> None:
        """Raises SystemExit if what serves has not printed one of the lines, in which … is anything."""
        log = self._log.read_text()
        for line in lines:
            if not re.search(".*".join(map(re.escape, line.split("…"))), log):
                sys.exit(f"a page says that it prints {line!r}:\n{log}")

    def stop(self) -> None:
        """Ctrl-C in the terminal of what serves; all of it has to end."""
        if self._server is None:
            return
        os.killpg(self._server.pid, signal.SIGINT)
        status = self._server.wait(60)
        _say(f"^C  (status {status})")
        left = self._place.programs()
        if status != 130 or left:
            sys.exit(f"it ended with status {status}, and left {left}:\n{self._log.read_text()}")
        self._server = None

    def _serve(self, line: str) -> None:
        _say(f"$ {line}")
        with self._log.open("w") as log:
            began = time.monotonic()
            self._server = self._place.start(f"exec {line}", cwd=CLONE, stdout=log, stderr=subprocess.STDOUT)
        while READY not in self._log.read_text():
            if self._server.poll() is not None or time.monotonic() > began + 300:
                sys.exit(f"it does not serve:\n{self._log.read_text()}")
            time.sleep(0.1)
        if self._compiled and "kernels" in self._log.read_text():
            sys.exit(f"the kernels of the wheel are not used:\n{self._log.read_text()}")
        _say(f"{self._log.read_text().rstrip()}\n  (after {time.monotonic() - began:.1f} s)")

    def _finish(self, line: str, stdin: str = "", *, quiet: bool = False) -> str:
        """Runs it to its end. ``quiet``: its progress, which is on standard error, is not wanted."""
        _say(f"$ {line}" + (f"  < {stdin!r}" if stdin else ""))
        began = time.monotonic()
        run = f"{line} 2>/dev/null" if quiet else line
        status, output = self._place.run(run, cwd=CLONE, stdin=stdin, timeout=1800)
        _say(f"{output.rstrip()}\n  (status {status}, {time.monotonic() - began:.1f} s)")
        if status != 0:
            sys.exit(f"it failed: {line}")
        return output


def main() -> None:
    """Exits with a sentence if a command fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="what make dist made; else it is made now")
    parser.add_argument("--fetch", action="store_true", help="pip fetches what the wheels need")
    parser.add_argument("--sources", action="store_true", help="the README's own line installs")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        run_all(given.inside, given.wheels, fetch=given.fetch, sources=given.sources)
        return
    if shutil.which("curl") is None:
        sys.exit("This machine has no curl.")
    if not is_possible():
        sys.exit("This machine does not let its user have namespaces (unshare of util-linux).")
    with tempfile.TemporaryDirectory(prefix="quire-first-hour-") as folder:
        wheels = given.wheels
        if wheels is None:
            wheels = Path(folder) / "dist"
            subprocess.run([sys.executable, ROOT / "scripts" / "dist.py", "--out", wheels], check=True)
        root = Path(folder) / "root"
        root.mkdir()
        again = [sys.executable, "-m", "tests.first_hour.run", *sys.argv[1:]]
        command = enter([*again, "--inside", str(root), "--wheels", str(wheels.resolve())], network=given.fetch)
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def run_all(root: Path, wheels: Path, *, fetch: bool, sources: bool) -> None:
    """What is done within the namespaces: the place, and then the commands."""
    needed = [] if fetch else requirements_of(wheels.glob("*.whl"))
    place = Place(root, visible=sorted({packages_of(each) for each in needed}), network=fetch)
    status, found = place.run("command -v " + " ".join(MISSING))
    if status == 0 or found:
        sys.exit(f"the root is not empty: it has {found}")
    lay_out_clone(place, wheels)
    make_environment(place, needed)
    install, *rest = commands_of(README)
    gpu, recipes = list(commands_of(ONE_GPU)), list(commands_of(RECIPES))
    torch, wheels_line = wheels_commands()
    names = [words[2] for words in map(shlex.split, [*rest, *gpu, *recipes]) if words[:2] == ["quire", "serve"]]
    with hub_server() as hub:
        for name in names:
            if not (ROOT / name).exists():
                hub.add(name, {file.name: file.read_bytes() for file in MODEL.iterdir() if file.is_file()})
        place.environment["HF_ENDPOINT"] = hub.url
        hour = FirstHour(place, compiled=not sources)
        for line in [install] if sources else [torch, wheels_line] if fetch else [wheels_line]:
            hour.run(line)
        clone = place.at(CLONE)
        if left := [*clone.glob("*/build"), *clone.glob("*/*.egg-info")]:
            sys.exit(f"the installation leaves {left}")
        for line in rest:
            hour.run(line)
        place.show(Path(str(shutil.which("curl"))), Path("/usr/bin/curl"))
        for line in gpu:
            hour.run(line)
        hour.compare(shown_by(ONE_GPU))
        for line in recipes:
            hour.run(line)
        hour.stop()
        if not hub.sent:
            sys.exit("no model came from the Hub's mirror")


def lay_out_clone(place: Place, wheels: Path) -> None:
    """The files of the last commit, and beside them what ``make dist`` made of them."""
    clone = place.at(CLONE)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(clone, filter="data")
    (clone / "dist").mkdir()
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, clone / "dist")
    place.give(CLONE)


def make_environment(place: Place, needed: Iterable[str]) -> None:
    """A virtual environment, as its user makes it, in which ``needed`` are installed already."""
    status, output = place.run(f"{PYTHON} -m venv {VENV}")
    if status != 0:
        sys.exit(f"no environment could be made:\n{output}")
    place.environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"}
    if place.network:
        place.environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        return
    # Sources are built by the setuptools that torch needs. The flag of this name turns something off, so 0 is off.
    place.environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    folder = place.at(NEEDED)
    folder.mkdir(parents=True)
    for name in needed:
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = folder / top
            if not link.is_symlink():  # a namespace of several packages
                link.symlink_to(packages_of(name) / top)
    (site,) = place.at(VENV).glob("lib/python*/site-packages")
    # In front, as the setuptools of a new environment may be older than what is needed.
    (site / "needed.pth").write_text(f"import sys; sys.path.insert(0, {str(NEEDED)!r})\n")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
