#!/usr/bin/env bash
# Installs what is needed, builds, and runs the tests: all quick ones plain, all of them with the
# address and undefined-behaviour sanitizers, and with the thread sanitizer all but the largest
# shapes (the code is the same; `cmake --workflow --preset tsan` runs these too). No GPU needed.
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
run asan
run tsan --exclude-regex '^Conformance\.(FlashInfer|Randomized)'
echo "PASSED: ${passed[*]}, $SECONDS s in all"
