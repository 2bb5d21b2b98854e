#!/usr/bin/env bash
# Makes sure that Firefox is on the PATH, and its driver there or in the folder $1, for the tests of the page in make soak:
# uses those of the machine, or installs them if that is permitted. Debian has no package of the driver, so cargo builds
# Mozilla's crate of it. Tests that need them are skipped where they are missing.
set -u
scripts=$(dirname "$0")
skipped() { echo "$1: the tests of the page in Firefox are skipped" >&2; exit 0; }
command -v firefox-esr >/dev/null || command -v firefox >/dev/null || "$scripts/apt_install.sh" firefox-esr ||
  skipped "Firefox is missing"
[ ! -x "$1/geckodriver" ] || exit 0
! command -v geckodriver >/dev/null || exit 0
command -v cargo >/dev/null || skipped "geckodriver is missing, and there is no cargo to build it"
echo "building geckodriver (some minutes)"
cargo install --quiet --locked --root "$1/.." geckodriver@0.37.1 || skipped "geckodriver cannot be built with $(cargo --version)"
