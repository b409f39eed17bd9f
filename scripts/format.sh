#!/usr/bin/env bash
# Formats every C++ source with clang-format 14 (another major version formats differently).
#   scripts/format.sh           rewrites files
#   scripts/format.sh --check   changes nothing, fails on the first unformatted file; exit code 77
#                               (skipped) without clang-format 14
set -euo pipefail
cd "$(dirname "$0")/.."

version=14
formatter=
for candidate in "clang-format-$version" clang-format; do
  if command -v "$candidate" >/dev/null &&
    "$candidate" --version | grep -q "version $version\."; then
    formatter=$candidate
    break
  fi
done
if [[ -z $formatter ]]; then
  echo "clang-format $version not found: skipped"
  exit 77
fi

roots=()
for root in include src tools tests bench examples python; do
  if [[ -d $root ]]; then roots+=("$root"); fi
done
mapfile -d '' files < <(find "${roots[@]}" -type f \
  \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.inl' -o -name '*.c' \
  -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z)

case "${1:-}" in
  "") "$formatter" -i "${files[@]}" ;;
  --check) "$formatter" --dry-run --Werror "${files[@]}" ;;
  *)
    echo "usage: scripts/format.sh [--check]" >&2
    exit 2
    ;;
esac
