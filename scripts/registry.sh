#!/usr/bin/env bash
# Compiles the registry of the tests of models in registries, so that they find it in Go's cache: it takes a minute of a
# core. Without Go they are skipped.
set -u
command -v go >/dev/null || exit 0
cd "$(dirname "$0")/../tests/support/registry" && go build -o /dev/null . 2>/dev/null || echo "the tests' registry cannot be built" >&2
