"""`make gpu-kit`: builds, on a machine without a GPU, what a bare machine with one needs to run `scripts/gpu_run.sh`.

For each kind of GPU `.gpu-kit/KIND/` gets parts of at most 36 MiB (`gpu_parts.py`): FlashInfer's Python code with its
kernels compiled for that GPU, and wheels that torch's environment there lacks. `--peer vllm` adds the newest vLLM that
runs with that machine's torch, in slices. What was fetched and compiled is kept in `.gpu-kit/build/`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts import gpu_parts

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {"sm_90a": "9.0a", "sm_100a": "10.0a"}
FLASHINFER = "flashinfer-python==0.7.2.post1"
# Of what FlashInfer names as needed, its import takes this alone beside what torch's environment has.
FOR_FLASHINFER = ("apache-tvm-ffi>=0.1.11,<0.2",)
# The engine's needs, and its tests', that are not of torch and transformers.
CARRIED = (
    "annotated-types",
    "einops",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "jinja2",
    "llguidance",
    "msgspec",
    "nvidia-ml-py",
    "opentelemetry-api",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-proto",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "prometheus-client",
    "protobuf",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "python-dotenv",
    "tabulate",
    "typing-inspection",
    "uvloop",
)
# FlashInfer's sources, which only compiling needs; but the files in csrc itself are read to find out a kernel's name.
LEFT_OUT = ("cccl", "csrc/*", "cutlass", "include", "spdlog")
CUDA = "13.0"
CUDA_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
HOST_PACKAGES = ("einops", "filelock", "jinja2", "ninja", "nvidia-ml-py", "packaging", "requests", "tabulate", "tqdm")
# That of the machine with the GPU, whose torch and Triton a peer has to take.
TARGET_PYTHON, TARGET_TORCH, TARGET_TRITON = "3.12", "2.11.0", "3.6.0"
TARGET_GLIBC = 39
VERSIONS_LOOKED_AT, PEER_SLICES_AT_MOST = 15, 40


def main() -> None:
    """Builds the kits and prints their parts. Exits with one sentence where it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-kit", metavar="FOLDER")
    parser.add_argument("--gpu", default=",".join(ARCHITECTURES), metavar="KINDS", help="the kinds of GPUs")
    parser.add_argument(
        "--kernels", default="engine,short", metavar="GROUPS", help="see gpu_kernels.py; fa3 is another"
    )
    parser.add_argument("--peer", choices=("vllm",), help="pack this peer too, and nothing else")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    unknown = set(options.gpu.split(",")) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"--gpu knows {', '.join(ARCHITECTURES)}, not {', '.join(unknown)}")
    (out / "build").mkdir(parents=True, exist_ok=True)
    try:
        if options.peer:
            pack_peer(out)
        else:
            for kind in options.gpu.split(","):
                pack_kit(out, kind, options.kernels)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(map(str, error.cmd[:6]))} ... failed with {error.returncode}; its output is above")
    except (OSError, gpu_parts.KitError) as error:
        sys.exit(f"error: {error}")


def pack_kit(out: Path, kind: str, groups: str) -> None:
    """Builds the kit of one kind of GPU, with the groups of kernels that are named."""
    build = out / "build"
    kernels = compile_kernels(build, kind, groups)
    site = make_site(build)
    target = out / kind
    target.mkdir(exist_ok=True)
    facts = {"gpu": kind, "flashinfer": FLASHINFER, "python": TARGET_PYTHON, "kernels": sorted(kernels)}
    parts = gpu_parts.pack(units_of(site, kernels), target, facts)
    for part in parts:
        print(f"{part.relative_to(out)}: {part.stat().st_size / (1 << 20):.1f} MiB, sha256 {gpu_parts.digest(part)}")


def units_of(site: Path, kernels: Mapping[str, Path]) -> Iterator[gpu_parts.Unit]:
    """Python packages, then each kernel, those that every run needs first."""
    packages = list(site.iterdir())
    flashinfer = [path for path in packages if path.name.startswith("flashinfer")]
    yield gpu_parts.Unit("python", site, [path for path in packages if path not in flashinfer])
    yield gpu_parts.Unit("flashinfer", site, flashinfer)
    for name, file in kernels.items():
        folder = file.parent.parent
        yield gpu_parts.Unit(name, folder, [file.parent], "site/flashinfer/data/aot")


def make_site(build: Path) -> Path:
    """The folder of Python packages that is carried, for the Python and the C library of the other machine."""
    site = build / "site"
    wheels = [*CARRIED, *FOR_FLASHINFER, FLASHINFER]
    stamp = build / "site.txt"
    if not stamp.is_file() or stamp.read_text() != repr((wheels, LEFT_OUT, TARGET_PYTHON)):
        shutil.rmtree(site, ignore_errors=True)
        pip_target(site, "-c", ROOT / "constraints.txt", "--no-deps", *wheels, *target_flags())
        for folder in (path for name in LEFT_OUT for path in (site / "flashinfer" / "data").glob(name)):
            if folder.is_dir():
                shutil.rmtree(folder)
        for name in ("b12x", "bin"):
            shutil.rmtree(site / name, ignore_errors=True)
        for file in site.glob("*.py"):
            if file.name in ("build_backend.py", "build_utils.py", "example.py"):
                file.unlink()
        stamp.write_text(repr((wheels, LEFT_OUT, TARGET_PYTHON)))
    return site


def compile_kernels(build: Path, kind: str, groups: str) -> dict[str, Path]:
    """FlashInfer's kernels for one kind of GPU: their names and files. Compiles those that were not before."""
    folder, environment = build / "kernels" / kind, compiler_environment(build, kind)
    program = ROOT / "scripts" / "gpu_kernels.py"
    script: list[str | Path] = [sys.executable, program, "--out", folder, "--groups", groups]
    subprocess.run(script, env=environment, check=True)
    listed = subprocess.run([*script, "--list"], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    names = dict.fromkeys(line.split()[-1] for line in listed.splitlines() if line.startswith(tuple(groups.split(","))))
    return {name: folder / name / f"{name}.so" for name in names}


def compiler_environment(build: Path, kind: str) -> dict[str, str]:
    """The variables with which FlashInfer compiles for one kind of GPU, by the compiler of ``cuda_home``."""
    source, cuda = flashinfer_source(build), cuda_home(build)
    return {
        **os.environ,
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURES[kind],
        "FLASHINFER_WORKSPACE_BASE": str(build / "workspace"),
        # Headers of cuBLAS, which norms include; a linker that drops libraries without symbols drops the stub, too.
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-isystem {path}" for path in torch_headers()),
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,--no-as-needed -lcudart -lcuda",
        "PYTHONPATH": os.pathsep.join(map(str, (source, build / "host"))),
        "PATH": os.pathsep.join((str(build / "host" / "bin"), os.environ["PATH"])),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
    }


def flashinfer_source(build: Path) -> Path:
    """FlashInfer with its sources, and beside it what its import needs in this Python."""
    source = build / "flashinfer"
    if not source.is_dir():
        pip_target(build / "host", *FOR_FLASHINFER, *HOST_PACKAGES)
        pip_target(build / "flashinfer.part", "--no-deps", FLASHINFER)
        (build / "flashinfer.part").rename(source)
    return source


def cuda_home(build: Path) -> Path:
    """CUDA's compiler and headers of version ``CUDA``, laid out as FlashInfer looks for them. Its linker needs a
    ``libcuda``, which comes with a driver only: an empty one stands in, as nothing is looked up before a kernel is
    loaded.
    """
    home = build / "cuda" / "nvidia" / f"cu{CUDA.partition('.')[0]}"
    if not (home / "lib64").exists():
        pip_target(build / "cuda", "--no-deps", *(f"{name}=={CUDA}.*" for name in CUDA_PACKAGES))
        if not torch_headers():
            pip_target(build / "cuda", "--no-deps", "nvidia-cublas==13.*")
        stubs = home / "lib" / "stubs"
        stubs.mkdir(exist_ok=True)
        stub = ("-shared", "-o", stubs / "libcuda.so", "-Wl,-soname,libcuda.so.1")
        subprocess.run([os.environ.get("CXX", "c++"), "-x", "c++", os.devnull, *stub], check=True)
        (home / "lib" / "libcudart.so").symlink_to(next((home / "lib").glob("libcudart.so.*")).name)
        (home / "lib64").symlink_to("lib")
    return home


def torch_headers() -> list[Path]:
    """The folders of CUDA's headers that torch's CUDA build brings along; none with a build for CPUs."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    found = (Path(folder) / f"cu{CUDA.partition('.')[0]}" / "include" for folder in folders or ())
    return [path for path in found if (path / "cublasLt.h").is_file()]


def pack_peer(out: Path) -> None:
    """Cuts a tar of the newest vLLM that takes the other machine's torch, and of all that it needs, into slices. Raises
    ``KitError`` where there is none, or its slices would be too many to carry.
    """
    wheels, peer, pins = out / "build" / "vllm", out / "vllm", (f"torch=={TARGET_TORCH}", f"triton=={TARGET_TRITON}")
    version = newest_version("vllm", pins[0])
    packages = needed_packages(pip_report(f"vllm=={version}", *pins))
    print(f"vLLM {version}: {len(packages)} wheels", flush=True)
    shutil.rmtree(wheels, ignore_errors=True)
    pip("download", "--no-deps", "-d", wheels, *packages, *target_flags())
    whole = out / "build" / "vllm.tar"
    with tarfile.open(whole, "w") as tar:
        for wheel in sorted(wheels.iterdir()):
            tar.add(wheel, wheel.name)
    count = -(-whole.stat().st_size // gpu_parts.PART_BYTES)
    if count > PEER_SLICES_AT_MOST:
        raise gpu_parts.KitError(f"vLLM takes {count} slices, and more than {PEER_SLICES_AT_MOST} are not carried")
    shutil.rmtree(peer, ignore_errors=True)
    peer.mkdir()
    for piece in gpu_parts.cut(whole, peer):
        print(f"{piece.relative_to(out)}: {piece.stat().st_size / (1 << 20):.1f} MiB")


def newest_version(package: str, pin: str) -> str:
    """The newest version of a package that names ``pin``, such as torch==2.11.0, as needed. Raises ``KitError``."""
    listed = pip("index", "versions", package, stdout=subprocess.PIPE, quiet=False).stdout
    versions = re.findall(r"[\d.]+", listed.partition("Available versions:")[2].partition("\n")[0])
    for version in map(str, versions[:VERSIONS_LOOKED_AT]):
        (found,) = pip_report("--no-deps", f"{package}=={version}")["install"]
        if pin in found["metadata"].get("requires_dist", ()):
            return version
    raise gpu_parts.KitError(f"none of the {VERSIONS_LOOKED_AT} newest versions of {package} needs {pin}")


def needed_packages(report: Mapping[str, Any]) -> list[str]:
    """What pip would install, without torch and all that torch needs, which the other machine has."""
    found = {normal(each["metadata"]["name"]): each["metadata"] for each in report["install"]}
    there, pending = set[str](), {"torch", "triton"}
    while pending:
        name = pending.pop()
        there.add(name)
        listed = found.get(name, {}).get("requires_dist", ())
        # torch takes CUDA's libraries as extras of this one, and no other extras.
        needed = (re.match(r"[\w.-]+", each) for each in listed if "extra ==" not in each or name == "cuda-toolkit")
        pending |= ({normal(each[0]) for each in needed if each} & set(found)) - there
    return [f"{each['name']}=={each['version']}" for name, each in found.items() if name not in there]


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip_report(*wanted: str) -> dict[str, Any]:
    """What pip would install on the other machine, by metadata alone."""
    flags = ("--dry-run", "--ignore-installed", "--report", "-", "--target", "nowhere", *target_flags())
    made: dict[str, Any] = json.loads(pip("install", *flags, *wanted, stdout=subprocess.PIPE).stdout)
    return made


def target_flags() -> Sequence[str]:
    """pip's flags for wheels of the other machine."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(TARGET_GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    tag = f"cp{TARGET_PYTHON.replace('.', '')}"
    flags = ["--only-binary=:all:", "--python-version", TARGET_PYTHON, "--implementation", "cp"]
    for abi in (tag, "abi3", "none"):
        flags += ["--abi", abi]
    for platform in platforms:
        flags += ["--platform", platform]
    return flags


def pip_target(folder: Path, *arguments: str | Path) -> None:
    """Installs into a folder of its own."""
    pip("install", "--no-compile", "--upgrade", "--target", folder, *arguments)


def pip(*arguments: str | Path, stdout: int | None = None, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs this Python's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *["--quiet"] * quiet, *arguments]
    return subprocess.run(command, check=True, stdout=stdout, text=True)


if __name__ == "__main__":
    if sysconfig.get_platform() != "linux-x86_64":
        sys.exit("error: kernels for a machine with Linux on x86-64 are compiled on such a machine")
    main()
