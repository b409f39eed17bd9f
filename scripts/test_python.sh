#!/usr/bin/env bash
# Installs the Python package into a virtual environment in build/ and runs its tests. The first run
# fetches torch from PyPI, some 3 GB with the CUDA libraries that its Linux wheel wants; no GPU needed.
# It wants 10 GB of disk: pip fetches every wheel into $TMPDIR before it unpacks the first.
#   scripts/test_python.sh [--sanitizers] [arguments of pytest]
#   --sanitizers   the library and the module under the address and undefined-behaviour sanitizers
# HEXPERT_TEST_WITHOUT_TORCH=1 leaves torch and jax out, and skips what they test.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitizers=false
if [[ ${1:-} == --sanitizers ]]; then
  sanitizers=true
  shift
fi

venv=build/python/venv
python3 -m venv "$venv"
requirements=python/tests/requirements.txt
if [[ -n ${HEXPERT_TEST_WITHOUT_TORCH:-} ]]; then
  requirements=build/python/requirements.txt
  grep -v '^torch\|^jax' python/tests/requirements.txt >"$requirements"
fi
pip=("$venv/bin/pip" --quiet --no-cache-dir --disable-pip-version-check)
"${pip[@]}" install --requirement "$requirements"
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
export OMP_WAIT_POLICY=passive

if $sanitizers; then
  site=$PWD/build/python/sanitized
  rm -rf "$site"
  "${pip[@]}" install --no-deps --target "$site" --config-settings=build-dir=build/python/sanitized-package \
    --config-settings=cmake.define.HEXPERT_CUDA=OFF \
    --config-settings=install.strip=false --config-settings=cmake.define.HEXPERT_SANITIZE=address,undefined .
  # The interpreter is not sanitized: the runtime comes before it, and before the libstdc++ whose exceptions it
  # watches. Python's own allocator would hide overruns. Interpreters leak by design.
  runtimes=()
  for name in libasan.so libubsan.so libstdc++.so.6; do
    runtimes+=("$("${CXX:-c++}" -print-file-name="$name")")
  done
  exec env LD_PRELOAD="${runtimes[*]}" PYTHONPATH="$site" PYTHONMALLOC=malloc \
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1 \
    UBSAN_OPTIONS=print_stacktrace=1 \
    "$venv/bin/python" -m pytest --quiet -p no:cacheprovider "$@"
fi

# CUDA kernels take minutes to compile; without a GPU no test here runs them.
cuda=OFF
if nvidia-smi -L &>/dev/null; then cuda=AUTO; fi
"${pip[@]}" install --config-settings=build-dir=build/python/package \
  --config-settings=cmake.define.HEXPERT_CUDA="$cuda" .
"$venv/bin/python" -m pytest --quiet "$@"
