"""What ``make dist`` makes: wheels that serve where there is no compiler, the chart in two forms, sums that hold."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from quire_engine.kernels import build

from tests.first_hour.commands import ONE_GPU, README, RECIPES, commands_of, wheels_commands
from tests.first_hour.place import is_possible
from tests.service.conftest import DEMO, ROOT, SMALL_POOLS
from tests.support.processes import Process, eventually

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("c++") is None, reason="the wheel's kernels are compiled, which needs a compiler"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is built is a commit, and this is no clone"),
]
LEVEL = next(level.name for level in build.levels_of(build.platform.machine()) if level.runs_on(build._cpu_features()))


def make_dist(folder: Path, *flags: str) -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "dist.py"), "--out", str(folder), *flags]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder, with kernels for this machine's level only, as each takes ten seconds."""
    return make_dist(tmp_path_factory.mktemp("dist"), "--levels", LEVEL)


@pytest.fixture(scope="module", autouse=True)
def authorities() -> None:
    """Here pip asks servers of others."""


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Path:
    """The ``bin`` of an environment with nothing but the wheels. What they need comes from this test's environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", *map(str, dist.glob("*.whl"))], check=True)
    # A line of a .pth file is a folder to look in; what *that* folder's .pth files say, ours as editable, is not read.
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_sums_hold_and_name_every_file(dist):
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True, capture_output=True)
    named = {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    assert len([name for name in named if name.endswith(".whl")]) == 4


def test_wheels_are_as_large_as_the_pages_say_and_have_no_tests_and_no_pictures(dist):
    page = (ROOT / "docs" / "contributing.md").read_text()
    stated = {name: float(size) for name, size in re.findall(r"^\| wheel of `([\w-]+)`.*?\| ([\d.]+) MB", page, re.M)}
    assert f"Quire is {sum(stated.values()):.1f} MB" in (ROOT / "README.md").read_text()
    for path in dist.glob("*.whl"):
        size = stated.pop(path.name.split("-")[0].replace("_", "-"))
        least = 0.3 if "engine" in path.name else 0.9  # of the engine's kernels, those of one level are here
        assert least * size <= path.stat().st_size / 1e6 <= 1.1 * size, path.name
        with zipfile.ZipFile(path) as wheel:
            check_files({file.filename: file.file_size for file in wheel.infolist()})
    assert not stated


@pytest.mark.parametrize("folder", ["proto", "engine", "router", "cli"])
def test_what_is_built_of_sources_has_no_tests_and_no_large_files(folder, tmp_path):
    archive = subprocess.run(["git", "archive", "HEAD", folder], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path, filter="data")
    build_sdist = "import setuptools.build_meta as build; build.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build_sdist], cwd=tmp_path / folder, check=True, capture_output=True)
    (sdist,) = (tmp_path / folder).glob("*.tar.gz")
    assert sdist.stat().st_size < 2e6
    with tarfile.open(sdist) as tar:
        check_files({file.name.partition("/")[2]: file.size for file in tar.getmembers() if file.isfile()})


def check_files(sizes: dict[str, int]) -> None:
    """``sizes`` has the bytes of each file of a distribution."""
    for name, size in sizes.items():
        path = Path(name)
        assert not {"tests", "images", "docs"} & set(path.parts), name
        assert path.suffix not in (".png", ".svg", ".safetensors") or path.name == "icon.svg", name
        assert size < (1e6 if path.suffix in (".so", ".gz") else 1e5), name  # kernels, and the script of Swagger UI


@pytest.mark.soak
def test_a_commit_gives_the_same_bytes_each_time(dist, tmp_path):
    again = make_dist(tmp_path / "again", "--only", "proto,router,cli")
    for path in again.iterdir():
        if path.name != "SHA256SUMS" and not path.name.endswith(".cdx.json"):  # which lacks the engine's hash
            assert path.read_bytes() == (dist / path.name).read_bytes(), path.name


def test_the_chart_is_the_same_as_an_archive_and_in_an_oci_layout(dist):
    (archive,) = dist.glob("quire-*.tgz")
    about = yaml.safe_load((ROOT / "charts" / "quire" / "Chart.yaml").read_text())
    assert archive.name == f"quire-{about['version']}.tgz"
    with tarfile.open(archive) as tar:
        names = {name for name in tar.getnames() if not name.endswith("/")}
        assert yaml.safe_load(tar.extractfile("quire/Chart.yaml").read()) == about
    tracked = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", "."],
        cwd=ROOT / "charts" / "quire",
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert names == {f"quire/{name}" for name in tracked}

    (layout,) = dist.glob("quire-chart-*.oci.tar")
    with tarfile.open(layout) as tar:

        def blob(entry: dict) -> bytes:
            content = tar.extractfile(f"blobs/{entry['digest'].replace(':', '/')}").read()
            assert len(content) == entry["size"]
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == entry["digest"]
            return content

        assert json.load(tar.extractfile("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.load(tar.extractfile("index.json"))["manifests"]
        manifest = json.loads(blob(entry))
        assert json.loads(blob(manifest["config"])) == about
        assert blob(manifest["layers"][0]) == archive.read_bytes()


def test_the_bill_of_materials_has_what_is_imported_with_its_version(dist):
    (file,) = dist.glob("*.cdx.json")
    bill = json.loads(file.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    found = {component["name"]: component for component in bill["components"]}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("torch", "grpcio", "starlette", "redis", "markupsafe"):  # the last is needed by what is needed
        assert found[name]["version"] == {key.lower(): value for key, value in pins.items()}[name]
    assert "pytest" not in found
    for wheel in dist.glob("*.whl"):
        (digest,) = found[wheel.name.split("-")[0].replace("_", "-")]["hashes"]
        assert digest["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.skipif(not is_possible(), reason="this machine does not let its user have namespaces")
@pytest.mark.parametrize("flags", [[], pytest.param(["--sources"], marks=pytest.mark.soak)], ids=["wheels", "sources"])
def test_the_first_commands_of_the_pages_run_as_they_stand_there_in_an_empty_root(dist, flags):
    command = [sys.executable, "-m", "tests.first_hour.run", "--wheels", str(dist), *flags]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    ran = re.findall(r"^\$ (.*)$", run.stdout, re.MULTILINE)
    install, *rest = commands_of(README)
    installs = [install] if flags else wheels_commands()[1:]  # torch is linked
    assert [line.partition("  <")[0] for line in ran] == [
        *installs,
        *rest,
        *commands_of(ONE_GPU),
        *commands_of(RECIPES),
    ]
    assert re.search(r"Successful requests:\s+\d+\nFailed requests:\s+0\n", run.stdout)


@pytest.mark.skipif(is_possible(), reason="the test before this one did it, and more, in a root of its own")
def test_the_installed_wheels_serve_without_a_compiler_redis_or_git(installed, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environment = {"PATH": str(installed), "HOME": str(home), "PYTHONPATH": "", "XDG_CACHE_HOME": "", "CXX": ""}
    asked = "import quire_engine, quire_router, quire_cli, quire_proto; print(quire_engine.__file__)"
    where = subprocess.run([installed / "python", "-c", asked], env=environment, check=True, capture_output=True)
    assert str(installed.parent) in where.stdout.decode()

    command = [str(installed / "quire"), "serve", str(DEMO), "--served-model-name", "demo", *SMALL_POOLS]
    tree = Process(command, tmp_path / "serve.log", environment)
    try:
        eventually(lambda: "Ctrl-C stops it" in tree.text or tree.popen.poll() is not None, timeout=180)
        assert tree.popen.poll() is None, tree.text
        url = re.findall(r"ready: \S+ on (http://\S+)", tree.text)[0]
        ask = [str(installed / "quire"), "complete", "--url", url, "--temperature", "0", "--max-tokens", "8"]
        answer = subprocess.run(
            [*ask, "Once upon a time"], env=environment, check=True, capture_output=True, text=True, timeout=60
        )
        assert answer.stdout.strip()
        measure = [str(installed / "quire"), "bench", "serve", "--base-url", url, "--num-prompts", "4"]
        flags = ["--random-input-len", "8", "--random-output-len", "8"]
        run = subprocess.run(
            [*measure, *flags], check=False, env=environment, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert re.search(r"Successful requests:\s+4", run.stdout)
    finally:
        status = tree.stop()
    assert status == 128 + 15, tree.text
    assert "kernels" not in tree.text  # neither compiled now nor missing
    assert not [*home.rglob("*.so")]
