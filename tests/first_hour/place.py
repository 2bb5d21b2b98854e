"""A root of its own, as a container has it: Python, the C library and ``sh``, a user with an empty home, no compiler,
no Redis, no git, and unless it is asked for no network but its own loopback.

Made of Linux's namespaces by ``unshare``: everything that is mounted and started goes with the process that made it.
"""

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

USER, NUMBER = "reader", 1000
HOME = Path("/home") / USER
VENV = HOME / "quire" / ".venv"  # where the clone's own script makes it
PYTHON = Path(os.path.realpath(sys.executable))
# Where libraries are on one Linux or another.
LIBRARIES = ("usr/lib", "usr/lib32", "usr/lib64", "lib", "lib32", "lib64")
DEVICES = ("null", "zero", "full", "random", "urandom")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter(command: Sequence[str], *, network: bool) -> list[str]:
    """``command`` in namespaces of its own, as their root. It is killed with its starter."""
    namespaces = ["--mount", "--pid", "--ipc", "--fork", "--kill-child", *([] if network else ["--net"])]
    return ["unshare", *namespaces, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *command]


@cache
def is_possible() -> bool:
    """Whether this machine lets its user have namespaces: containers often do not."""
    if shutil.which("unshare") is None:
        return False
    probe = enter(["sh", "-c", "mount -t tmpfs probe /mnt && mount -t proc probe /mnt"], network=False)
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


class Place:
    """The root at ``root``, an empty folder; made in the namespaces that ``enter`` opened. ``visible`` are folders of
    this machine that are there too, at their own paths.
    """

    def __init__(self, root: Path, *, visible: Sequence[Path] = (), network: bool = False) -> None:
        self.root = root
        self.network = network
        self.environment: dict[str, str] = {
            "HOME": str(HOME),
            "USER": USER,
            "LANG": "C.UTF-8",
            "PATH": f"{VENV / 'bin'}:/usr/bin",
        }
        users = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
        # False within a namespace that knows its root alone: there the user gets a further namespace.
        self._has_users = any(int(first) <= NUMBER < int(first) + int(count) for first, _, count in users)
        for folder in (HOME, Path("/tmp"), Path("/etc")):
            self.at(folder).mkdir(parents=True)
        for path in (root, self.at(Path("/tmp"))):
            path.chmod(0o1777 if path.name == "tmp" else 0o755)
        self.give(HOME)
        self._mount_system()
        for folder in (Path(sys.base_prefix), *visible):
            self.show(folder)
        self._add_programs()
        self._write_settings(network=network)
        if not network:
            _raise_loopback()

    def at(self, path: Path) -> Path:
        """Where a path of this root is in that of the machine."""
        return self.root / path.relative_to("/")

    def give(self, path: Path) -> None:
        """Makes the user the owner of all at a path of this root; in a further namespace everything is the user's."""
        if self._has_users:
            for each in (self.at(path), *self.at(path).rglob("*")):
                os.chown(each, NUMBER, NUMBER, follow_symlinks=False)

    def show(self, path: Path, at: Path | None = None) -> None:
        """Makes a file or folder of the machine visible here, at its own path or another."""
        target = self.at(at or path)
        if target.exists():  # within what is visible already
            return
        if path.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _mount("--rbind", str(path), str(target))

    def start(self, line: str, *, cwd: Path = HOME, **options: object) -> subprocess.Popen[str]:
        """Starts a line of shell as the user, in a session of its own, as in a terminal of its own."""
        if self._has_users:
            user = ["setpriv", "--regid", str(NUMBER), "--clear-groups", "unshare", "--setuid", str(NUMBER)]
        else:
            user = ["unshare", "--user", f"--map-user={NUMBER}", f"--map-group={NUMBER}"]
        command = [*user, f"--root={self.root}", f"--wd={cwd}", "/usr/bin/sh", "-c", line]
        return subprocess.Popen(command, env=self.environment, start_new_session=True, text=True, **options)  # type: ignore[call-overload]

    def run(self, line: str, *, cwd: Path = HOME, stdin: str = "", timeout: float = 300) -> tuple[int, str]:
        """Status and output of a line of shell."""
        options: Mapping[str, object] = {
            "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT
        }  # fmt: skip
        with self.start(line, cwd=cwd, **options) as process:
            try:
                output, _ = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return process.returncode, output

    def programs(self) -> list[str]:
        """What runs here, by name."""
        found = []
        for status in self.at(Path("/proc")).glob("[0-9]*/status"):
            try:
                facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            except FileNotFoundError:  # it has ended
                continue
            if status.parent.name != "1" and not facts["State"].startswith("Z"):
                found.append(facts["Name"])
        return found

    def _mount_system(self) -> None:
        for name in LIBRARIES:
            there = Path("/") / name
            if there.is_symlink():
                self.at(there).symlink_to(os.readlink(there))
            elif there.is_dir():
                self.show(there)
        for name in DEVICES:
            self.show(Path("/dev") / name)
        for kind, path in (("proc", "/proc"), ("tmpfs", "/dev/shm")):
            self.at(Path(path)).mkdir(parents=True)
            _mount("-t", kind, kind, str(self.at(Path(path))))
        self.show(Path("/sys"))

    def _add_programs(self) -> None:
        """``sh``, which is all that is in the PATH, and the interpreter of this environment."""
        programs = self.at(Path("/usr/bin"))
        programs.mkdir(parents=True, exist_ok=True)
        self.show(Path(os.path.realpath("/bin/sh")), Path("/usr/bin/sh"))
        (self.root / "bin").symlink_to("usr/bin")
        self.show(PYTHON)

    def _write_settings(self, *, network: bool) -> None:
        etc = self.at(Path("/etc"))
        (etc / "passwd").write_text(f"root:x:0:0::/:/bin/sh\n{USER}:x:{NUMBER}:{NUMBER}::{HOME}:/bin/sh\n")
        (etc / "group").write_text(f"root:x:0:\n{USER}:x:{NUMBER}:\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "nsswitch.conf").write_text("hosts: files dns\n")
        if network:
            for name in ("hosts", "resolv.conf"):
                (etc / name).write_bytes((Path("/etc") / name).read_bytes())
            for folder in ("ssl", "pki"):
                if (Path("/etc") / folder).is_dir():
                    self.show(Path("/etc") / folder)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _raise_loopback() -> None:
    """Turns on ``lo``, which is off in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
