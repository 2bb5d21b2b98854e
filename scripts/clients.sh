#!/usr/bin/env bash
# Installs third-party clients into the folder $1, each in an environment of its own: tests/clients drives them.
# Clients that cannot be installed here (without Node or Go) are left out, and their tests skip.
set -eu
cd "$(dirname "$0")/.."
programs="$PWD/tests/clients/programs"
mkdir -p "$1"
cd "$1"

# pip takes minutes to find out which versions of some of these fit together, uv a second.
if [ ! -e uv/bin/uv ]; then
  "${PYTHON:-python3}" -m venv uv
  uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
fi
# torch takes gigabytes, and only guidellm needs it: it takes that of Quire's own environment.
echo "torch ; sys_platform == 'none'" > without-torch.txt

python_clients() {  # FOLDER PACKAGE...
  local folder="$1"; shift
  [ "$(cat "$folder/.ready" 2>/dev/null)" = "$*" ] && return
  "${PYTHON:-python3}" -m venv --without-pip "$folder"
  # Of all indexes that pip looks in, as pip does.
  uv/bin/uv pip install --quiet --index-strategy unsafe-best-match --override without-torch.txt \
    --python "$folder/bin/python" "$@"
  echo "$*" > "$folder/.ready"
}

python_clients agents openai-agents==0.24.0 openai==3.54.0
python_clients anthropic anthropic==2.14.0
python_clients cohere cohere==7.3.1 openai==3.54.0
python_clients litellm "litellm[proxy]==1.106.2"
python_clients langchain langchain==1.4.7 langchain-openai==1.7.3
python_clients llamaindex llama-index-llms-openai-like==0.8.1 llama-index-core==0.14.25
python_clients instructor instructor==1.17.0
python_clients pydantic-ai "pydantic-ai-slim[openai]==2.68.0"
python_clients dspy dspy==3.4.1
python_clients smolagents smolagents==1.26.0 openai
python_clients haystack haystack-ai==3.4.0
python_clients autogen autogen-agentchat==0.7.5 "autogen-ext[openai]==0.7.5"
python_clients semantic-kernel semantic-kernel==1.45.0
python_clients llm llm==0.36
python_clients aider aider-chat==0.86.2
python_clients lm-eval "lm-eval[api]==0.4.13" transformers==5.23.0
python_clients aiperf aiperf==0.13.0
python_clients guidellm guidellm==0.8.1
# 1.7 GB, of which a chat needs little.
[ -z "${OPEN_WEBUI:-}" ] || python_clients open-webui open-webui==0.12.4
where='import sysconfig; print(sysconfig.get_path("purelib"))'
../.venv/bin/python -c "$where" > "$(guidellm/bin/python -c "$where")/torch-of-quire.pth"
if command -v npm >/dev/null; then
  npm install --silent --no-fund --no-audit --prefix node openai@6.49.0 zod@4.6.7 @openai/agents@0.20.0 \
    ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.91 \
    langchain@1.5.14 @langchain/openai@1.6.0 @langchain/core@1.4.0 @anthropic-ai/sdk@1.14.0
  npm install --silent --no-fund --no-audit --prefix coding opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10 \
    @continuedev/cli@1.5.47 cline@3.0.65 @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0
else
  echo "there is no npm: the clients of Node are left out"
fi
if command -v go >/dev/null; then
  mkdir -p go
  (cd "$programs/go" && go build -o "$OLDPWD/go/clients" .)
  [ -x go/grpcurl ] || GOBIN="$PWD/go" go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3
else
  echo "there is no go: go-openai and grpcurl are left out"
fi
