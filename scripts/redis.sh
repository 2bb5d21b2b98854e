#!/usr/bin/env bash
# Makes sure that redis-server is on the PATH: uses the one of the machine, or installs it if that is permitted.
set -u
command -v redis-server >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "redis-server is missing and cannot be installed here" >&2; exit 1; }
root=""
[ "$(id -u)" = 0 ] || root="sudo -n"
echo "installing redis-server"
export DEBIAN_FRONTEND=noninteractive
# Without a policy the package would start a server of its own; ours are started where they are needed.
policy=/usr/sbin/policy-rc.d
made=""
if [ ! -e "$policy" ] && printf '#!/bin/sh\nexit 101\n' | $root tee "$policy" >/dev/null 2>&1; then
  $root chmod +x "$policy" && made=yes
fi
{ $root apt-get update -q && $root apt-get install -qy --no-install-recommends redis-server; } >/dev/null 2>&1
status=$?
[ -z "$made" ] || $root rm -f "$policy"
[ $status = 0 ] || echo "redis-server could not be installed" >&2
exit $status
