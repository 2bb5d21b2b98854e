#!/usr/bin/env bash
# Installs third-party clients into the folder $1, each in an environment of its own: tests/clients drives them.
# Clients that cannot be installed here (without Node or Go) are left out, and their tests skip.
set -eu
cd "$(dirname "$0")/.."
programs="$PWD/tests/clients/programs"
mkdir -p "$1"
cd "$1"

python_clients() {  # FOLDER PACKAGE...
  local folder="$1"; shift
  [ -e "$folder/.ready" ] && return
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  touch "$folder/.ready"
}

python_clients agents openai-agents==0.24.0 openai==3.54.0
python_clients litellm "litellm[proxy]==1.106.2"
if command -v npm >/dev/null; then
  npm install --silent --no-fund --no-audit --prefix node openai@6.49.0 zod@4.6.7 @openai/agents@0.20.0 \
    ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.91
else
  echo "there is no npm: the clients of Node are left out"
fi
if command -v go >/dev/null; then
  mkdir -p go
  (cd "$programs/go" && go build -o "$OLDPWD/go/clients" .)
else
  echo "there is no go: go-openai is left out"
fi
