#!/usr/bin/env bash
# Makes sure that Chromium and its driver are on the PATH, for the tests of the page: uses those of the machine, or
# installs them if that is permitted. Tests that need them are skipped where they are missing.
set -u
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
"$(dirname "$0")/apt_install.sh" chromium chromium-driver || echo "the tests of the page are skipped" >&2
