#!/usr/bin/env bash
# Installs the Python package into a virtual environment in build/ and runs its tests. The first run
# fetches torch from PyPI, some 3 GB with the CUDA libraries that its Linux wheel wants; no GPU needed.
# HEXPERT_TEST_WITHOUT_TORCH=1 leaves torch and jax out, and skips what they test.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/python/venv
python3 -m venv "$venv"
requirements=python/tests/requirements.txt
if [[ -n ${HEXPERT_TEST_WITHOUT_TORCH:-} ]]; then
  requirements=build/python/requirements.txt
  grep -v '^torch\|^jax' python/tests/requirements.txt >"$requirements"
fi
pip=("$venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install --requirement "$requirements"
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
# CUDA kernels take minutes to compile; without a GPU no test here runs them.
cuda=OFF
if nvidia-smi -L &>/dev/null; then cuda=AUTO; fi
"${pip[@]}" install --config-settings=build-dir=build/python/package \
  --config-settings=cmake.define.HEXPERT_CUDA="$cuda" .
OMP_WAIT_POLICY=passive "$venv/bin/python" -m pytest --quiet "$@"
