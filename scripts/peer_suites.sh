#!/usr/bin/env bash
# Fetches the newest distributions of other servers and of hosted APIs' clients into the folder $1, lists the request
# parameters that are new, and makes an environment in which the servers' own HTTP suites run against Quire.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
mkdir -p "$folder/sources"
folder=$(cd "$folder" && pwd)

if [ ! -x "$folder/tools/bin/unearth" ]; then
  "${PYTHON:-python3}" -m venv "$folder/tools"
  "$folder/tools/bin/python" -m pip install --quiet --disable-pip-version-check unearth uv==0.13.9
fi

# fetch NAME DISTRIBUTION FORM: unpacks the newest one as sources/NAME. pip would build a source distribution.
fetch() {
  local place="$folder/sources/$1" file
  file=$(cd "$folder/sources" && "$folder/tools/bin/unearth" "$3" --python-version 3.12 --download . "$2" |
    sed -n 's/.*"local_path": "\(.*\)".*/\1/p')
  rm -rf "$place" && mkdir "$place"
  case $file in
    *.whl) "${PYTHON:-python3}" -m zipfile -e "$folder/sources/$file" "$place" ;;
    *) tar -xzf "$folder/sources/$file" -C "$place" --strip-components 1 ;;
  esac
  echo "$file" | sed -E 's/^[^-]+-([^-]+)(-.*|\.tar\.gz)$/\1/' > "$place/VERSION"
  rm "$folder/sources/$file"
}

fetch vllm vllm --no-binary
fetch llama.cpp llama-cpp-python --no-binary
fetch sglang sglang --only-binary
for name in openai anthropic groq together ollama cohere openrouter; do
  fetch "$name" "$name" --only-binary
done
fetch mistral mistralai --only-binary
fetch fireworks fireworks-ai --only-binary
.venv/bin/python scripts/peer_parameters.py "$folder/sources"

# The suites import parts of their own servers, which need neither a GPU nor what is compiled. torch is Quire's own.
if [ ! -e "$folder/environment/.ready" ]; then
  "$folder/tools/bin/uv" venv --quiet --clear --python .venv/bin/python "$folder/environment"
  printf '%s ; sys_platform == "none"\n' torch torchvision torchaudio > "$folder/without.txt"
  grep -v '^torch' "$folder/sources/vllm/requirements/common.txt" > "$folder/common.txt"
  "$folder/tools/bin/uv" pip install --quiet --index-strategy unsafe-best-match --override "$folder/without.txt" \
    --python "$folder/environment/bin/python" -r "$folder/common.txt" \
    pytest pytest-asyncio pytest-timeout openai anthropic jsonschema requests wget tblib filelock prometheus-client rapidfuzz
  where='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$where" > "$("$folder/environment/bin/python" -c "$where")/torch-of-quire.pth"
  touch "$folder/environment/.ready"
fi
.venv/bin/python -m tests.peers.checkpoints "$folder/checkpoints"
