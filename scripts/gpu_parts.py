"""Packs folders into parts of a bounded size, and unpacks parts where they were carried to. Needs Python alone.

    python -m scripts.gpu_parts unpack --to FOLDER FILE...    unpacks parts; says which are missing still

A part is a tar of units, each a compressed tar that can be unpacked by itself, and of ``kit.json``, which names the
units of all parts. A file that is larger than a part is cut into slices, and joined when all of them are there.
"""

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PART_BYTES = 36 << 20
MANIFEST = "kit.json"
_HEADER_BYTES = 4 * tarfile.BLOCKSIZE  # at most, for each member of a tar and its end
_CHUNK = 1 << 20


class KitError(Exception):
    """A part cannot be made or unpacked. The text is one sentence."""


class Unit(NamedTuple):
    """What is unpacked at once: ``paths`` of a folder, each with the files below it, to lie below ``prefix``."""

    name: str
    folder: Path
    paths: Sequence[Path]
    prefix: str = "site"


@dataclass(frozen=True, slots=True)
class Packed:
    """A unit as a file, and its sum."""

    name: str
    file: Path
    sha256: str


def pack(units: Iterable[Unit], out: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Packs the units in their order into ``part-1.tar``, ``part-2.tar`` … of at most ``PART_BYTES``: a part is filled
    before the next one begins. The manifest has the ``facts``. Raises ``KitError`` for a unit that fits into no part.
    """
    with tempfile.TemporaryDirectory(dir=out) as name:
        packed = [_compress(unit, Path(name)) for unit in units]
        parts: list[list[Packed]] = []
        for each in packed:
            if _size([each]) > PART_BYTES:
                raise KitError(f"{each.name} takes {each.file.stat().st_size >> 20} MiB: more than a part may have")
            if not parts or _size([*parts[-1], each]) > PART_BYTES:
                parts.append([])
            parts[-1].append(each)
        names = [f"part-{number}.tar" for number in range(1, len(parts) + 1)]
        units_of = {name: {each.name: each.sha256 for each in part} for name, part in zip(names, parts, strict=True)}
        manifest = json.dumps({**facts, "parts": units_of}, indent=1)
        for old in out.glob("part-*.tar"):
            old.unlink()
        return [_write_part(out / name, part, manifest) for name, part in zip(names, parts, strict=True)]


def unpack(part: Path, to: Path) -> None:
    """Unpacks a part into a folder, but for units that are there. Raises ``KitError`` for a file that is no part, is
    damaged, or is of another kit than the parts before.
    """
    to.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(part) as tar:
            text = _read(tar, MANIFEST)
            manifest = json.loads(text)
            _check_manifest(text, to / MANIFEST)
            for member in tar.getmembers():
                if member.name != MANIFEST:
                    _unpack_unit(member.name, _read(tar, member.name), manifest, to)
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError) as error:
        raise KitError(f"{part} cannot be unpacked: {error}") from None


def missing(to: Path) -> list[str]:
    """The names of the parts that were not unpacked into a folder; ``part-1.tar`` if none was."""
    if not (to / MANIFEST).is_file():
        return ["part-1.tar"]
    units_of: Mapping[str, Mapping[str, str]] = json.loads((to / MANIFEST).read_text())["parts"]
    return [part for part, units in units_of.items() if not all(_mark(to, unit).is_file() for unit in units)]


def cut(file: Path, out: Path) -> list[Path]:
    """Cuts a file into numbered slices of at most ``PART_BYTES``, and writes their sums to ``NAME.json``."""
    for old in out.glob(f"{file.name}.slice-*"):
        old.unlink()
    slices: list[Path] = []
    with file.open("rb") as source:
        while piece := source.read(PART_BYTES):
            slices.append(out / f"{file.name}.slice-{len(slices) + 1:03}")
            slices[-1].write_bytes(piece)
    sums = {"sha256": digest(file), "slices": {each.name: digest(each) for each in slices}}
    (out / f"{file.name}.json").write_text(json.dumps(sums, indent=1))
    return slices


def join(sums: Path, folder: Path) -> Path:
    """Joins the slices in ``folder`` that the file ``sums`` names, and returns the whole; slices go away meanwhile, as
    both may not fit on the disk. Raises ``KitError`` if one is missing or damaged.
    """
    facts = json.loads(sums.read_text())
    whole = folder / sums.name.removesuffix(".json")
    if whole.is_file() and digest(whole) == facts["sha256"]:
        return whole
    absent = [name for name in facts["slices"] if not (folder / name).is_file()]
    if absent:
        raise KitError(f"{len(absent)} of {len(facts['slices'])} slices of {whole.name} are absent, as {absent[0]}")
    for name, sha256 in facts["slices"].items():
        if digest(folder / name) != sha256:
            raise KitError(f"{name} is damaged: carry it again")
    with whole.open("wb") as target:
        for name in facts["slices"]:
            with (folder / name).open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK)
            (folder / name).unlink()
    if digest(whole) != facts["sha256"]:
        raise KitError(f"{whole.name} is damaged, though none of its slices is")
    return whole


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _compress(unit: Unit, folder: Path) -> Packed:
    file = folder / f"{unit.name}.tar.xz"
    with tarfile.open(file, "w:xz") as tar:
        for path in sorted(unit.paths):
            tar.add(path, Path(unit.prefix) / path.relative_to(unit.folder), filter=_anonymous)
    return Packed(unit.name, file, digest(file))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without bytecode and owners: the same files give the same part."""
    if "__pycache__" in Path(member.name).parts:
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _size(units: Sequence[Packed]) -> int:
    """Of a part with these units, and a manifest of some 10 kB."""
    padded = sum(each.file.stat().st_size + _HEADER_BYTES for each in units)
    return padded + 64 * 1024 + tarfile.RECORDSIZE


def _write_part(path: Path, units: Sequence[Packed], manifest: str) -> Path:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(manifest.encode())
        tar.addfile(info, io.BytesIO(manifest.encode()))
        for each in units:
            tar.add(each.file, each.name, filter=_anonymous)
    assert path.stat().st_size <= PART_BYTES, "the estimate of a part's size is no upper bound"
    return path


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KitError(f"the part has no file {name}")
    return file.read()


def _check_manifest(text: bytes, path: Path) -> None:
    if path.is_file() and path.read_bytes() != text:
        raise KitError(f"{path.parent} has parts of another kit: remove it, and begin again")
    path.write_bytes(text)


def _unpack_unit(name: str, content: bytes, manifest: Mapping[str, Any], to: Path) -> None:
    known: dict[str, str] = {unit: sha256 for units in manifest["parts"].values() for unit, sha256 in units.items()}
    mark, sha256 = _mark(to, name), hashlib.sha256(content).hexdigest()
    if sha256 != known.get(name):
        raise KitError(f"the unit {name} is damaged: carry its part again")
    if mark.is_file() and mark.read_text() == sha256:
        return
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
        tar.extractall(to, filter="data")
    mark.parent.mkdir(exist_ok=True)
    mark.write_text(sha256)


def _mark(to: Path, unit: str) -> Path:
    return to / "unpacked" / unit


def install_peer(to: Path) -> Path:
    """Joins the slices of a peer's wheels, installs them in a folder of their own, and returns a program that runs
    Python with it. Raises ``KitError`` where slices are absent or the wheels cannot be installed.
    """
    peer = to / "peer"
    python, sums = peer / "python", next(iter(peer.glob("*.tar.json")), None)
    if python.is_file():
        return python
    if sums is None:
        raise KitError("its slices were not carried to this machine")
    whole = join(sums, peer)
    with tarfile.open(whole) as tar:
        tar.extractall(peer / "wheels", filter="data")
    whole.unlink()
    wheels = sorted((peer / "wheels").glob("*.whl"))
    flags = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", peer / "site")
    command: list[str | Path] = [sys.executable, "-m", "pip", "install", *flags, *wheels]
    installed = subprocess.run(command, check=False, capture_output=True, text=True)
    if installed.returncode:
        raise KitError(f"its wheels cannot be installed: {(installed.stderr.strip().splitlines() or ['?'])[-1]}")
    shutil.rmtree(peer / "wheels")
    # Without what is ours: the kernels and the packages of the kit are of other versions than the peer's.
    unset = "env -u FLASHINFER_DISABLE_JIT -u FLASHINFER_WORKSPACE_BASE"
    python.write_text(f"#!/bin/sh\nexec {unset} PYTHONPATH='{peer / 'site'}' '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    return python


def main() -> None:
    """Runs one of the commands. Exits with one sentence where it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("unpack", "missing", "install-peer"))
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="parts, or slices and sums of a peer")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_intermixed_args()
    try:
        if options.command == "install-peer":
            print(install_peer(options.to))
        for file in options.files:
            _take(file, options.to)
        if options.command != "install-peer":
            absent = missing(options.to)
            state = f"lacks {', '.join(absent)}" if absent else "is complete"
            print(f"the kit in {options.to} {state}")
    except (KitError, OSError) as error:
        sys.exit(f"error: {error}")


def _take(file: Path, to: Path) -> None:
    if file.name.startswith("part-"):
        unpack(file, to)
    elif not (to / "peer" / "python").is_file():
        (to / "peer").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / "peer" / file.name)
    print(f"took {file}")


if __name__ == "__main__":
    main()
