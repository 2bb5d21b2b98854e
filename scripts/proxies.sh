#!/usr/bin/env bash
# Makes sure that nginx, HAProxy and curl are there, for the tests behind real proxies: uses those of the machine, or installs
# them if that is permitted. Tests that need them are skipped where they are missing.
set -u
PATH=$PATH:/usr/sbin
missing=()
for program in nginx haproxy curl; do command -v "$program" >/dev/null || missing+=("$program"); done
[ ${#missing[@]} = 0 ] && exit 0
"$(dirname "$0")/apt_install.sh" "${missing[@]}" || echo "the tests behind real proxies are skipped" >&2
