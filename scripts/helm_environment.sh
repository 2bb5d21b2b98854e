#!/usr/bin/env bash
# Creates the environment of the chart's tests in the folder $1. Helm's library needs Python 3.12 or later: without it
# nothing is created, and those tests skip.
set -eu
cd "$(dirname "$0")/.."

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local name version
  for name in python3 python3.14 python3.13 python3.12; do
    if command -v "$name" >/dev/null && fits "$name"; then command -v "$name"; return; fi
  done
  command -v pyenv >/dev/null || return 0
  for version in $(pyenv versions --bare --skip-aliases); do
    name="$(pyenv root)/versions/$version/bin/python"
    if fits "$name"; then echo "$name"; return; fi
  done
}

if [ ! -x "$1/bin/python" ]; then
  python="$(find_python)"
  if [ -z "$python" ]; then
    echo "no Python 3.12 or later is here: the tests that need Helm are skipped"
    exit 0
  fi
  echo "creating the environment of the chart's tests in $1"
  "$python" -m venv "$1"
fi
scripts/pip_install.sh "$1" -r tests/kube/requirements.txt
# The library is built for some systems only.
if "$1/bin/python" -c 'import helm_sdkpy; helm_sdkpy.get_version()' 2>/dev/null; then
  touch "$1/.ready"
else
  echo "Helm's library does not run here: the tests that need Helm are skipped"
fi
