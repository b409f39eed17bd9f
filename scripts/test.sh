#!/usr/bin/env bash
# Installs what is needed, builds, and runs every test: plain, then with the address and
# undefined-behaviour sanitizers, then with the thread sanitizer. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install_dependencies.sh --dev

passed=()
for preset in dev asan tsan; do
  echo "== cmake --workflow --preset $preset"
  started=$SECONDS
  if ! cmake --workflow --preset "$preset"; then
    echo "FAILED: preset $preset (passed before it: ${passed[*]:-none})"
    exit 1
  fi
  passed+=("$preset ($((SECONDS - started)) s)")
done
echo "PASSED: ${passed[*]} in $SECONDS s"
