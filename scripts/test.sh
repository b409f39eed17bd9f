#!/usr/bin/env bash
# Installs what is needed, builds, and runs all quick tests, those of the Python package too. No GPU needed.
# Options add to that:
#   --sanitizers   the same under the address and undefined-behaviour sanitizers and the thread sanitizer
#   --large        tests of more than 2^31 elements and of hundreds of experts (8 GiB of memory)
set -euo pipefail
cd "$(dirname "$0")/.."

large=false
sanitizers=false
for option in "$@"; do
  case $option in
    --large) large=true ;;
    --sanitizers) sanitizers=true ;;
    *)
      echo "usage: scripts/test.sh [--sanitizers] [--large]" >&2
      exit 2
      ;;
  esac
done

./scripts/install_dependencies.sh --dev

passed=()
run() {
  local preset=$1 started=$SECONDS
  shift
  echo "== preset $preset"
  local log=build/$preset/build.log
  if ! { cmake --preset "$preset" && cmake --build --preset "$preset" 2>&1 | tee "$log" &&
    ctest --preset "$preset" "$@"; }; then
    echo "FAILED: preset $preset (passed before it: ${passed[*]:-none})"
    exit 1
  fi
  # No error to the compiler, but a slower kernel: docs/adr/0010-hopper-gemm.md.
  if grep --fixed-strings C7512 "$log"; then
    echo "FAILED: preset $preset: the assembler serializes wgmma"
    exit 1
  fi
  passed+=("$preset ($((SECONDS - started)) s)")
}

run dev
echo "== Python package"
python_started=$SECONDS
./scripts/test_python.sh
passed+=("python ($((SECONDS - python_started)) s)")
if $large; then
  echo "== large tests"
  ctest --test-dir build/dev --label-regex '^slow$' --output-on-failure --no-tests=error
  passed+=(large)
fi
if $sanitizers; then
  run asan
  # The largest shapes run the same code; tests that fork go beyond what the thread sanitizer follows.
  run tsan --exclude-regex '^Conformance\.(FlashInfer|Randomized)|Killed'
  echo "== Python package, sanitized"
  python_started=$SECONDS
  ./scripts/test_python.sh --sanitizers
  passed+=("python sanitized ($((SECONDS - python_started)) s)")
fi
echo "PASSED: ${passed[*]}, $SECONDS s in all"
