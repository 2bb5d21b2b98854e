#!/bin/sh
# Installs Quire from this checkout into .venv, which is made if it is missing. With --active it installs into the active
# environment instead; without, an active one, such as another engine's or conda's base, stays as it is.
#
#   scripts/install.sh [--cpu | --cuda] [--active]
#
# torch comes first and alone, as only torch is on an index of its own. For a CPU that is the index of torch's builds for
# CPUs (0.7 GB); where it does not answer, PyPI's CUDA build, which runs on CPUs too (5 GB). With an NVIDIA GPU, or --cuda,
# it is the CUDA build, and FlashInfer, without which attention is slow.
set -eu
case $0 in */*) cd "${0%/*}/.." ;; *) cd .. ;; esac
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
seconds=${TORCH_INDEX_TIMEOUT:-20}
device=cpu environment=.venv
for gpu in /proc/driver/nvidia/gpus/* /dev/nvidia[0-9]*; do [ ! -e "$gpu" ] || device=cuda; done
for argument in "$@"; do
  case $argument in
    --cpu | --cuda) device=${argument#--} ;;
    --active)
      environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
      [ -n "$environment" ] || { echo "error: no environment is active: activate one, or leave out --active" >&2; exit 2; } ;;
    *) echo "error: unknown option $argument; usage: scripts/install.sh [--cpu | --cuda] [--active]" >&2; exit 2 ;;
  esac
done

if [ ! -x "$environment/bin/python" ]; then
  echo "creating a virtual environment in $environment"
  ${PYTHON:-python3} -m venv "$environment" || {
    echo "error: no virtual environment could be made in $environment: install python3-venv, or name a Python with PYTHON=" >&2
    exit 1
  }
fi
install() { INSTALL_OUTPUT=shown scripts/pip_install.sh "$environment" "$@"; }

# Says why the index cannot be used. Python's own timeouts do not hold for the lookup of a name, which an alarm ends too.
ask_index() {
  "$environment/bin/python" - "$index/torch/" "$seconds" 2>/dev/null <<'PROBE'
import signal, sys, urllib.request
signal.alarm(int(sys.argv[2]))
try:
    urllib.request.urlopen(sys.argv[1]).read(1)
except OSError as error:
    print(getattr(error, "reason", error))
    raise SystemExit(1)
PROBE
}

if [ "$device" = cuda ]; then
  echo "installing torch's CUDA build and FlashInfer (about 6 GB)"
  install ./proto './engine[cuda]' ./router ./cli
  command -v nvcc >/dev/null || echo "note: FlashInfer compiles its kernels with nvcc, which is not here; docs/gpu.md#installing says how to do without"
else
  if reason=$(ask_index); then
    echo "installing torch's build for CPUs (0.7 GB)"
    PIP_EXTRA_INDEX_URL="$index ${PIP_EXTRA_INDEX_URL:-}" install torch
  else
    echo "warning: $index cannot be used (${reason:-no answer within $seconds s}): installing torch's CUDA build from PyPI instead, which runs on CPUs too (5 GB)"
  fi
  install ./proto ./engine ./router ./cli
fi
# What building leaves in the checkout would be found by every search, and a stale build/ in the next wheel.
"$environment/bin/python" - <<'CLEAN'
import pathlib, shutil
for folder in map(pathlib.Path, ("proto", "engine", "router", "cli")):
    for path in (folder / "build", *folder.glob("*.egg-info")):
        shutil.rmtree(path, ignore_errors=True)
CLEAN
[ "$environment" = .venv ] && next=". .venv/bin/activate && " || next=""
echo "installed; next: ${next}quire serve demo/model --served-model-name quire-demo"
