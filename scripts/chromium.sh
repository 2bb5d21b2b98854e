#!/usr/bin/env bash
# Makes sure that Chromium and its driver are on the PATH, for the tests of the page: uses those of the machine, or
# installs them if that is permitted. Tests that need them are skipped where they are missing.
set -u
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "chromium is missing and cannot be installed here" >&2; exit 0; }
root=""
[ "$(id -u)" = 0 ] || root="sudo -n"
echo "installing chromium"
export DEBIAN_FRONTEND=noninteractive
{ $root apt-get update -q && $root apt-get install -qy --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
  || echo "chromium could not be installed: the tests of the page are skipped" >&2
