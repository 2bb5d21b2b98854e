"""What the wheels of ``dist/`` need, and how much of a disk it takes: ``python -m tests.first_hour.needs dist``.

Measured in the environment that runs this, whose packages are those of ``constraints.txt``.
"""

import importlib.metadata
import re
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Packages, and files of torch, that its build for processors does without.
CUDA_PACKAGES = re.compile("nvidia-|cuda-|triton")
CUDA_FILES = re.compile(r"torch/lib/lib\w*(cuda|nvrtc|nvshmem)\w*\.so")
SHOWN = 8


def requirements_of(wheels: Iterable[Path]) -> list[str]:
    """The names of all packages that the wheels need, those that these need included, but not the wheels' own."""
    own: set[str] = set()
    lines: list[str] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            (name,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
            about = message_from_bytes(file.read(name))
        own.add(canonicalize_name(about["Name"]))
        lines += about.get_all("Requires-Dist", [])
    found: dict[str, set[str]] = {}  # with the extras that are wanted of each
    pending = [(Requirement(line), {""}) for line in lines]
    while pending:
        need, extras = pending.pop()
        name, wanted = canonicalize_name(need.name), {"", *need.extras}
        applies = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        if applies and name not in own and not wanted <= found.get(name, set()):
            found[name] = found.get(name, set()) | wanted
            pending += [(Requirement(line), wanted) for line in importlib.metadata.requires(name) or []]
    return sorted(found)


def packages_of(name: str) -> Path:
    """The folder that an installed package is in."""
    return Path(str(importlib.metadata.distribution(name).locate_file(""))).resolve()


def files_of(name: str) -> dict[str, int]:
    """Bytes of each file of an installed package, with what Python compiled of it."""
    distribution = importlib.metadata.distribution(name)
    sizes = {}
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.is_file():
            sizes[str(file)] = path.stat().st_size
    return sizes


def main(folder: Path) -> None:
    """Prints megabytes (10^6 bytes) of the wheels, of torch, and of everything else."""
    wheels = sorted(folder.glob("*.whl"))
    sizes = {name: files_of(name) for name in requirements_of(wheels)}
    cuda = {name: files for name, files in sizes.items() if CUDA_PACKAGES.match(name)}
    torch = sizes["torch"]
    for_cuda = {name: size for name, size in torch.items() if CUDA_FILES.fullmatch(name)}
    without = {name: sum(files.values()) for name, files in sizes.items() if name not in {*cuda, "torch"}}
    own = sum(entry.file_size for wheel in wheels for entry in zipfile.ZipFile(wheel).infolist())
    processors = sum(torch.values()) - sum(for_cuda.values())
    compiled = sum(size for name in ("torch", *without) for file, size in sizes[name].items() if file.endswith(".pyc"))
    rest = sorted(without, key=without.__getitem__, reverse=True)
    for text, size in (
        (f"Quire's {len(wheels)} wheels", own),
        ("torch, without its files for CUDA", processors),
        *((name, without[name]) for name in rest[:SHOWN]),
        (f"{len(rest[SHOWN:])} other packages", sum(without[name] for name in rest[SHOWN:])),
        ("together, on a CPU", own + processors + sum(without.values())),
        ("  of which compiled by pip (.pyc)", compiled),
        ("more with CUDA", sum(for_cuda.values()) + sum(sum(files.values()) for files in cuda.values())),
    ):
        print(f"{size / 1e6:8.1f} MB  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
