#!/usr/bin/env bash
# Makes sure that redis-server is on the PATH: uses the one of the machine, or installs it if that is permitted.
set -u
command -v redis-server >/dev/null || "$(dirname "$0")/apt_install.sh" redis-server
