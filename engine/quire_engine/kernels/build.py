"""Compiles the kernels of this folder for this processor, once per user, and finds them again. It can also compile them
ahead of time for all processor levels, for a wheel or image that is built on one processor and runs on others.

The sources need no headers of torch or Python, so a bare compiler is enough and a build takes seconds. Any number of
engines may start at once: each compiles into its own folder and renames the result into place, which is atomic.
"""

import atexit
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from quire_proto.folders import trusted_folder, user_cache_folder

logger = logging.getLogger(__name__)
SWITCH = "QUIRE_ENGINE_CPU_KERNELS"
ON, OFF = ("on", "1", "true", ""), ("off", "0", "false")
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
AHEAD_FOLDER = Path(__file__).parent / "ahead"
"""The folder of a wheel or an image with kernels compiled for every level. A checkout does not have it."""
_COMPILERS = ("c++", "g++", "clang++")
# In some sums GCC avoids fused products where they are slower, on AMD's Zen, and so rounds a single row unlike the same
# row among others. The last flag makes it fuse all. Clang does not avoid them, and ignores the flag.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "--param=avoid-fma-max-bits=0")
_SECONDS_TO_COMPILE = 300
_SECONDS_TO_COMPILE_AHEAD = 3600  # processors that build images may be busy or emulated


class BuildError(Exception):
    """The kernels cannot be compiled here. The text says why, in one line."""


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """A kind of processor to compile kernels for. ``flags`` are for the compiler. ``required_features`` must be listed
    in ``/proc/cpuinfo``.
    """

    name: str
    flags: tuple[str, ...]
    required_features: frozenset[str]

    def runs_on(self, features: Set[str]) -> bool:
        """Whether a processor with ``features`` can run code of this level."""
        return self.required_features <= features


def _level(name: str, flags: str, required: str = "") -> CpuLevel:
    return CpuLevel(name, tuple(flags.split()), frozenset(required.split()))


_AVX2 = "abm avx2 bmi1 bmi2 f16c fma movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
_V4 = "-march=x86-64-v4"
X86: tuple[CpuLevel, ...] = (
    # With matrix registers (AMX) torch's products are faster, so the kernels leave them to torch.
    _level("amx", f"{_V4} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16", f"{_BF16} amx_tile amx_bf16"),
    _level("avx512-bf16", f"{_V4} -mavx512vnni -mavx512bf16", _BF16),
    _level("avx512-vnni", f"{_V4} -mavx512vnni", f"{_AVX512} avx512_vnni"),
    _level("avx512", _V4, _AVX512),
    _level("avx2", "-march=x86-64-v3", _AVX2),
    _level("x86-64", "-march=x86-64"),
)
OTHER: tuple[CpuLevel, ...] = (_level("generic", ""),)


def levels_of(machine: str) -> Sequence[CpuLevel]:
    """Returns the levels of an architecture named as in ``platform.machine``, best first. The last one runs on all its
    processors.
    """
    return X86 if machine.lower() in ("x86_64", "amd64") else OTHER


def read_switch() -> str:
    """Returns ``QUIRE_ENGINE_CPU_KERNELS`` in lower case. Any value outside ``ON`` and ``OFF`` counts as on."""
    return os.environ.get(SWITCH, "on").lower()


def shared_object() -> Path:
    """Returns the compiled kernels: from the wheel or image, from the cache, or compiled now. Raises ``BuildError`` if
    the compiler is missing or fails.

    The cache is ``$XDG_CACHE_HOME/quire`` or ``~/.cache/quire``. A build found there needs no compiler. If that folder
    is not writable or not trusted, the build goes to a new private folder that is removed when the process exits.
    """
    if ready := find_build():
        return ready
    cache = _cache_folder()
    folder = cache if cache and os.access(cache, os.W_OK) else _private_folder()
    return _compile(folder, f"kernels-{_fingerprint()}")


def find_build() -> Path | None:
    """Returns kernels that are compiled already, or None."""
    if ready := _compiled_ahead():
        return ready
    stem, cache = f"kernels-{_fingerprint()}", _cache_folder()
    for build in sorted(cache.glob(f"{stem}-*.so")) if cache else ():
        if build.stem == f"{stem}-{_digest(build)}":
            return build
    return None


def needs_build() -> bool:
    """Whether an engine that starts now would compile its kernels."""
    try:
        return read_switch() not in OFF and find_build() is None and bool(find_compiler())
    except BuildError:
        return False  # the engine runs without them


def compile_ahead(names: Sequence[str] = ()) -> None:
    """Compiles the kernels for the named levels of this architecture, or for all, into ``AHEAD_FOLDER``. Each level
    takes about ten seconds. Raises ``BuildError`` if a name is unknown, or if the compiler is missing or fails.
    """
    levels = {level.name: level for level in levels_of(platform.machine())}
    if unknown := [name for name in names if name not in levels]:
        raise BuildError(f"{unknown[0]} is not a processor level; there are {', '.join(levels)}")
    AHEAD_FOLDER.mkdir(exist_ok=True)
    for level in map(levels.__getitem__, names or levels):
        _run(
            [*find_compiler(), *_FLAGS, *level.flags, *map(str, SOURCES), "-o", str(_ahead_path(level.name))],
            _SECONDS_TO_COMPILE_AHEAD,
        )
        logger.info("compiled the CPU kernels for %s", level.name)


def best_level() -> CpuLevel:
    """Returns the best level that this processor can run."""
    features = _cpu_features()
    return next(level for level in levels_of(platform.machine()) if level.runs_on(features))


def _compiled_ahead() -> Path | None:
    """Returns the best build for this processor that was compiled ahead from the present sources, or None."""
    if not AHEAD_FOLDER.is_dir():
        return None
    features = _cpu_features()
    usable = (_ahead_path(level.name) for level in levels_of(platform.machine()) if level.runs_on(features))
    return next(filter(Path.exists, usable), None)


def _ahead_path(level: str) -> Path:
    return AHEAD_FOLDER / f"kernels-{hashlib.sha256(_source_text()).hexdigest()[:16]}-{level}.so"


def _cpu_features() -> frozenset[str]:
    """Returns all words of ``/proc/cpuinfo`` about this processor, including the names of its instruction sets."""
    return frozenset(_processor().split())


def _source_text() -> bytes:
    return b"\0".join(path.read_bytes() for path in (*SOURCES, *HEADERS))


def _digest(build: Path) -> str:
    """Returns the hash in a build's name. It detects a file truncated by a full disk, which would crash the process on
    loading.
    """
    return hashlib.sha256(build.read_bytes()).hexdigest()[:16]


def _cache_folder() -> Path | None:
    try:
        return trusted_folder(user_cache_folder())
    except (OSError, RuntimeError):  # a home that is read-only, missing, or writable by others
        return None


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fingerprint() -> str:
    """Returns a hash of everything that determines the build, because different machines may share a home folder."""
    machine = (*_flags(), *platform.libc_ver(), _processor())
    return hashlib.sha256(_source_text() + "\0".join(machine).encode()).hexdigest()[:16]


def _processor() -> str:
    """Identifies what ``native`` means here: the instruction sets that Linux lists, or else the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _flags() -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native")


def find_compiler() -> list[str]:
    """Returns the command of a C++ compiler: ``$CXX``, or one on the path. Raises ``BuildError`` if there is none."""
    named = os.environ.get("CXX", "").strip()
    if named:
        try:
            return shlex.split(named)
        except ValueError as error:
            raise BuildError(f"$CXX is not a command: {error}") from error
    for name in _COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler was found (looked for {', '.join(_COMPILERS)} and $CXX)")


def _compile(folder: Path, stem: str) -> Path:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as temporary:
        output = Path(temporary) / "kernels.so"
        _run([*find_compiler(), *_flags(), *map(str, SOURCES), "-o", str(output)])
        target = folder / f"{stem}-{_digest(output)}.so"
        output.replace(target)
    logger.info("compiled the CPU kernels in %.1f s into %s", time.monotonic() - started, target)
    return target


def _run(command: list[str], seconds: float = _SECONDS_TO_COMPILE) -> None:
    try:
        result = subprocess.run(  # noqa: S603 -- our own arguments, and no shell
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if result.returncode:
        raise BuildError(f"{command[0]} failed with exit code {result.returncode}: {_first_error_line(result.stderr)}")


def _first_error_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
