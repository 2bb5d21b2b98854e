#!/bin/sh
# Installs into the environment of the folder $1 what the other arguments name, as pip would. uv does it, which fetches and
# unpacks with all cores and takes a fifth of pip's time, from the indexes that pip's variables name; pip itself where uv
# cannot be had, or does not find all of it, as with an index that just a file of pip's names. With INSTALL_OUTPUT=shown
# both say what they do.
set -eu
cd "${0%/*}/.."
environment=$1
shift
[ "${INSTALL_OUTPUT:-}" = shown ] && quiet="" || quiet=--quiet
pip() { "$environment/bin/python" -m pip install $quiet --disable-pip-version-check --no-compile -c constraints.txt "$@"; }

by_uv() {
  pip --quiet uv 2>/dev/null || return 1
  # The best version of all indexes, as pip takes it; uv would stop at the first index that has the name.
  set -- pip install $quiet --index-strategy unsafe-best-match --python "$environment/bin/python" -c constraints.txt "$@"
  for url in ${PIP_EXTRA_INDEX_URL:-}; do set -- "$@" --index "$url"; done
  for url in ${PIP_FIND_LINKS:-}; do set -- "$@" --find-links "$url"; done
  [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="$PIP_CERT"
  [ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --default-index "$PIP_INDEX_URL"
  "$environment/bin/uv" "$@"
}

by_uv "$@" || pip "$@"
