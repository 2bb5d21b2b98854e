#!/usr/bin/env bash
# Generates the Python stubs of quire/v1, quire/keda and quire/envoy beside their .proto files, or under the folder given as the first
# argument.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
python=${PYTHON:-../.venv/bin/python}
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I. --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" quire/v1/*.proto quire/keda/*.proto quire/envoy/*.proto
