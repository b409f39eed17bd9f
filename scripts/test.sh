#!/usr/bin/env bash
# Installs what is needed, builds, and runs all quick tests. With --sanitizers also under the address
# and undefined-behaviour sanitizers and under the thread sanitizer. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install_dependencies.sh --dev

passed=()
run() {
  local preset=$1 started=$SECONDS
  shift
  echo "== preset $preset"
  if ! { cmake --preset "$preset" && cmake --build --preset "$preset" &&
    ctest --preset "$preset" "$@"; }; then
    echo "FAILED: preset $preset (passed before it: ${passed[*]:-none})"
    exit 1
  fi
  passed+=("$preset ($((SECONDS - started)) s)")
}

run dev
if [[ ${1:-} == --sanitizers ]]; then
  run asan
  # The largest shapes run the same code; tests that fork go beyond what the thread sanitizer follows.
  run tsan --exclude-regex '^Conformance\.(FlashInfer|Randomized)|Killed'
fi
echo "PASSED: ${passed[*]}, $SECONDS s in all"
