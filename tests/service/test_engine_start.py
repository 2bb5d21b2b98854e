"""A model folder or a setting that cannot work stops the engine at the start, with one sentence."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quire_engine.device.host import usable_cores

from tests.service.conftest import DEMO
from tests.support.forked_engines import ForkedEngine
from tests.support.ports import free_port


def broken(tmp_path: Path, **config: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def sentence_of(model: Path, tmp_path: Path, *flags: str, port: int = 0) -> tuple[int, str]:
    engine = ForkedEngine(model, tmp_path, *flags, port=port)
    code = engine.wait()
    lines = [line for line in engine.text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, engine.text
    assert "Traceback" not in engine.text
    return code, lines[0]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    code, sentence = sentence_of(tmp_path / "nowhere", tmp_path)
    assert code == 1
    assert "nowhere" in sentence


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    (folder / "model.safetensors").unlink()
    code, sentence = sentence_of(folder, tmp_path)
    assert code == 1
    assert "safetensors" in sentence


def test_a_truncated_weights_file_is_named(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    code, sentence = sentence_of(folder, tmp_path)
    assert code == 1
    assert "model.safetensors" in sentence


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    folder = broken(tmp_path, intermediate_size=config["intermediate_size"] * 2)
    code, sentence = sentence_of(folder, tmp_path)
    assert code == 1
    assert "proj" in sentence


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = broken(tmp_path, architectures=["GrandioseForCausalLM"], model_type="grandiose")
    code, sentence = sentence_of(folder, tmp_path)
    assert code == 1
    assert "GrandioseForCausalLM" in sentence


def test_memory_that_holds_no_block_is_refused_with_the_numbers(tmp_path: Path) -> None:
    code, sentence = sentence_of(DEMO, tmp_path, "--kv-cache-memory", "1000")
    assert code == 1
    assert "1000" in sentence


def test_a_missing_gpu_is_reported(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, sentence = sentence_of(DEMO, tmp_path, "--device", "cuda")
    assert code == 1
    assert "no GPU can be used" in sentence


def test_an_attention_for_another_device_is_refused(tmp_path: Path) -> None:
    code, sentence = sentence_of(DEMO, tmp_path, "--device", "cpu", "--attention", "flashinfer")
    assert code == 1
    assert "flashinfer does not run on the CPU" in sentence


def test_a_model_that_cannot_be_deterministic_is_named(tmp_path: Path) -> None:
    folder = broken(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    code, sentence = sentence_of(folder, tmp_path, "--deterministic")
    assert code == 1
    assert "GPT2LMHeadModel runs through transformers" in sentence


def test_a_port_that_is_taken_is_named_also_when_another_engine_has_it(tmp_path: Path) -> None:
    first = ForkedEngine(DEMO, tmp_path).wait_ready()
    try:
        code, sentence = sentence_of(DEMO, tmp_path, port=first.port)
        assert code == 1
        assert str(first.port) in sentence
        code, sentence = sentence_of(DEMO, tmp_path, "--metrics-port", str(first.metrics_port))
        assert code == 1
        assert f"--metrics-port: 127.0.0.1:{first.metrics_port} cannot be listened on: " in sentence
    finally:
        assert first.stop() == 0


def test_a_variable_that_is_no_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_CPU_KERNELS", "off")  # no flag, and yet known
    monkeypatch.setenv("QUIRE_ENGINE_MAX_NUM_SEQ", "8")
    code, sentence = sentence_of(DEMO, tmp_path)
    assert code == 2
    assert sentence.endswith("unknown variable QUIRE_ENGINE_MAX_NUM_SEQ (did you mean QUIRE_ENGINE_MAX_NUM_SEQS?)")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--dtype", "int3"), "--dtype"),
        (("--quantization", "awq"), "--quantization: a checkpoint says itself how it is quantised: leave it out"),
        (("--swap-space", "-1"), "--swap-space"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    code, sentence = sentence_of(DEMO, tmp_path, *flags)
    assert code == 2
    assert words in sentence


# What an engine sets for its whole process: torch's threads, oneDNN's caches, the heap, and Prometheus' samples. The
# heap's setting shows in the number of arenas that threads make which allocate at the same time.
PROCESS_STATE = """
import ctypes, os, sys, threading
os.environ.pop("OMP_NUM_THREADS", None)
caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = (ctypes.c_int, ctypes.c_void_p), (ctypes.c_void_p,)

def arenas():
    file = libc.fopen(b"arenas.xml", b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    return open("arenas.xml").read().count("<heap ")

def new_arenas():
    before, together = arenas(), threading.Barrier(13)
    allocate = lambda: (libc.malloc(1000), together.wait(), together.wait())
    threads = [threading.Thread(target=allocate) for _ in range(12)]
    for thread in threads:
        thread.start()
    together.wait()
    made = arenas() - before
    together.wait()
    return made

def tell():
    import prometheus_client.metrics, torch
    print("STATE", torch.get_num_threads(), [os.environ.get(name) for name in caches], new_arenas() > 0,
          prometheus_client.metrics._use_created, flush=True)
"""
SERVED = """
from quire_engine import cli

class Stopped:
    def __init__(self, *arguments, **options):
        tell()
        sys.exit(0)

cli.EngineServer = Stopped
cli.main()
"""
OFFLINE = """
import torch
from quire_engine.device.host import usable_cores
torch.set_num_threads(3)
import quire_engine.server.metrics
from quire_engine import LLM
with LLM(sys.argv[2], kv_cache_memory=8 << 20, swap_space=0):
    tell()
"""


def process_state(script: str, tmp_path: Path) -> str:
    command = [sys.executable, "-c", PROCESS_STATE + script, "--model", str(DEMO)]
    if script is SERVED:
        ports = ["--port", str(free_port()), "--metrics-port", str(free_port())]
        command += ["--kv-cache-memory", str(8 << 20), "--swap-space", "0", *ports]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    return next(line for line in made.stdout.splitlines() if line.startswith("STATE"))


def test_an_engine_sets_up_the_process_that_is_its_own(tmp_path: Path) -> None:
    assert process_state(SERVED, tmp_path) == f"STATE {usable_cores()} ['128', '128'] False False"


def test_an_llm_leaves_the_process_that_it_is_in_as_it_is(tmp_path: Path) -> None:
    assert process_state(OFFLINE, tmp_path) == "STATE 3 [None, None] True True"
