#!/usr/bin/env bash
# Installs Debian's packages of these names, if that is permitted, and starts none of their services.
set -u
command -v apt-get >/dev/null || { echo "missing, and cannot be installed here: $*" >&2; exit 1; }
root=""
[ "$(id -u)" = 0 ] || root="sudo -n"
echo "installing $*"
export DEBIAN_FRONTEND=noninteractive
# Without a policy a package would start a server of its own; ours are started where they are needed.
policy=/usr/sbin/policy-rc.d
made=""
if [ ! -e "$policy" ] && printf '#!/bin/sh\nexit 101\n' | $root tee "$policy" >/dev/null 2>&1; then
  $root chmod +x "$policy" && made=yes
fi
{ $root apt-get update -q && $root apt-get install -qy --no-install-recommends "$@"; } >/dev/null 2>&1
status=$?
[ -z "$made" ] || $root rm -f "$policy"
[ $status = 0 ] || echo "could not be installed: $*" >&2
exit $status
