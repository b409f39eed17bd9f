#!/usr/bin/env bash
# The Hopper backend on a GPU machine: tests, compute-sanitizer, benchmark.
#   scripts/gpu.sh [test] [sanitize] [bench]     all three without an argument
# Programs are taken from $HEXPERT_BIN (a directory with test_cuda and hexpert, carried there), else built
# with the preset release. Results of the benchmark go to $HEXPERT_OUT (default: the current directory).
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
if ! "$hexpert" info | grep -q 'cuda-sm90a *available'; then
  echo "skipped: no GPU for cuda-sm90a"
  exit 77
fi

run_tests() {
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

# Small shapes: the tools are up to a hundred times slower. Every kernel, every tile width and both kinds of
# sums are among them. racecheck sees shared memory only, initcheck global memory.
run_sanitizer() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer not found: skipped"
    return
  fi
  local small='CudaWeights.GoldenBytes:CudaWeights.SpecialExperts:CudaTokens.GoldenBytes'
  small+=':CudaTokens.OddSizesAndStrides:Golden.*:Edges.OddSizes:Edges.EmptySlots:Edges.BoundedRows'
  small+=':Edges.RowsPerExpert:Values.SpecialTokens:Values.SpecialExperts'
  small+=':CudaMoe.GraphFollowsRoutingProbabilitiesAndWeights'
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
      "$test_cuda" --gtest_brief=1 --gtest_filter="${HEXPERT_SANITIZE_FILTER:-$small}"
  done
}

run_bench() {
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
    *)
      echo "usage: scripts/gpu.sh [test] [sanitize] [bench]" >&2
      exit 2
      ;;
  esac
done
