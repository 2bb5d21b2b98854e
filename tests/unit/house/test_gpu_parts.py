"""Parts of the kit for a GPU: none is larger than it may be, and what is carried is whole or refused."""

import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import gpu_kit, gpu_parts
from scripts.gpu_parts import KitError, Unit

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two packages and three files, which do not compress."""
    monkeypatch.setattr(gpu_parts, "PART_BYTES", 600_000)
    source, noise = tmp_path / "source", random.Random(0)
    for name in ("a/__init__.py", "a/__pycache__/x.pyc", "b/one", "b/two", "b/three"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(noise.randbytes(200_000))
    return source


def units(folder: Path) -> list[Unit]:
    files = [Unit(name, folder, [folder / "b" / name], "site/deep") for name in ("one", "two", "three")]
    return [Unit("python", folder, [folder / "a"]), *files]


def pack(folder: Path, out: Path) -> list[Path]:
    out.mkdir()
    return gpu_parts.pack(units(folder), out, {"gpu": "sm_90a"})


def test_parts_fit_and_hold_everything_in_order(folder: Path, tmp_path: Path) -> None:
    parts, to = pack(folder, tmp_path / "out"), tmp_path / "to"
    assert [part.name for part in parts] == ["part-1.tar", "part-2.tar"]
    assert all(part.stat().st_size <= 600_000 for part in parts)
    assert gpu_parts.missing(to) == ["part-1.tar"]
    gpu_parts.unpack(parts[1], to)
    assert gpu_parts.missing(to) == ["part-1.tar"]
    gpu_parts.unpack(parts[0], to)
    assert gpu_parts.missing(to) == []
    assert (to / "site/a/__init__.py").read_bytes() == (folder / "a/__init__.py").read_bytes()
    assert (to / "site/deep/b/three").read_bytes() == (folder / "b/three").read_bytes()
    assert not list(to.rglob("*.pyc"))


def test_the_same_files_make_the_same_parts(folder: Path, tmp_path: Path) -> None:
    first = [part.read_bytes() for part in pack(folder, tmp_path / "one")]
    os.utime(folder / "a/__init__.py", (1, 1))
    assert first == [part.read_bytes() for part in pack(folder, tmp_path / "two")]


def test_a_unit_larger_than_a_part_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "PART_BYTES", 200_000)
    with pytest.raises(KitError, match="more than a part may have"):
        pack(folder, tmp_path / "out")


def test_a_damaged_part_and_one_of_another_kit_are_refused(folder: Path, tmp_path: Path) -> None:
    first, second = pack(folder, tmp_path / "out")
    to = tmp_path / "to"
    whole = bytearray(first.read_bytes())
    whole[len(whole) // 2] ^= 1
    damaged = tmp_path / "part-damaged.tar"
    damaged.write_bytes(whole)
    with pytest.raises(KitError):
        gpu_parts.unpack(damaged, to)
    gpu_parts.unpack(first, to)
    (folder / "b/one").write_text("another")
    with pytest.raises(KitError, match="another kit"):
        gpu_parts.unpack(pack(folder, tmp_path / "other")[0], to)
    gpu_parts.unpack(second, to)
    assert gpu_parts.missing(to) == []


def test_a_large_file_travels_in_slices(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "peer.tar"
    whole.write_bytes(random.Random(1).randbytes(1_500_000))
    out, there = tmp_path / "out", tmp_path / "there"
    out.mkdir()
    there.mkdir()
    slices = gpu_parts.cut(whole, out)
    assert [each.stat().st_size for each in slices] == [600_000, 600_000, 300_000]
    sums = out / "peer.tar.json"
    for each in slices[1:]:
        (there / each.name).write_bytes(each.read_bytes())
    with pytest.raises(KitError, match=r"1 of 3 slices of peer\.tar are absent, as peer\.tar\.slice-001"):
        gpu_parts.join(sums, there)
    (there / slices[0].name).write_bytes(b"damaged")
    with pytest.raises(KitError, match="slice-001 is damaged"):
        gpu_parts.join(sums, there)
    (there / slices[0].name).write_bytes(slices[0].read_bytes())
    assert gpu_parts.join(sums, there).read_bytes() == whole.read_bytes()
    assert [path.name for path in there.iterdir()] == ["peer.tar"]


def test_a_peer_whose_slices_were_not_carried_is_named_absent(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="not carried"):
        gpu_parts.install_peer(tmp_path)


def test_a_peer_gets_an_interpreter_that_finds_its_packages_and_not_ours(tmp_path: Path) -> None:
    wheel = tmp_path / "quire_peer-1.0-py3-none-any.whl"
    script = """
import sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as wheel:
    wheel.writestr("quire_peer.py", "name = 'peer'\\n")
    info = "quire_peer-1.0.dist-info"
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: quire-peer\\nVersion: 1.0\\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr(f"{info}/RECORD", "")
"""
    subprocess.run([sys.executable, "-c", script, str(wheel)], check=True)
    with tarfile.open(tmp_path / "peer.tar", "w") as tar:
        tar.add(wheel, wheel.name)
    there = tmp_path / "to/peer"
    there.mkdir(parents=True)
    gpu_parts.cut(tmp_path / "peer.tar", there)
    python = gpu_parts.install_peer(tmp_path / "to")
    asked = "import os, quire_peer; print(quire_peer.name, os.environ.get('FLASHINFER_DISABLE_JIT'))"
    environment = {**os.environ, "FLASHINFER_DISABLE_JIT": "1"}
    said = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True, env=environment).stdout
    assert said == "peer None\n"


def test_the_script_unpacks_parts_one_by_one(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "QUIRE_GPU_KIT": str(tmp_path / "kit"), "PYTHON": sys.executable}
    said = []
    for part in pack(folder, tmp_path / "out"):
        command = [ROOT / "scripts/gpu_run.sh", "--unpack", part]
        said += subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert [line.partition(" lacks ")[2] or line[-11:] for line in said[1::2]] == ["part-2.tar", "is complete"]


def test_what_the_other_machine_has_does_not_travel_with_a_peer() -> None:
    needs = {
        "vllm": ["torch==2.11.0", "Outlines_Core==0.2", "numpy"],
        "torch": ["cuda-toolkit[cublas]==13.0.2; sys_platform == 'linux'", "triton", 'numpy; extra == "more"'],
        "cuda-toolkit": ['nvidia-cublas==13.*; extra == "cublas"'],
        "triton": [],
        "nvidia-cublas": [],
        "outlines-core": [],
        "numpy": [],
    }
    report = {"install": [{"metadata": {"name": n, "version": "1", "requires_dist": r}} for n, r in needs.items()]}
    assert gpu_kit.needed_packages(report) == ["vllm==1", "outlines-core==1", "numpy==1"]
