#!/usr/bin/env bash
# Measures this machine's GPU within eight minutes, with what `make gpu-kit` built: docs/gpu.md#measuring-with-a-kit.
#
#   scripts/gpu_run.sh [--peer vllm] [--out FOLDER] [...]   runs all rows; see python -m tests.bench.gpu_run --help
#   scripts/gpu_run.sh --unpack FILE...                     unpacks parts of the kit, or keeps slices of a peer
#
# PYTHON names the interpreter that has torch, python3 by default.
#
# Parts that lie in .gpu-kit/KIND are unpacked by themselves. Everything is kept in $QUIRE_GPU_KIT, or /tmp/quire-gpu-kit.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=${QUIRE_GPU_KIT:-/tmp/quire-gpu-kit}
python=${PYTHON:-python3}

if [ "${1:-}" = --unpack ]; then
  shift
  exec "$python" -m scripts.gpu_parts unpack --to "$kit" "$@"
fi
case " $* " in *" --peer "* | *" --peer="*) peer=1 ;; *) peer="" ;; esac
peer_flags=()

# The parts that were carried along with this checkout, of the GPU that is here.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .) || true
for part in .gpu-kit/sm_"${capability:-none}"a/part-*.tar ${peer:+.gpu-kit/vllm/*}; do
  [ ! -f "$part" ] || "$python" -m scripts.gpu_parts unpack --to "$kit" "$part"
done
"$python" -m scripts.gpu_parts missing --to "$kit"

if [ -n "$peer" ]; then
  if why=$("$python" -m scripts.gpu_parts install-peer --to "$kit" 2>&1); then
    peer_flags=(--peer-python "$kit/peer/python")
  else
    peer_flags=(--peer-absent "${why##*error: }")
  fi
fi

export PYTHONPATH="$PWD:$PWD/proto:$PWD/engine:$PWD/router:$PWD/cli:$kit/site" PYTHONUNBUFFERED=1
export FLASHINFER_WORKSPACE_BASE="$kit/cache" TRITON_CACHE_DIR="$kit/cache/triton" HF_HUB_OFFLINE=1
# What was compiled ahead is there or missing: at its first use compiling a kernel takes a row's time.
[ ! -d "$kit/site/flashinfer/data/aot" ] || export FLASHINFER_DISABLE_JIT=1
# Models take 35 GB: in memory, if there is room, and else on the disk.
room=$(df --output=avail --block-size=1G /dev/shm 2>/dev/null | tail -1) || true
[ "${room:-0}" -gt 48 ] && models=/dev/shm/quire-gpu-kit || models="$kit/cache"
export XDG_CACHE_HOME="$models"
mkdir -p "$kit/cache" "$models"
exec "$python" -m tests.bench.gpu_run "$@" "${peer_flags[@]}"
