"""``make dist``: what people install, from the last commit, into one folder.

* a wheel of each distribution; the engine's has its CPU kernels inside, compiled for every level of processor, and the
  oldest manylinux tag that these allow;
* the chart as ``helm package`` makes it, and the same as an OCI archive, which registries and ``oras`` take;
* a bill of materials (CycloneDX) of the wheels and of all that they need, in the versions that were tested;
* ``SHA256SUMS`` of everything in the folder.

The same commit gives the same bytes, apart from the compiler's version.
"""

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependable
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("proto", "engine", "router", "cli")
# Compiled code needs this beside the C library; torch brings it along, and it is loaded before the kernels.
FROM_TORCH = "libgomp.so.1"
CONFIG_TYPE = "application/vnd.cncf.helm.config.v1+json"
CHART_TYPE = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def main() -> None:
    """Builds everything and prints what there is. Exits with one sentence where it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where it goes")
    parser.add_argument(
        "--only", default=",".join(DISTRIBUTIONS), metavar="NAMES", help="the distributions whose wheels are built"
    )
    parser.add_argument("--levels", default="", metavar="NAMES", help="the levels of processors to compile for; all")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("quire*.whl"), *out.glob("quire-*.tgz"), *out.glob("quire-chart-*"), *out.glob("*.cdx.json")):
        old.unlink()
    if git("status", "--porcelain", "--untracked-files=no"):
        say("what is changed and not committed is left out")
    when = int(git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="quire-dist-") as name:
        source = Path(name)
        export_commit(source)
        if "engine" in arguments.only.split(","):
            compile_kernels(source / "engine", list(filter(None, arguments.levels.split(","))))
        wheels = [build_wheel(source / folder, out, when) for folder in arguments.only.split(",")]
        chart = package_chart(source / "charts" / "quire", out, when)
        write_oci_archive(chart, source / "charts" / "quire" / "Chart.yaml", out, when)
        write_bill_of_materials(source, wheels, out)
    write_sums(out)
    for path in sorted(out.iterdir()):
        say(f"{path.stat().st_size / 1e6:7.2f} MB  {path.name}")


def export_commit(folder: Path) -> None:
    """The files of the last commit."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def compile_kernels(source: Path, levels: list[str]) -> None:
    """Puts the compiled kernels into the engine's package in ``source``."""
    run([sys.executable, "-m", "quire_engine.kernels", *levels], {**os.environ, "PYTHONPATH": str(source)})


def build_wheel(source: Path, out: Path, when: int) -> Path:
    """The wheel of the distribution in ``source``, moved to ``out``."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(when)}
    settings = []
    if source.name == "engine":
        settings = [f"--config-settings=--build-option=--plat-name=linux_{platform.machine()}"]
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as folder:
        # With the setuptools of this environment: nothing is fetched.
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--no-build-isolation", "--wheel-dir", folder, *settings, str(source)], environment)
        (wheel,) = Path(folder).glob("*.whl")
        if source.name == "engine":
            wheel = tag_as_manylinux(wheel, environment)
        return wheel.replace(out / wheel.name)


def tag_as_manylinux(wheel: Path, environment: Mapping[str, str]) -> Path:
    """Renames the wheel, and what it says of itself, to the oldest Linux whose C library has all that it calls."""
    # Every level is chosen by the processor that it runs on, so the tag says nothing of instruction sets.
    found = analyze_wheel_abi(
        Libc.GLIBC,
        Architecture(platform.machine()),
        wheel,
        frozenset({FROM_TORCH}),
        disable_isa_ext_check=True,
        allow_graft=False,
    )
    tag = found.overall_policy.name
    if not tag.startswith("manylinux"):
        sys.exit(f"quire: The kernels need what no manylinux has ({tag}).")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
    name = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    return wheel.with_name(name)


def package_chart(chart: Path, out: Path, when: int) -> Path:
    """The chart's archive, without what ``.helmignore`` names."""
    ignored = [line for line in (chart / ".helmignore").read_text().split() if not line.startswith("#")]
    files = [path for path in sorted(chart.rglob("*")) if path.is_file() and not any(map(path.match, ignored))]
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    target = out / f"{about['name']}-{about['version']}.tgz"
    # The writer of gzip puts the present time into its header, unless it is told another.
    with target.open("wb") as file, gzip.GzipFile(fileobj=file, filename="", mode="wb", mtime=when) as packed:
        add_files(packed, {f"{about['name']}/{path.relative_to(chart)}": path.read_bytes() for path in files}, when)
    return target


def write_oci_archive(archive: Path, chart_yaml: Path, out: Path, when: int) -> None:
    """The archive as an OCI image layout in one file, of the media types that Helm gives to what it pushes."""
    about = yaml.safe_load(chart_yaml.read_text())
    blobs: dict[str, bytes] = {}

    def add(media_type: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    annotations = {f"org.opencontainers.image.{key}": about[field] for key, field in ANNOTATIONS.items()}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": add(CONFIG_TYPE, as_json(about)),
        "layers": [add(CHART_TYPE, archive.read_bytes())],
        "annotations": annotations,
    }
    entry = add(MANIFEST_TYPE, as_json(manifest)) | {
        "annotations": {"org.opencontainers.image.ref.name": about["version"]}
    }
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [entry]}
    files = {"oci-layout": as_json({"imageLayoutVersion": "1.0.0"}), "index.json": as_json(index), **blobs}
    with (out / f"quire-chart-{about['version']}.oci.tar").open("wb") as file:
        add_files(file, files, when)


ANNOTATIONS = {"title": "name", "version": "version", "description": "description"}


def write_bill_of_materials(source: Path, wheels: Iterable[Path], out: Path) -> None:
    """The wheels with their hashes, and all that they need, extras apart, in the versions of ``constraints.txt``."""
    pins = dict(
        line.split("==") for line in (source / "constraints.txt").read_text().splitlines() if line[:1].isalnum()
    )
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    bom = Bom()
    components: dict[NormalizedName, Component] = {}
    needs: dict[NormalizedName, set[NormalizedName]] = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(wheel.read_bytes()).hexdigest())
        components[canonicalize_name(name)] = component(canonicalize_name(name), version, [digest])
    own = {
        canonicalize_name(project["name"]): project
        for project in map(project_of, (source / name for name in DISTRIBUTIONS))
    }
    waiting = [canonicalize_name(name) for name in components]
    while waiting:
        name = waiting.pop()
        if name in needs:
            continue
        # What is not installed here, such as the part of CUDA that another build of torch needs, ends its branch.
        needs[name] = requirements(own[name]["dependencies"] if name in own else installed_requirements(name))
        for needed in needs[name]:
            if needed not in components and (needed in own or needed in versions):
                version = own[needed]["version"] if needed in own else versions[needed]
                components[needed] = component(needed, version, ())
        waiting += needs[name] & components.keys()
    for name, entry in components.items():
        bom.components.add(entry)
        below: list[Dependable] = [components[needed] for needed in sorted(needs[name]) if needed in components]
        bom.register_dependency(entry, below)
    text = json.loads(JsonV1Dot6(bom).output_as_string())
    # A number and a time of its own would make two bills of one commit differ.
    text.pop("serialNumber", None)
    text["metadata"]["timestamp"] = git("log", "-1", "--format=%cI")
    version = own[canonicalize_name("quire-engine")]["version"]
    (out / f"quire-{version}.cdx.json").write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


def component(name: str, version: str, hashes: Iterable[HashType]) -> Component:
    """One package of the bill."""
    purl = PackageURL("pypi", name=name, version=version)
    kind = ComponentType.APPLICATION if name.startswith("quire") else ComponentType.LIBRARY
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl), hashes=list(hashes))


def requirements(lines: Iterable[str]) -> set[NormalizedName]:
    """The names of the packages that are needed here without an extra."""
    found = map(Requirement, lines)
    return {
        canonicalize_name(need.name) for need in found if need.marker is None or need.marker.evaluate({"extra": ""})
    }


def installed_requirements(name: str) -> list[str]:
    """What an installed package needs; nothing where it is not installed."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def project_of(folder: Path) -> dict[str, Any]:
    """The table ``project`` of a distribution's pyproject.toml."""
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def write_sums(out: Path) -> None:
    """``SHA256SUMS``, which ``sha256sum --check`` reads."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def add_files(target: Any, files: Mapping[str, bytes], when: int) -> None:
    """A tar of the files, of nobody's and of one time, so that equal contents are equal bytes."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), when, 0o644
            tar.addfile(info, io.BytesIO(content))


def as_json(value: object) -> bytes:
    """One line, with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run(command: list[str], environment: Mapping[str, str]) -> None:
    """Runs a program, whose own words say what is wrong with it."""
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"quire: {' '.join(command[:4])} … failed.")


def say(text: str) -> None:
    """One line to the person who started this."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
