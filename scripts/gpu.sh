#!/usr/bin/env bash
# The Hopper backend on a GPU machine: tests, compute-sanitizer, benchmark, the Python package.
#   scripts/gpu.sh [test] [sanitize] [bench]     all three without an argument
#   scripts/gpu.sh python                        the package: its tests, what a call costs, compute-sanitizer
# Programs are taken from $HEXPERT_BIN (a directory with test_cuda and hexpert, carried there), else built
# with the preset release. The package is $HEXPERT_WHEEL, else built; it is installed into a directory of its
# own, for $HEXPERT_PYTHON (default: python3) with its torch and pytest, cupy and jax where it has them.
# Results of the benchmark and logs of Python go to $HEXPERT_OUT (default: the current directory).
#   HEXPERT_MODELS, HEXPERT_TOKENS, HEXPERT_ROUTINGS   what to measure, separated by spaces or commas
#   HEXPERT_TEST_DATA   a copy of tests/golden, where the sources are not at their place
# Exit code 77 where there is no GPU that the backend runs on.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${HEXPERT_OUT:-$PWD}
models=${HEXPERT_MODELS:-qwen3-30b-a3b nemotron-3-nano deepseek-v3 mixtral-8x7b}
tokens=${HEXPERT_TOKENS:-1,8,32,128,512,2048,8192}
routings=${HEXPERT_ROUTINGS:-uniform zipf one half-empty}
export OMP_WAIT_POLICY=passive
export HEXPERT_TEST_DATA=${HEXPERT_TEST_DATA:-$PWD/tests/golden}

skip() {
  echo "skipped: $1"
  exit 77
}

find_programs() {
  if [[ -n ${hexpert:-} ]]; then return; fi
  if [[ -n ${HEXPERT_BIN:-} ]]; then
    test_cuda=$HEXPERT_BIN/test_cuda
    hexpert=$HEXPERT_BIN/hexpert
  else
    cmake --preset release -DHEXPERT_CUDA=ON
    cmake --build --preset release --target test_cuda hexpert_cli
    test_cuda=build/release/tests/test_cuda
    hexpert=build/release/tools/hexpert
  fi
  "$hexpert" info
  if ! "$hexpert" info | grep -q 'cuda-sm90a *available'; then skip "no GPU for cuda-sm90a"; fi
}

run_tests() {
  find_programs
  echo "== tests"
  "$test_cuda" --gtest_brief=1
  local model
  for model in ${models//,/ }; do
    "$hexpert" check --backend cuda-sm90a --model "$model" --num-experts 8 --tokens 33
  done
  if [[ -d data/tiny-swiglu ]]; then
    "$hexpert" run data/tiny-swiglu/model.safetensors --tokens data/tiny-swiglu/tokens.safetensors \
      --all-layers --backend cuda-sm90a
  fi
}

site=
trap '[[ -z $site ]] || rm -rf "$site"' EXIT

install_package() {
  python=${HEXPERT_PYTHON:-python3}
  site=$(mktemp -d)
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
  local pip=("$python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$site")
  if [[ -n ${HEXPERT_WHEEL:-} ]]; then
    "${pip[@]}" --no-index "$HEXPERT_WHEEL"
  else
    "${pip[@]}" --config-settings=build-dir=build/python/gpu --config-settings=cmake.define.HEXPERT_CUDA=ON .
  fi
  "$python" - <<'END' || skip "no GPU for this package"
import sys

import hexpert

print(hexpert.__version__, sys.version.split()[0], hexpert.list_backends())
for name in ("torch", "cupy", "jax"):
    try:
        print(name, __import__(name).__version__)
    except ImportError as error:
        print(name, "is not there:", error)
sys.exit(not any(b.available and b.device == "cuda" for b in hexpert.list_backends()))
END
}

# The tests on the GPU first and alone, since they measure; then everything else side by side.
run_python() {
  install_package
  local pytest=("$python" -m pytest -p no:cacheprovider -q -ra --durations=8) failed=() jobs=() name
  if "$python" -c 'import pytest_timeout' 2>/dev/null; then pytest+=(--timeout=120); fi
  echo "== Python package on the GPU"
  "${pytest[@]}" python/tests/test_cuda*.py 2>&1 | tee "$out/python-cuda.log" || failed+=(python-cuda)

  "${pytest[@]}" python/tests --ignore-glob='*/test_cuda*.py' &>"$out/python.log" &
  jobs=("python:$!")
  if command -v compute-sanitizer >/dev/null; then
    # Without torch's cache every tensor is an allocation of its own, and what is read beside it shows.
    # Graphs need the cache, and the tool makes streams wait for each other.
    local eager='golden or test_layer or nothing_is_copied or bounded or any_order or refus or test_cupy'
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck "($eager) and not graph and not stream" \
      &>"$out/python-memcheck.log" &
    jobs+=("python-memcheck:$!")
    memcheck 'graph_follows or refit_in_the_graph or megatron_refresh' &>"$out/python-memcheck-graphs.log" &
    jobs+=("python-memcheck-graphs:$!")
  else
    echo "compute-sanitizer not found: skipped"
  fi
  local job
  for job in "${jobs[@]}"; do
    name=${job%:*}
    wait "${job#*:}" || failed+=("$name")
    echo "== $name"
    tail -n 15 "$out/$name.log"
  done
  if [[ ${#failed[@]} -gt 0 ]]; then
    echo "FAILED: ${failed[*]} (logs in $out)"
    return 1
  fi
}

# Errors of API calls are not counted: torch, cupy and jax probe for what a device can do.
memcheck() {
  timeout "${HEXPERT_SANITIZE_SECONDS:-600}" compute-sanitizer --tool memcheck --error-exitcode 1 \
    --print-limit 20 --report-api-errors no \
    "$python" -m pytest -p no:cacheprovider -q python/tests/test_cuda.py \
    python/tests/test_cuda_frameworks.py -k "$1"
}

# Small shapes: the tools are up to a hundred times slower. Every kernel, every tile width and both kinds of
# sums are among them. racecheck sees shared memory only, initcheck global memory.
run_sanitizer() {
  find_programs
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer not found: skipped"
    return
  fi
  local small='CudaWeights.GoldenBytes:CudaWeights.SpecialExperts:CudaTokens.GoldenBytes'
  small+=':CudaTokens.OddSizesAndStrides:Golden.*:Edges.OddSizes:Edges.EmptySlots:Edges.BoundedRows'
  small+=':Edges.RowsPerExpert:Values.SpecialTokens:Values.SpecialExperts'
  small+=':CudaDecode.SmallSizes'
  small+=':CudaMoe.GraphFollowsRoutingProbabilitiesAndWeights'
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
      "$test_cuda" --gtest_brief=1 --gtest_filter="${HEXPERT_SANITIZE_FILTER:-$small}"
  done
}

run_bench() {
  find_programs
  local arguments=(bench --backend cuda-sm90a --tokens "$tokens") model routing kinds=()
  for model in ${models//,/ }; do arguments+=(--model "$model"); done
  for routing in ${routings//,/ }; do kinds+=(--routing "$routing"); done
  echo "== bench"
  "$hexpert" "${arguments[@]}" "${kinds[@]}" --json "$out/bench.json"
  echo "== bench, batch invariant"
  "$hexpert" "${arguments[@]}" --stage layer --batch-invariant \
    --json "$out/bench-batch-invariant.json"
}

for part in "${@:-all}"; do
  case $part in
    all)
      run_tests
      run_sanitizer
      run_bench
      ;;
    test) run_tests ;;
    sanitize) run_sanitizer ;;
    bench) run_bench ;;
    python) run_python ;;
    *)
      echo "usage: scripts/gpu.sh [test] [sanitize] [bench] [python]" >&2
      exit 2
      ;;
  esac
done
