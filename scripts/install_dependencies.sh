#!/usr/bin/env bash
# Installs what is needed to build and test, on Debian 12, Ubuntu 24.04 and newer.
#   scripts/install_dependencies.sh          compiler, CMake, libraries
#   scripts/install_dependencies.sh --dev    and Clang with its tools, for tsan, fuzz, tidy, format
# Packages that are there already are left alone. Uses sudo when not run as root.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache
  nlohmann-json3-dev libfmt-dev libcli11-dev
  libgtest-dev librapidcheck-dev
  pkg-config python3-venv python3-dev
)
case "${1:-}" in
  "") ;;
  --dev) packages+=(clang clang-tidy clang-format-14 libomp-dev) ;;
  *)
    echo "usage: scripts/install_dependencies.sh [--dev]" >&2
    exit 2
    ;;
esac

if ! command -v apt-get >/dev/null; then
  echo "No apt-get here. Install the equivalents of: ${packages[*]}" >&2
  exit 1
fi

as_root() {
  if [[ $(id -u) -eq 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "Root or sudo is needed for: $*" >&2
    exit 1
  fi
}

install_missing() {
  local missing=() package
  for package in "$@"; do
    if ! dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null |
      grep -qx installed; then
      missing+=("$package")
    fi
  done
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi
  echo "== installing ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

install_missing "${packages[@]}"
if [[ ${1:-} == --dev ]]; then
  # The sanitizer and fuzzer runtimes of the default Clang are a package of their own.
  clang_major=$(clang -dumpversion | cut -d. -f1)
  install_missing "libclang-rt-$clang_major-dev"
fi
